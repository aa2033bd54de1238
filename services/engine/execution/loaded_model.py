"""One rank's loaded model: weights, buffers and KV cache."""

import logging
import time
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path

import torch

from services.common.host_memory import in_units
from services.common.settings import StartupError
from services.engine.execution.cache_need import CacheNeed, GroupNeed
from services.engine.execution.draft_loader import (
    LoadedDraft,
    can_draft_with_mtp,
    load_draft,
    load_mtp_draft,
    tap_for_head,
    tap_for_mtp,
)
from services.engine.execution.draft_model import DraftModel
from services.engine.execution.memory_budget import (
    available_memory,
    choose_num_blocks,
    context_in_force,
    require_memory,
    wanted_context,
)
from services.engine.execution.model_loader import load_any_model
from services.engine.execution.model_runner import StepCapacity, max_logit_rows
from services.engine.execution.packed_cache import open_packed
from services.engine.execution.step_limits import default_limits
from services.engine.execution.step_memory import measure_steps
from services.engine.kernels.dependent_launch import use_dependent_launch
from services.engine.kernels.library import instruction_set
from services.engine.kernels.memory import populate_behind
from services.engine.kernels.packed_file import PackedFile
from services.engine.model.architecture.cache_groups import layer_groups
from services.engine.model.attention import KVCache
from services.engine.model.checkpoint.fingerprint import weights_fingerprint
from services.engine.model.loader import multiplies_fp8, resolve_dtype
from services.engine.model.model import Model
from services.engine.model.operators.torch_operators import runs_tensor_kernels
from services.engine.model.pooler import Pooler, load_pooler
from services.engine.ranks.group import RankGroup
from services.engine.ranks.rank import Rank
from services.engine.settings import EngineSettings
from services.engine.start_check import require_room, stored_weights

__all__ = ["LoadedModel", "graph_capacity", "largest_step_tokens", "load", "step_tokens"]

_LOG = logging.getLogger("loop")
_DRIVER = Path("/proc/driver/nvidia/version")
_LEAST_DRIVERS = {"12": "525 or later", "13": "580 or later"}
"""Oldest NVIDIA drivers by major version of CUDA, as phrases for errors"""


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """This rank's part of the model, ready to compute."""

    decoder: Model
    cache: KVCache
    ranks: RankGroup
    blocks: tuple[int, ...]
    """Number of each cache group's blocks that the scheduler may allocate"""
    state_slots: int
    """Number of state slots that the scheduler may allocate; 0 = no layer is recurrent"""
    snapshot_interval: int
    """Tokens between two snapshots of a prompt's states"""
    context_length: int
    """Most tokens of a sequence by the checkpoint, the flags and the memory"""
    capacity: StepCapacity | None
    """Size of the largest step if steps are padded, and run as CUDA graphs; None = they are not"""
    fingerprint: str
    """Fingerprint of the whole model's weights"""
    kv_bytes: int
    """Bytes of the KV cache, over all ranks"""
    weight_bytes: int
    """Bytes of the weights, over all ranks"""
    pool_bytes: tuple[int, ...]
    """Bytes of a block of each cache group, and of a slot of states, over all ranks"""
    settings: EngineSettings
    """Settings with the limits of steps that are in force"""
    pooler: Pooler | None = None
    """Pooler that makes vectors of prompts; None = the model only generates"""
    draft: DraftModel | None = None
    """Model that makes draft tokens; None = there is none"""


def load(settings: EngineSettings) -> LoadedModel:
    """Load this rank's part, together with the other ranks.

    Raises CheckpointError or StartupError.
    """
    rank = Rank.from_environment()
    device = _device(settings.device, rank)
    if threads := rank.threads(settings.threads):
        torch.set_num_threads(threads)
    torch.set_grad_enabled(False)
    ranks = RankGroup.join(rank, device)
    dtype = resolve_dtype(settings.dtype, device)
    use_dependent_launch(settings.dependent_launch)
    if device.type == "cuda":  # the memory of a CPU is checked before torch is loaded
        free = available_memory(device) * rank.count
        packs = runs_tensor_kernels(dtype, device)
        keeps_fp8 = multiplies_fp8(dtype, device)
        weights = stored_weights(settings.model).on_gpu(packs=packs, keeps_fp8=keeps_fp8)
        require_room(weights, settings.weights, free, dtype.itemsize, ("fp8",))
    packed = _packed_file(settings, dtype, device, rank)
    decoder = load_any_model(
        settings.model,
        dtype,
        settings.model_code,
        progress=rank.leads,
        device=device,
        weights=settings.weights,
        with_xformers=settings.attention == "xformers",
        kv_dtype=_kv_dtype(settings),
        ranks=ranks,
        packed=packed,
    )
    if packed is not None:
        packed.publish()
    if settings.weights == "mapped" and rank.leads:
        _announce_mapped(stored_weights(settings.model).mapped_bytes, available_memory(device))
    decoder.state_dtype = resolve_dtype(settings.state_dtype)
    settings = _with_limits(settings, decoder, ranks)
    pooler = load_pooler(settings.model, decoder.spec, device, settings.pooling)
    uses_mtp = _uses_mtp(settings, decoder)
    if settings.draft:
        tap_for_head(Path(settings.draft), decoder)
    elif uses_mtp:
        tap_for_mtp(decoder)
    step_bytes = _reserve(settings, decoder, ranks)
    states = settings.state_dtype if decoder.state_bytes else "float32"
    fingerprint = weights_fingerprint(settings.model, settings.weights, states, settings.kv_dtype)
    ranks.require_agreement(
        {
            "weights": fingerprint,
            "--dtype": str(dtype),
            "--kv-dtype": str(decoder.kv_dtype),
            "--state-dtype": settings.state_dtype,
            "--device": device.type,
            "kernels for": str(instruction_set()),
        }
    )
    draft = _load_draft(settings, decoder, ranks, uses_mtp=uses_mtp)
    draft_bytes = 0 if draft is None else draft.block_bytes
    # all ranks count the pages of rank 0's draft model, so that they have the same blocks
    shared_bytes = ranks.total(draft_bytes)
    need = _cache_need(settings, decoder, shared_bytes)
    unused_bytes = shared_bytes - draft_bytes
    if device.type == "cuda":
        wanted = wanted_context(settings.context_length, need.model_context)
        step_bytes = measure_steps(
            decoder,
            step_tokens(settings, decoder),
            settings.max_running,
            graph_capacity(settings, decoder, wanted),
        )
    if draft is not None:
        step_bytes += draft.pass_bytes
    num_blocks = _choose_num_blocks(settings, decoder, ranks, need, step_bytes)
    context_length = _context_length(settings, decoder, need, num_blocks)
    capacity = graph_capacity(settings, decoder, context_length)
    cache = _allocate_cache(decoder, num_blocks, need, context_length, pads=capacity is not None)
    return LoadedModel(
        decoder,
        cache,
        ranks,
        need.divide(num_blocks),
        need.state_slots(num_blocks),
        need.snapshot_interval,
        context_length,
        capacity,
        fingerprint,
        kv_bytes=ranks.total(need.bytes(num_blocks) - num_blocks * unused_bytes),
        weight_bytes=ranks.total(decoder.weight_bytes),
        pool_bytes=(
            ranks.total(need.pool_bytes[0] - unused_bytes),
            *map(ranks.total, need.pool_bytes[1:]),
        ),
        settings=settings,
        pooler=pooler,
        draft=None if draft is None else draft.allocate(num_blocks, cache),
    )


def _uses_mtp(settings: EngineSettings, decoder: Model) -> bool:
    """Return whether the MTP layer drafts: as stated, or on a CPU if the checkpoint holds one.

    All ranks return the same. The gain of such drafts on a GPU has not been measured.
    """
    if settings.speculate == "mtp":
        return True
    if settings.speculate != "auto" or settings.draft or settings.weights == "mapped":
        return False
    return decoder.device.type == "cpu" and can_draft_with_mtp(settings.model, decoder)


def _load_draft(
    settings: EngineSettings, decoder: Model, ranks: RankGroup, *, uses_mtp: bool
) -> LoadedDraft | None:
    """Load the model of --draft, or the MTP layer, on rank 0 alone.

    Raises StartupError on all ranks.
    """
    draft, failure = None, ""
    if ranks.rank.leads:
        try:
            draft = _load_whole_draft(settings, decoder, uses_mtp=uses_mtp)
        except StartupError as error:
            failure = str(error)
    if failure := ranks.first_of(failure):
        raise StartupError(failure)
    return draft


def _load_whole_draft(
    settings: EngineSettings, decoder: Model, *, uses_mtp: bool
) -> LoadedDraft | None:
    """Load the model of --draft, or the MTP layer. Raises StartupError."""
    kv_dtype, max_running = _kv_dtype(settings), settings.max_running
    if uses_mtp:
        return load_mtp_draft(settings.model, decoder, kv_dtype, max_running)
    if not settings.draft:
        return None
    path = Path(settings.draft)
    return load_draft(path, settings.model, decoder, kv_dtype, max_running)


def _packed_file(
    settings: EngineSettings, dtype: torch.dtype, device: torch.device, rank: Rank
) -> PackedFile | None:
    """Return the file of --packed-cache. Raises StartupError on a GPU."""
    if not settings.packed_cache:
        return None
    if device.type != "cpu":
        raise StartupError("--packed-cache is for CPUs: a GPU packs nothing. Start without it.")
    cache = Path(settings.packed_cache)
    return open_packed(cache, settings.model, dtype, settings.weights, rank)


def _kv_dtype(settings: EngineSettings) -> str:
    """Return --kv-dtype; "model" if only --dtype is stated: the cache has that type, too."""
    is_stated = settings.dtype != "auto"
    return "model" if settings.kv_dtype == "auto" and is_stated else settings.kv_dtype


def _announce_mapped(mapped: int, free: int) -> None:
    if mapped > free:
        _LOG.warning(
            "%s of weights stay in the file, and only %s of memory are free: steps read the rest "
            "from the disk",
            in_units(mapped),
            in_units(free),
        )
    else:
        _LOG.info("%s of weights stay in the file; its pages fit into memory", in_units(mapped))


def _with_limits(settings: EngineSettings, decoder: Model, ranks: RankGroup) -> EngineSettings:
    """Return the settings with numbers in place of 0; all ranks have the same."""
    if settings.max_running and settings.max_step_tokens:
        return settings
    limits = default_limits(decoder)
    return replace(
        settings,
        max_running=settings.max_running or ranks.minimum(limits.running),
        max_step_tokens=settings.max_step_tokens or ranks.minimum(limits.tokens),
    )


def step_tokens(settings: EngineSettings, decoder: Model) -> int:
    """Return the most prompt tokens of a step: a whole text if the model can't divide it."""
    if not decoder.computes_whole_prompts:
        return settings.max_step_tokens
    longest = wanted_context(settings.context_length, decoder.spec.context_length)
    return max(settings.max_step_tokens, longest)


def largest_step_tokens(settings: EngineSettings, decoder: Model) -> int:
    """Return the most tokens of a step: those of prompts, and of decodes with their drafts."""
    rows = settings.max_running
    if decoder.computes_logits:
        rows = max_logit_rows(rows)
    return step_tokens(settings, decoder) + rows


def _cache_need(settings: EngineSettings, decoder: Model, draft_bytes: int) -> CacheNeed:
    """Return the cache memory that the model needs. The bytes are for this rank's part.

    draft_bytes: bytes that a draft model keeps for each block of the first group.
    """
    spec = decoder.spec
    # the layers of an encoder share the cache of one
    sharers = spec.num_layers if decoder.computes_whole_prompts else 1
    groups = [
        GroupNeed(decoder.block_bytes(group) // sharers, group.window)
        for group in layer_groups(spec)
    ]
    groups[0] = replace(groups[0], block_bytes=groups[0].block_bytes + draft_bytes)
    return CacheNeed(
        spec.context_length,
        decoder.block_size,
        groups,
        settings.max_running,
        step_tokens(settings, decoder),
        decoder.state_bytes,
    )


def _reserve(settings: EngineSettings, decoder: Model, ranks: RankGroup) -> int:
    """Allocate the buffers of the largest step, and return the bytes a CPU needs in addition.

    Raises StartupError.
    """
    tokens = largest_step_tokens(settings, decoder)
    rows = max_logit_rows(settings.max_running) if decoder.computes_logits else 0
    context = wanted_context(settings.context_length, decoder.spec.context_length)
    further = decoder.pass_bytes(tokens, rows, context) if decoder.device.type == "cpu" else 0
    require_memory(
        decoder.bytes_to_reserve(tokens, rows) + further,
        f"A step of --max-step-tokens {settings.max_step_tokens} and "
        f"--max-running {settings.max_running}",
        decoder.device,
        _sharers(decoder, ranks),
    )
    decoder.reserve(tokens, rows)
    return further


def _choose_num_blocks(
    settings: EngineSettings,
    decoder: Model,
    ranks: RankGroup,
    need: CacheNeed,
    step_bytes: int,
) -> int:
    """Return the number of blocks that every rank has memory for.

    step_bytes: bytes that the steps of this rank take in addition to the cache.
    """
    if decoder.computes_whole_prompts:
        return step_tokens(settings, decoder) // decoder.block_size + settings.max_running
    free = available_memory(decoder.device) // _sharers(decoder, ranks) - step_bytes
    return ranks.minimum(
        choose_num_blocks(
            settings.kv_memory,
            settings.context_length,
            need,
            decoder.device.type,
            max(free, 0),
            has_mapped_weights=settings.weights == "mapped",
        )
    )


def _context_length(
    settings: EngineSettings, decoder: Model, need: CacheNeed, num_blocks: int
) -> int:
    """Return the most tokens of a sequence."""
    if decoder.computes_whole_prompts:
        return wanted_context(settings.context_length, need.model_context)
    return context_in_force(settings.context_length, need, num_blocks)


def graph_capacity(
    settings: EngineSettings, decoder: Model, context_length: int
) -> StepCapacity | None:
    """Return the size of the largest decode step if decode steps run as CUDA graphs.

    context_length: most tokens of a sequence.
    """
    if decoder.device.type != "cuda" or not decoder.is_capturable:
        return None
    blocks = -(-context_length // decoder.block_size)
    # An engine that starts without adapters does not spend time and memory on graphs for them.
    adapters = settings.max_adapters + len(decoder.spec.tasks) if settings.adapters else 0
    return StepCapacity(
        largest_step_tokens(settings, decoder), settings.max_running, blocks, adapters
    )


def _sharers(decoder: Model, ranks: RankGroup) -> int:
    """Return the number of ranks that share this rank's memory."""
    return ranks.rank.local_count if decoder.device.type == "cpu" else 1


def _allocate_cache(
    decoder: Model, num_blocks: int, need: CacheNeed, context_length: int, *, pads: bool
) -> KVCache:
    """Allocate the cache.

    pads: whether steps have padded rows, which write to one more block of each group and one slot.
    """
    allocating = time.monotonic()
    blocks = [count + pads for count in need.divide(num_blocks)]
    slots = need.state_slots(num_blocks)
    cache = decoder.allocate_cache(blocks, num_states=slots + (pads and slots > 0))
    if decoder.device.type == "cpu":
        populate_behind([*cache.pages, *chain.from_iterable(cache.states.values())])
    size = need.bytes(num_blocks)
    _LOG.debug(
        "KV cache: %d blocks of %d tokens, %.2f GiB, allocated in %.1f s",
        num_blocks,
        cache.block_size,
        size / 2**30,
        time.monotonic() - allocating,
    )
    if context_length < need.model_context:
        _LOG.info(
            "context %s of %s tokens: %s of KV cache; --context-length and --kv-memory change it",
            f"{context_length:,}",
            f"{need.model_context:,}",
            in_units(size),
        )
    return cache


def _device(name: str, rank: Rank) -> torch.device:
    if name == "cpu":
        return torch.device("cpu")
    count = torch.cuda.device_count()
    if not count:
        if name == "cuda":
            raise StartupError(f"--device cuda: {_why_no_device()}; use --device cpu.")
        if _DRIVER.exists():
            _LOG.warning("the GPU is not used: %s", _why_no_device())
        return torch.device("cpu")
    if rank.local_number >= count:
        raise StartupError(
            f"{rank.local_count} ranks on this machine need a CUDA device each; it has {count}."
        )
    device = torch.device("cuda", rank.local_number)
    torch.cuda.set_device(device)
    return device


def _why_no_device() -> str:
    if torch.version.cuda is None:
        return "this torch was built without CUDA"
    if not _DRIVER.exists():
        return "the machine has no NVIDIA driver"
    words = _DRIVER.read_text().split("Module", 1)[-1].split()
    return (
        f"torch can't use the NVIDIA driver {words[0] if words else ''}; its CUDA "
        f"{torch.version.cuda} needs {_LEAST_DRIVERS.get(torch.version.cuda[:2], 'a newer one')}"
    )
