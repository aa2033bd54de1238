"""Results of a benchmark as JSON files: time, machine, figures."""

from __future__ import annotations

import json
import os
import platform
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

import psutil

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

__all__ = ["RESULTS", "Machine", "now", "save"]

RESULTS = Path(__file__).parent / "results"


@dataclass(frozen=True, slots=True)
class Machine:
    cpu: str
    cores: int
    memory_gib: float
    system: str

    @classmethod
    def this(cls) -> Machine:
        memory = psutil.virtual_memory().total / 2**30
        return cls(
            _cpu_model(),
            os.cpu_count() or 1,
            round(memory, 1),
            f"{platform.system()} {platform.machine()}",
        )


def now() -> str:
    """Return the UTC time in ISO 8601, in seconds."""
    return datetime.now(UTC).isoformat(timespec="seconds")


def save(report: DataclassInstance, directory: Path, name: str) -> Path:
    """Write a report as JSON. Return its path."""
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / f"{name.replace(':', '')}.json"
    path.write_text(json.dumps(asdict(report), indent=1, default=lambda kind: kind.value) + "\n")
    return path


def _cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.machine())
