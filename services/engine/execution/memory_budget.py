"""How many KV blocks the machine has room for."""

from dataclasses import dataclass
from pathlib import Path

import torch

from services.common.settings import StartupError
from services.engine.settings import parse_bytes

__all__ = ["available_memory", "choose_num_blocks", "require_memory"]

_SHARES = {"cpu": 0.25, "cuda": 0.85}
"""Of the free memory, what the KV cache takes by itself; a machine has other uses for its memory"""
_RESERVE = 512 * 2**20
"""Bytes kept for activations and everything else"""


@dataclass(frozen=True, slots=True)
class _Cgroup:
    """Where a version of Linux's control groups tells of memory."""

    folder: str
    limit: str
    used: str
    file_pages: tuple[str, str]


_CGROUPS = (
    _Cgroup("sys/fs/cgroup", "memory.max", "memory.current", ("active_file", "inactive_file")),
    _Cgroup(
        "sys/fs/cgroup/memory",
        "memory.limit_in_bytes",
        "memory.usage_in_bytes",
        ("total_active_file", "total_inactive_file"),
    ),
)


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


def require_memory(needed: int, purpose: str, device: torch.device, sharers: int = 1) -> None:
    """Raises StartupError with the bytes that are missing for that purpose, if there are any."""
    missing = needed - available_memory(device) // sharers
    if missing > 0:
        raise StartupError(
            f"{purpose} takes {needed:,} bytes; {missing:,} bytes of memory are missing."
        )


def available_memory(device: torch.device, root: Path = Path("/")) -> int:
    """Bytes that can still be allocated on a device: on the CPU, within this container.

    root: where /proc and /sys are.
    """
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    free = _counts(root / "proc/meminfo")["MemAvailable:"] * 1024
    for group in _CGROUPS:
        folder = root / group.folder
        limit = folder / group.limit
        if limit.exists() and (most := limit.read_text().strip()) != "max":
            counts = _counts(folder / "memory.stat")
            cached = sum(counts.get(key, 0) for key in group.file_pages)
            # pages of files, such as the checkpoint's, count as used until somebody needs memory
            free = min(free, int(most) - int((folder / group.used).read_text()) + cached)
    return free


def _counts(file: Path) -> dict[str, int]:
    lines = (line.split() for line in file.read_text().splitlines())
    return {words[0]: int(words[1]) for words in lines}
