"""A step loop over a tiny model with random weights, and requests for it."""

import json
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from itertools import accumulate, cycle
from pathlib import Path

import torch
from hypothesis import settings
from safetensors.torch import save_file

from services.engine.checked_request import (
    CheckedRequest,
    Resume,
    SamplingSettings,
    StoppingSettings,
    bitmask,
)
from services.engine.execution.draft_model import DraftModel
from services.engine.execution.head_drafts import HeadDrafts
from services.engine.execution.layered_drafts import LayeredDrafts
from services.engine.execution.model_runner import ModelRunner, StepCapacity, max_logit_rows
from services.engine.loop.request_table import LoopLimits
from services.engine.loop.step_loop import StepLoop
from services.engine.messages import AddRequest, Command, Output, Token
from services.engine.model.attention import KVCache
from services.engine.model.draft_head import DraftHead
from services.engine.model.layered_head import LayeredHead
from services.engine.model.loader import load_model
from services.engine.model.model import Model
from services.engine.scheduling.cache_limits import CacheLimits, GroupLimits
from services.engine.scheduling.cache_pools import CachePools
from services.engine.scheduling.scheduler import Scheduler
from services.engine.scheduling.speculation import DraftKind
from services.engine.scheduling.step_plan import SchedulerLimits

VOCABULARY = 48
CONTEXT = 96
EOS = 0
BLOCK = 4
SAME_EXAMPLES = settings(derandomize=True)
"""Settings of tests that compare tokens drawn on two paths, whose logprobs differ by up to 1e-5.
If the noise lies that close to the border between two tokens, rounding decides. With random
examples, one draw in some hundred thousand would fail."""


def make_checkpoint(directory: Path, seed: int = 5, vocabulary: int = VOCABULARY) -> Path:
    """Write a Llama of 2 layers whose greedy output depends on its input."""
    hidden, inner, heads, kv_heads, dim = 32, 48, 4, 2, 8
    generator = torch.Generator().manual_seed(seed)

    def weight(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator) * 0.3

    tensors = {
        "model.embed_tokens.weight": weight(vocabulary, hidden),
        "model.norm.weight": torch.ones(hidden),
    }
    for layer in range(2):
        prefix = f"model.layers.{layer}."
        tensors |= {
            f"{prefix}input_layernorm.weight": torch.ones(hidden),
            f"{prefix}post_attention_layernorm.weight": torch.ones(hidden),
            f"{prefix}self_attn.q_proj.weight": weight(heads * dim, hidden),
            f"{prefix}self_attn.k_proj.weight": weight(kv_heads * dim, hidden),
            f"{prefix}self_attn.v_proj.weight": weight(kv_heads * dim, hidden),
            f"{prefix}self_attn.o_proj.weight": weight(hidden, heads * dim),
            f"{prefix}mlp.gate_proj.weight": weight(inner, hidden),
            f"{prefix}mlp.up_proj.weight": weight(inner, hidden),
            f"{prefix}mlp.down_proj.weight": weight(hidden, inner),
        }
    directory.mkdir(parents=True, exist_ok=True)
    save_file(tensors, directory / "model.safetensors")
    config = {
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_hidden_layers": 2,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": dim,
        "vocab_size": vocabulary,
        "max_position_embeddings": CONTEXT,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "tie_word_embeddings": True,
        "torch_dtype": "float32",
        "eos_token_id": EOS,
    }
    (directory / "config.json").write_text(json.dumps(config))
    return directory


def load_tiny(directory: Path, seed: int = 5, vocabulary: int = VOCABULARY) -> Model:
    return load_model(make_checkpoint(directory, seed, vocabulary), torch.float32)


def make_loop(
    decoder: Model,
    *,
    blocks: int = 256,
    step_tokens: int = 256,
    running: int = 64,
    waiting: int = 1000,
    speculate: bool = False,
    overlaps: bool = False,
    isolates: bool = True,
    padded: bool = False,
    ticks: Sequence[float] = (0.01,),
    block: int = BLOCK,
    runner: Callable[[Model, KVCache, StepCapacity | None], ModelRunner] = ModelRunner,
    draft: Model | None = None,
    draft_model: type[DraftModel] = DraftModel,
    head_drafts: type[HeadDrafts] | None = None,
    targets: Sequence[int] = (),
    most_kept: int = 4096,
) -> StepLoop:
    """Return a loop whose clock advances by the next of `ticks`, in a cycle, at each reading.

    padded: pad decode steps like a GPU. draft: model or head that makes draft tokens. head_drafts:
    the class that runs a head; None = the one that an engine takes. targets and most_kept:
    parameters of `HeadDrafts`.
    """
    clock = accumulate(cycle(ticks))
    drafts: DraftModel | None = None
    clocks = (lambda: next(clock)), (lambda: 0.0)
    if draft is not None:
        own = draft.allocate_cache(blocks + padded, block)
        size = decoder.spec.vocab_size
        if isinstance(draft, DraftHead):
            kind, kept = DraftKind.EAGLE, most_kept
            runs = LayeredDrafts if isinstance(draft, LayeredHead) else HeadDrafts
            runs = head_drafts or runs
            drafts = runs(draft, own, size, 64, kind, targets, kept, *clocks)
        else:
            drafts = draft_model(draft, own, size, 64, *clocks)
        if padded:
            drafts.reserve(StepCapacity(64, running, CONTEXT // block), blocks)
        for capture in drafts.captures:
            capture()
    limits = SchedulerLimits(
        running,
        step_tokens,
        2.0,
        32,
        speculate,
        draft=None if drafts is None else drafts.limits,
    )
    return StepLoop(
        Scheduler(limits, CachePools(CacheLimits(block, (GroupLimits(blocks),)))),
        runner(
            decoder,
            decoder.allocate_cache(blocks + 1, block),
            StepCapacity(step_tokens + max_logit_rows(running), running, CONTEXT // block)
            if padded
            else None,
        ),
        LoopLimits(frozenset({EOS}), waiting),
        lambda: next(clock),
        overlaps=overlaps,
        isolates=isolates,
        draft=drafts,
    )


def make_request(
    handle: int,
    prompts: Sequence[Sequence[int]],
    *,
    n: int = 1,
    max_tokens: int = 8,
    temperature: float = 0.0,
    seed: int = 1,
    sampling: SamplingSettings | None = None,
    min_tokens: int = 0,
    ignore_eos: bool = True,
    stop: frozenset[int] = frozenset(),
    logprobs: int | None = None,
    prompt_logprobs: int | None = None,
    resume: Sequence[Resume] = (),
    constrained: bool = False,
    credit: int | None = None,
    salt: bytes = b"",
    priority: int = 0,
    context: int = CONTEXT,
    arrival: float | None = None,
) -> AddRequest:
    checked = CheckedRequest(
        prompts=prompts,
        n=n,
        sampling=sampling or SamplingSettings(temperature, 1.0, 0, 0.0, seed),
        stopping=StoppingSettings(max_tokens, min_tokens, ignore_eos, context, stop),
        logprobs=logprobs,
        prompt_logprobs=prompt_logprobs,
        resume=resume,
        constrained=constrained,
    )
    now = time.monotonic() if arrival is None else arrival
    return AddRequest(handle, checked, credit, salt, priority, now)


def with_sampling(request: AddRequest, sampling: SamplingSettings) -> AddRequest:
    """Return a copy of the request with other sampling settings."""
    return replace(request, checked=replace(request.checked, sampling=sampling))


def with_resume(request: AddRequest, *resume: Resume) -> AddRequest:
    """Return a copy of the request that resumes these sequences."""
    return replace(request, checked=replace(request.checked, resume=resume))


def mask_of(ids: Collection[int]) -> bytes:
    """Return the bitmask of these ids."""
    return bitmask(ids, VOCABULARY)


def run(loop: StepLoop, commands: Sequence[Command], *, most_steps: int = 3000) -> list[Output]:
    """Send all commands at once, step until no request is left, and check the blocks each time."""
    outputs: list[Output] = []
    pending = list(commands)

    def take() -> list[Command]:
        taken, pending[:] = list(pending), []
        return taken

    for _ in range(most_steps):
        outputs += loop.step(take).outputs
        loop.check()
        if loop.is_idle:
            return outputs
    raise AssertionError("the loop never came to rest")


def tokens_of(outputs: Sequence[Output]) -> dict[tuple[int, int], list[int]]:
    """Return generated ids by (handle, sequence)."""
    tokens: dict[tuple[int, int], list[int]] = {}
    for output in outputs:
        if isinstance(output, Token):
            mine = tokens.setdefault((output.handle, output.sequence), [])
            mine.append(output.id)
    return tokens
