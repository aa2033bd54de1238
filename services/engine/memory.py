"""How many KV blocks the machine has room for."""

from pathlib import Path

import torch

from services.common.settings import StartupError
from services.engine.settings import parse_bytes

__all__ = ["available_memory", "choose_num_blocks"]

_SHARES = {"cpu": 0.25, "cuda": 0.85}
"""Of the free memory, what the KV cache takes by itself; a machine has other uses for its memory"""
_RESERVE = 512 * 2**20
"""Bytes kept for activations and everything else"""


def choose_num_blocks(
    wanted: str,
    bytes_per_block: int,
    most_blocks: int,
    least_blocks: int,
    device: torch.device,
    sharers: int = 1,
) -> int:
    """Blocks for "auto" or an amount of memory; never more than `most_blocks`.

    most_blocks: what all sequences that may run could use; least_blocks: what one sequence of the
    full context uses; sharers: processes that do the same in the same memory. Raises StartupError
    with the bytes that are missing.
    """
    free, share = available_memory(device) // sharers, _SHARES[device.type]
    if wanted == "auto":
        number = min(int(free * share) // bytes_per_block, most_blocks)
        if number < least_blocks:
            missing = int(least_blocks * bytes_per_block / share) - free
            raise StartupError(
                f"The KV cache of one full context takes {least_blocks * bytes_per_block:,} bytes; "
                f"{missing:,} bytes of memory are missing (or set --kv-memory)."
            )
        return number
    number = parse_bytes(wanted) // bytes_per_block
    if number < 1:
        raise StartupError(f"--kv-memory {wanted} holds no block of {bytes_per_block:,} bytes.")
    missing = number * bytes_per_block + _RESERVE - free
    if missing > 0:
        raise StartupError(f"--kv-memory {wanted}: {missing:,} bytes of memory are missing.")
    return min(number, most_blocks)


def available_memory(device: torch.device) -> int:
    """Bytes that can still be allocated on a device: on the CPU, within this container."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    lines = Path("/proc/meminfo").read_text().splitlines()
    fields = {line.split(":")[0]: int(line.split()[1]) * 1024 for line in lines}
    free = fields["MemAvailable"]
    limit, used = Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory.current")
    if limit.exists() and limit.read_text().strip() != "max":
        free = min(free, int(limit.read_text()) - int(used.read_text()))
    return free
