"""Free memory of the machine or container, and amounts of memory as text."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

__all__ = ["free_host_memory", "in_units"]


@dataclass(frozen=True, slots=True)
class _Cgroup:
    """Files in which one version of Linux's control groups reports memory."""

    controller: str
    """Name of the hierarchy in /proc/self/cgroup; empty in version 2, which has one hierarchy"""
    folder: str
    limit: str
    usage: str
    file_pages: tuple[str, str]


_CGROUPS = (
    _Cgroup("", "sys/fs/cgroup", "memory.max", "memory.current", ("active_file", "inactive_file")),
    _Cgroup(
        "memory",
        "sys/fs/cgroup/memory",
        "memory.limit_in_bytes",
        "memory.usage_in_bytes",
        ("total_active_file", "total_inactive_file"),
    ),
)


def free_host_memory(root: Path = Path("/")) -> int:
    """Return the bytes that a process can allocate, within the limits of its control groups.

    root: parent of /proc and /sys.
    """
    free = [_counts(root / "proc/meminfo")["MemAvailable:"] * 1024]
    for version in _CGROUPS:
        for folder in _folders(version, root):
            limit = folder / version.limit
            if limit.exists() and (most := limit.read_text().strip()) != "max":
                counts = _counts(folder / "memory.stat")
                cached = sum(counts.get(key, 0) for key in version.file_pages)
                usage = int((folder / version.usage).read_text())
                # page cache, such as the checkpoint's, counts as used but is freed under pressure
                free.append(int(most) - usage + cached)
    return max(min(free), 0)


def in_units(number: int) -> str:
    """Return a number of bytes in the largest unit that fits, such as "1.5 GiB"."""
    for exponent, unit in ((4, "TiB"), (3, "GiB"), (2, "MiB"), (1, "KiB")):
        if number >= 1024**exponent:
            return f"{number / 1024**exponent:,.1f} {unit}"
    return f"{number} bytes"


def _folders(version: _Cgroup, root: Path) -> Iterator[Path]:
    """Yield the folders of this process's group and of all groups around it, outermost first.

    A container may see only its own group, as the outermost one, but read its path on the host.
    """
    folder = root / version.folder
    yield folder
    file = root / "proc/self/cgroup"
    for line in file.read_text().splitlines() if file.exists() else ():
        _, controllers, path = line.split(":", 2)
        if version.controller in controllers.split(","):
            for name in Path(path).parts[1:]:
                folder /= name
                yield folder


def _counts(file: Path) -> dict[str, int]:
    lines = (line.split() for line in file.read_text().splitlines())
    return {words[0]: int(words[1]) for words in lines}
