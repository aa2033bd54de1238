"""Free memory of a machine or container, and amounts in words."""

from pathlib import Path

import pytest

from services.common.host_memory import free_host_memory, in_units

MACHINE, LIMIT, USED, FILES = 100 << 30, 40 << 30, 18 << 30, 16 << 30
UNLIMITED = {"memory.max": "max", "memory.limit_in_bytes": "9223372036854771712"}
VERSIONS = [
    ("sys/fs/cgroup", "memory.max", "memory.current", "inactive_file"),
    (
        "sys/fs/cgroup/memory",
        "memory.limit_in_bytes",
        "memory.usage_in_bytes",
        "total_inactive_file",
    ),
]


@pytest.mark.parametrize(("folder", "limit", "used", "pages"), VERSIONS)
def test_container_limit_applies_and_page_cache_counts_as_free(
    tmp_path: Path, folder: str, limit: str, used: str, pages: str
) -> None:
    """Linux frees the pages of a checkpoint that was read when memory is needed."""
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc/meminfo").write_text(f"MemAvailable: {MACHINE >> 10} kB\nHugePages_Free: 0\n")
    group = tmp_path / folder
    group.mkdir(parents=True)
    (group / used).write_text(f"{USED}\n")
    (group / "memory.stat").write_text(f"anon 5\n{pages} {FILES}\n")
    (group / limit).write_text(f"{LIMIT}\n")
    assert free_host_memory(tmp_path) == LIMIT - USED + FILES
    (group / limit).write_text(f"{2 * MACHINE}\n")
    assert free_host_memory(tmp_path) == MACHINE


@pytest.mark.parametrize("limited", ["serving.slice", "serving.slice/engine.service"])
@pytest.mark.parametrize(("folder", "limit", "used", "pages"), VERSIONS)
def test_least_limit_of_the_groups_around_the_process_applies(
    tmp_path: Path, folder: str, limit: str, used: str, pages: str, limited: str
) -> None:
    """systemd's MemoryMax= sets one for a service or a slice, and a process in it is killed."""
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/meminfo").write_text(f"MemAvailable: {MACHINE >> 10} kB\n")
    (tmp_path / "proc/self/cgroup").write_text(
        "5:cpu,cpuacct:/other.slice\n4:memory:/serving.slice/engine.service\n"
        "0::/serving.slice/engine.service\n"
    )
    for name in ("serving.slice", "serving.slice/engine.service", "other.slice"):
        group = tmp_path / folder / name
        group.mkdir(parents=True)
        (group / used).write_text(f"{USED}\n")
        (group / "memory.stat").write_text(f"{pages} {FILES}\n")
        (group / limit).write_text(UNLIMITED[limit])
    (tmp_path / folder / "other.slice" / limit).write_text(f"{LIMIT // 2}\n")
    assert free_host_memory(tmp_path) == MACHINE
    (tmp_path / folder / limited / limit).write_text(f"{LIMIT}\n")
    assert free_host_memory(tmp_path) == LIMIT - USED + FILES


def test_container_whose_path_is_the_hosts_has_the_outermost_limit(tmp_path: Path) -> None:
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/meminfo").write_text(f"MemAvailable: {MACHINE >> 10} kB\n")
    (tmp_path / "proc/self/cgroup").write_text("4:memory:/docker/0123\n0::/../../docker/0123\n")
    group = tmp_path / "sys/fs/cgroup/memory"
    group.mkdir(parents=True)
    (group / "memory.usage_in_bytes").write_text(f"{LIMIT + 1}\n")
    (group / "memory.stat").write_text("total_inactive_file 0\n")
    (group / "memory.limit_in_bytes").write_text(f"{LIMIT}\n")
    assert free_host_memory(tmp_path) == 0


def test_memory_of_the_machine_counts_without_a_container_limit(tmp_path: Path) -> None:
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc/meminfo").write_text(f"MemAvailable: {MACHINE >> 10} kB\n")
    group = tmp_path / "sys/fs/cgroup"
    group.mkdir(parents=True)
    (group / "memory.max").write_text("max\n")
    assert free_host_memory(tmp_path) == MACHINE


@pytest.mark.parametrize(
    ("number", "text"),
    [(1023, "1023 bytes"), (1536, "1.5 KiB"), (109_932_929_486_848, "100.0 TiB")],
)
def test_amounts_are_in_units_that_people_compare(number: int, text: str) -> None:
    assert in_units(number) == text
