"""Memory budget: the context and the KV blocks that fit into free memory."""

import torch

from services.common.host_memory import free_host_memory, in_units
from services.common.settings import StartupError
from services.engine.execution.cache_need import CacheNeed
from services.engine.settings import parse_bytes, parse_share, parse_tokens

__all__ = [
    "available_memory",
    "choose_num_blocks",
    "context_in_force",
    "require_memory",
    "wanted_context",
]

_SHARES = {"cpu": 0.5, "cuda": 0.97}
"""Share of free memory that the KV cache takes by default. A machine has other uses for the rest; a
GPU needs some for fragments and for kernels that are loaded later"""
_MAPPED_SHARE = 0.125
"""Share of free memory with mapped weights: experts need the pages that the cache leaves"""
_RESERVE = 512 * 2**20
"""Bytes left for activations and everything else"""
_LEAST_CONTEXT = 512
"""Fewest tokens of a context if --context-length is auto"""


def wanted_context(wanted: str, model_context: int) -> int:
    """Return the most tokens of a sequence that --context-length allows. Raises StartupError."""
    if wanted in ("auto", "max"):
        return model_context
    tokens = parse_tokens(wanted)
    if tokens > model_context:
        raise StartupError(
            f"--context-length {tokens} is more than the {model_context} tokens of the checkpoint."
        )
    return tokens


def context_in_force(wanted: str, need: CacheNeed, num_blocks: int) -> int:
    """Return the tokens of a sequence for which `num_blocks` have room. Raises StartupError."""
    return min(wanted_context(wanted, need.model_context), need.longest(num_blocks))


def choose_num_blocks(
    kv_memory: str,
    context_length: str,
    need: CacheNeed,
    device_type: str,
    free: int,
    *,
    has_mapped_weights: bool = False,
) -> int:
    """Return the number of blocks of the first cache group, by the flags of these names.

    free: number of bytes that the cache may use of the memory of the device, "cpu" or "cuda" by
    `device_type`. Raises StartupError with the amount of missing memory.
    """
    wanted = wanted_context(context_length, need.model_context)
    most = min(need.blocks(wanted) * need.max_running, need.most_blocks)
    default = _MAPPED_SHARE if has_mapped_weights else _SHARES[device_type]
    share = default if kv_memory == "auto" else parse_share(kv_memory)
    if share is None:
        return min(_stated_blocks(kv_memory, context_length, need, free), most)
    number, missing = need.affordable(int(free * share)), 0
    if context_length == "auto":
        least = need.blocks(min(wanted, _LEAST_CONTEXT))
        missing = int(need.bytes(least) / share) - free
    elif number < (least := need.blocks(wanted)):
        # a stated context may take the memory that the share leaves
        missing = need.bytes(least) + _RESERVE - free
        number = least
    if missing > 0:
        raise StartupError(
            f"The KV cache of {min(wanted, need.longest(least)):,} tokens takes "
            f"{in_units(need.bytes(least))}; {in_units(missing)} of memory are missing. "
            f"{_remedy(context_length)}"
        )
    return min(number, most)


def _stated_blocks(kv_memory: str, context_length: str, need: CacheNeed, free: int) -> int:
    """Return the number of blocks for a stated amount of memory. Raises StartupError."""
    number = need.affordable(parse_bytes(kv_memory))
    if number < 1:
        what = "one block and the states of a sequence," if need.state_bytes else "one block of"
        raise StartupError(
            f"--kv-memory {kv_memory} is less than {what} {in_units(need.bytes(1))}; raise it."
        )
    missing = need.bytes(number) + _RESERVE - free
    if missing > 0:
        raise StartupError(
            f"--kv-memory {kv_memory}: {in_units(missing)} of memory are missing; lower it."
        )
    least = need.blocks(wanted_context(context_length, need.model_context))
    if context_length != "auto" and number < least:
        raise StartupError(
            f"--context-length {context_length} takes {in_units(need.bytes(least))} of KV "
            f"cache, more than --kv-memory {kv_memory}; raise that, or lower --context-length."
        )
    return number


def _remedy(context_length: str) -> str:
    if context_length == "auto":
        return "Free some, or set --kv-memory."
    return "Free some, or lower --context-length; auto takes what fits."


def require_memory(needed: int, purpose: str, device: torch.device, sharers: int = 1) -> None:
    """Raise StartupError with the amount of missing memory unless `needed` bytes are free."""
    missing = needed - available_memory(device) // sharers
    if missing > 0:
        raise StartupError(
            f"{purpose} takes {in_units(needed)}; {in_units(missing)} of memory are missing."
        )


def available_memory(device: torch.device) -> int:
    """Return the bytes that can be allocated on a device."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    return free_host_memory()
