"""One rank's loaded model: weights, buffers and KV cache."""

import logging
import time
from dataclasses import dataclass
from pathlib import Path

import torch

from services.common.settings import StartupError
from services.engine.execution.memory_budget import choose_num_blocks, require_memory
from services.engine.execution.model_runner import StepCapacity, max_logit_rows
from services.engine.execution.step_memory import measure_steps
from services.engine.kernels.library import instruction_set
from services.engine.kernels.memory import touch
from services.engine.model.attention import KVCache
from services.engine.model.checkpoint.fingerprint import weights_fingerprint
from services.engine.model.decoder import Decoder
from services.engine.model.loader import load_model, resolve_dtype
from services.engine.model.pooler import Pooler, load_pooler
from services.engine.ranks.group import RankGroup
from services.engine.ranks.rank import Rank
from services.engine.settings import EngineSettings

__all__ = ["LoadedModel", "graph_capacity", "load", "step_tokens"]

_LOG = logging.getLogger("loop")
_DRIVER = Path("/proc/driver/nvidia/version")
_LEAST_DRIVERS = {"12": "525 or later", "13": "580 or later"}
"""NVIDIA drivers by the version of CUDA"""


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """This rank's part of the model, ready to compute."""

    decoder: Decoder
    cache: KVCache
    ranks: RankGroup
    num_blocks: int
    """KV blocks that the scheduler may allocate"""
    fingerprint: str
    """Fingerprint of the whole model's weights"""
    kv_bytes: int
    """Bytes of the KV cache, over all ranks"""
    weight_bytes: int
    """Bytes of the weights, over all ranks"""
    pooler: Pooler | None = None
    """Makes vectors of prompts; None: the model only generates"""


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
    decoder = load_model(
        settings.model,
        dtype,
        progress=rank.leads,
        device=device,
        weights=settings.weights,
        with_xformers=settings.attention == "xformers",
        ranks=ranks,
    )
    pooler = load_pooler(settings.model, decoder.spec, device, settings.pooling)
    _reserve(settings, decoder, ranks)
    fingerprint = weights_fingerprint(settings.model, settings.weights)
    ranks.require_agreement(
        {
            "weights": fingerprint,
            "--dtype": str(dtype),
            "--device": device.type,
            "kernels for": str(instruction_set()),
        }
    )
    per_block = KVCache.bytes_per_block(decoder.spec, decoder.block_size, decoder.dtype)
    if decoder.computes_whole_prompts:
        per_block //= decoder.spec.num_layers  # which share the cache of one
    step_bytes = 0
    if device.type == "cuda":
        capacity = graph_capacity(settings, decoder)
        step_bytes = measure_steps(
            decoder, step_tokens(settings, decoder), settings.max_running, capacity
        )
    num_blocks = _choose_num_blocks(settings, decoder, ranks, per_block, step_bytes)
    return LoadedModel(
        decoder,
        _allocate_cache(decoder, num_blocks, per_block),
        ranks,
        num_blocks,
        fingerprint,
        kv_bytes=ranks.total(num_blocks * per_block),
        weight_bytes=ranks.total(decoder.weight_bytes),
        pooler=pooler,
    )


def step_tokens(settings: EngineSettings, decoder: Decoder) -> int:
    """Return the most prompt tokens of a step; a whole text where the model can't divide it."""
    least = decoder.spec.context_length if decoder.computes_whole_prompts else 0
    return max(settings.max_step_tokens, least)


def _reserve(settings: EngineSettings, decoder: Decoder, ranks: RankGroup) -> None:
    """Allocate the buffers of the largest step, or raise StartupError."""
    tokens = step_tokens(settings, decoder) + settings.max_running
    rows = max_logit_rows(settings.max_running) if decoder.computes_logits else 0
    require_memory(
        decoder.bytes_to_reserve(tokens, rows),
        f"A step of --max-step-tokens {settings.max_step_tokens} and "
        f"--max-running {settings.max_running}",
        decoder.device,
        _sharers(decoder, ranks),
    )
    decoder.reserve(tokens, rows)


def _choose_num_blocks(
    settings: EngineSettings,
    decoder: Decoder,
    ranks: RankGroup,
    per_block: int,
    step_bytes: int,
) -> int:
    """Return the number of blocks of `per_block` bytes that every rank has memory for.

    step_bytes: what the steps of this rank take beside the cache.
    """
    least = -(-decoder.spec.context_length // decoder.block_size)
    if decoder.computes_whole_prompts:
        return step_tokens(settings, decoder) // decoder.block_size + settings.max_running
    return ranks.minimum(
        choose_num_blocks(
            settings.kv_memory,
            per_block,
            least * settings.max_running,
            least,
            decoder.device,
            _sharers(decoder, ranks),
            step_bytes,
        )
    )


def graph_capacity(settings: EngineSettings, decoder: Decoder) -> StepCapacity | None:
    """Return the size of the largest decode step if decode steps run as CUDA graphs."""
    if decoder.device.type != "cuda" or not decoder.is_capturable:
        return None
    blocks = -(-decoder.spec.context_length // decoder.block_size)
    tokens = step_tokens(settings, decoder) + settings.max_running
    return StepCapacity(tokens, settings.max_running, blocks)


def _sharers(decoder: Decoder, ranks: RankGroup) -> int:
    """Return how many ranks share this rank's memory."""
    return ranks.rank.local_count if decoder.device.type == "cpu" else 1


def _allocate_cache(decoder: Decoder, num_blocks: int, per_block: int) -> KVCache:
    is_on_gpu = decoder.device.type == "cuda"
    allocating = time.monotonic()
    # padded rows of decode graphs on a GPU write to one more block
    cache = decoder.allocate_cache(num_blocks + is_on_gpu)
    if not is_on_gpu:
        touch((*cache.keys, *cache.values))
    _LOG.info(
        "KV cache: %d blocks of %d tokens, %.2f GiB, allocated in %.1f s",
        num_blocks,
        cache.block_size,
        num_blocks * per_block / 2**30,
        time.monotonic() - allocating,
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
