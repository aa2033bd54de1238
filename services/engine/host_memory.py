"""Free memory of the machine or container, and amounts of memory in words."""

from dataclasses import dataclass
from pathlib import Path

__all__ = ["free_host_memory", "in_units"]


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


def free_host_memory(root: Path = Path("/")) -> int:
    """Return the bytes that a process can allocate, within the container's limit.

    root: parent of /proc and /sys.
    """
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


def in_units(number: int) -> str:
    """Return a number of bytes in the largest unit that fits, such as "1.5 GiB"."""
    for exponent, unit in ((4, "TiB"), (3, "GiB"), (2, "MiB"), (1, "KiB")):
        if number >= 1024**exponent:
            return f"{number / 1024**exponent:,.1f} {unit}"
    return f"{number} bytes"


def _counts(file: Path) -> dict[str, int]:
    lines = (line.split() for line in file.read_text().splitlines())
    return {words[0]: int(words[1]) for words in lines}
