"""Memory budget: the number of KV blocks that fit into free memory."""

from dataclasses import dataclass
from pathlib import Path

import torch

from services.common.settings import StartupError
from services.engine.settings import parse_bytes

__all__ = ["available_memory", "choose_num_blocks", "in_units", "require_memory"]

_SHARES = {"cpu": 0.25, "cuda": 0.97}
"""Share of free memory that the KV cache takes by default. A machine has other uses for the rest; a
GPU needs some for fragments and for kernels that are loaded later"""
_RESERVE = 512 * 2**20
"""Bytes left for activations and everything else"""


@dataclass(frozen=True, slots=True)
class _Cgroup:
    """Files in which one version of Linux's control groups reports memory."""

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
    step_bytes: int = 0,
) -> int:
    """Return the number of blocks for `wanted`: "auto" or an amount of memory.

    most_blocks: upper bound, enough for all running sequences; least_blocks: enough for one
    sequence of the full context; sharers: processes that share the memory evenly; step_bytes: what
    steps take beside the cache. Raises StartupError with the amount of missing memory.
    """
    free = max(available_memory(device) // sharers - step_bytes, 0)
    share = _SHARES[device.type]
    if wanted == "auto":
        number = min(int(free * share) // bytes_per_block, most_blocks)
        if number < least_blocks:
            missing = int(least_blocks * bytes_per_block / share) - free
            raise StartupError(
                "The KV cache of one full context takes "
                f"{in_units(least_blocks * bytes_per_block)}; {in_units(missing)} of memory are "
                "missing. Free some, or set --kv-memory."
            )
        return number
    number = parse_bytes(wanted) // bytes_per_block
    if number < 1:
        raise StartupError(
            f"--kv-memory {wanted} is less than one block of {in_units(bytes_per_block)}; raise it."
        )
    missing = number * bytes_per_block + _RESERVE - free
    if missing > 0:
        raise StartupError(
            f"--kv-memory {wanted}: {in_units(missing)} of memory are missing; lower it."
        )
    return min(number, most_blocks)


def require_memory(needed: int, purpose: str, device: torch.device, sharers: int = 1) -> None:
    """Raise StartupError with the amount of missing memory unless `needed` bytes are free."""
    missing = needed - available_memory(device) // sharers
    if missing > 0:
        raise StartupError(
            f"{purpose} takes {in_units(needed)}; {in_units(missing)} of memory are missing."
        )


def in_units(number: int) -> str:
    """Return a number of bytes in the largest unit that fits, such as "1.5 GiB"."""
    for exponent, unit in ((4, "TiB"), (3, "GiB"), (2, "MiB"), (1, "KiB")):
        if number >= 1024**exponent:
            return f"{number / 1024**exponent:,.1f} {unit}"
    return f"{number} bytes"


def available_memory(device: torch.device, root: Path = Path("/")) -> int:
    """Return the bytes that can be allocated on a device: on the CPU, within the container's limit.

    root: parent of /proc and /sys.
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
            # page cache, such as the checkpoint's, counts as used but is freed under pressure
            free = min(free, int(most) - int((folder / group.used).read_text()) + cached)
    return free


def _counts(file: Path) -> dict[str, int]:
    lines = (line.split() for line in file.read_text().splitlines())
    return {words[0]: int(words[1]) for words in lines}
