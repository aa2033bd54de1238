"""A step loop with its model in memory."""

from contextlib import nullcontext
from dataclasses import dataclass

from services.engine.batch.buckets import decode_sizes
from services.engine.checked_request import Pooled
from services.engine.execution.first_steps import run_first_steps
from services.engine.execution.loaded_model import LoadedModel, load, step_tokens
from services.engine.execution.model_runner import ModelRunner, max_logit_rows
from services.engine.execution.start_progress import StartProgress
from services.engine.execution.step_memory import usable_kernels
from services.engine.kernels.library import instruction_set_name
from services.engine.loop.request_table import LoopLimits
from services.engine.loop.step_loop import StepLoop
from services.engine.model.architecture.cache_groups import layer_groups
from services.engine.model.attention import KVCache
from services.engine.model.checkpoint.generation import (
    load_generation_defaults,
    load_suppressed_ids,
)
from services.engine.model.checkpoint.sentence_modules import Pooling
from services.engine.model.model import Model
from services.engine.model_description import ModelDescription
from services.engine.sampling.warm_up import warm_up
from services.engine.scheduling.cache_limits import CacheLimits, GroupLimits
from services.engine.scheduling.cache_pools import CachePools
from services.engine.scheduling.scheduler import Scheduler
from services.engine.scheduling.step_plan import SchedulerLimits
from services.engine.settings import EngineSettings

__all__ = ["LoadedLoop", "load_loop"]


@dataclass(frozen=True, slots=True)
class LoadedLoop:
    """A step loop with its caches, its model and the model's description."""

    steps: StepLoop
    caches: CachePools
    model: LoadedModel
    description: ModelDescription


def load_loop(settings: EngineSettings) -> LoadedLoop:
    """Load the model and make its loop. Raises CheckpointError or StartupError."""
    model = load(settings)
    settings = model.settings
    decoder, cache, spec = model.decoder, model.cache, model.decoder.spec
    pooler = model.pooler
    max_step_tokens = step_tokens(settings, decoder)
    groups = zip(model.blocks, layer_groups(spec), strict=True)
    caches = CachePools(
        CacheLimits(
            cache.block_size,
            [GroupLimits(blocks, group.window) for blocks, group in groups],
            model.state_slots,
            model.snapshot_interval,
            max_step_tokens,
            max_step_tokens if spec.images_see_ahead else 1,
        )
    )
    scheduler = Scheduler(
        SchedulerLimits(
            max_running=settings.max_running,
            max_step_tokens=max_step_tokens,
            mixed_step_factor=settings.mixed_step_factor,
            rows_at_once=decoder.rows_at_once,
            speculate=settings.speculate == "ngram",
            keeps_prompts_whole=decoder.computes_whole_prompts,
            keeps_images_whole=spec.images_see_ahead,
            max_logit_rows=max_logit_rows(settings.max_running),
            prompts_have_fixed_cost=decoder.device.type == "cuda",
            draft=None if model.draft is None else model.draft.limits,
        ),
        caches,
    )
    limits = LoopLimits(
        eos_token_ids=frozenset(spec.eos_token_ids),
        max_waiting=settings.max_waiting,
        starvation_seconds=settings.stall_seconds,
    )
    description = ModelDescription(
        architecture=spec.architecture,
        dtype=str(decoder.dtype).removeprefix("torch."),
        device=decoder.device.type,
        context_length=model.context_length,
        vocabulary_size=spec.vocab_size,
        eos_token_ids=spec.eos_token_ids,
        bos_token_id=spec.bos_token_id,
        recommended=load_generation_defaults(settings.model),
        weights_fingerprint=model.fingerprint,
        block_size=cache.block_size,
        total_blocks=caches.num_blocks,
        cache_groups=caches.describe(),
        kv_bytes=model.kv_bytes,
        weight_bytes=model.weight_bytes,
        pool_bytes=model.pool_bytes,
        max_running=settings.max_running,
        max_step_tokens=settings.max_step_tokens,
        kernels=_kernels(decoder),
        model_code=decoder.code.value,
        takes_adapters=decoder.adapters is not None,
        tasks=spec.tasks,
        suppressed=load_suppressed_ids(settings.model, spec.vocab_size),
        images_are_consecutive=spec.has_grid_positions or spec.images_see_ahead,
        generates=not spec.is_encoder and spec.family.has_logits,
        pooled=_pooled(model),
        vector_width=0 if pooler is None else pooler.width,
        token_width=0 if pooler is None else pooler.token_width,
        weighs_tokens=pooler is not None and pooler.token_heads is not None,
        has_scores=pooler is not None and pooler.scores,
        vectors_are_normalized=pooler is not None and pooler.normalizes,
        takes_pairs=spec.num_token_types > 1,
        hides_ends=spec.is_encoder and spec.disentangled is None,
    )
    runner = ModelRunner(decoder, cache, model.capacity)
    model.ranks.watch()  # a rank may end while the graphs are captured
    _capture_graphs(runner, model)
    overlaps = decoder.device.type == "cuda"
    _warm_up(decoder, cache, description)
    if model.draft is not None:
        with usable_kernels() if decoder.device.type == "cuda" else nullcontext():
            model.draft.warm_up()
    alone = model.ranks.rank.is_alone
    steps = StepLoop(
        scheduler,
        runner,
        limits,
        overlaps=overlaps,
        isolates=alone,
        pooler=pooler,
        draft=model.draft,
    )
    return LoadedLoop(steps, caches, model, description)


def _warm_up(decoder: Model, cache: KVCache, description: ModelDescription) -> None:
    """Run the first steps and draws, which would delay the first request by seconds."""
    if decoder.device.type == "cpu":
        run_first_steps(decoder, cache)
        if description.generates:
            warm_up(description.vocabulary_size, decoder.device)
    elif description.generates:
        with usable_kernels():
            warm_up(description.vocabulary_size, decoder.device)


def _pooled(model: LoadedModel) -> Pooled | None:
    if model.pooler is None:
        return None
    is_last = model.pooler.pooling is Pooling.LAST and not model.decoder.computes_whole_prompts
    return Pooled.LAST if is_last else Pooled.ALL


def _capture_graphs(runner: ModelRunner, model: LoadedModel) -> None:
    """Capture all CUDA graphs, on all ranks. Raises StartupError."""
    capacity = model.capacity
    if capacity is None:
        return
    # a block table also names blocks behind the window, which its sequence has released
    has_window = layer_groups(model.decoder.spec)[0].window > 0
    num_blocks = capacity.blocks * capacity.sequences if has_window else model.blocks[0]
    sizes = decode_sizes(capacity.sequences, capacity.blocks, num_blocks)
    progress = StartProgress("CUDA graphs", len(sizes) + len(runner.mixed_sizes), shown=True)
    with usable_kernels():
        runner.capture_graphs(sizes, progress)
        runner.capture_mixed(runner.mixed_sizes, progress)


def _kernels(decoder: Model) -> str:
    if decoder.device.type != "cpu":
        return f"{decoder.device.type} {decoder.attention_name}"
    return instruction_set_name()
