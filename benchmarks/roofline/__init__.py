"""Read bandwidth of this machine's memory: the lower bound of a decode step's time."""

from __future__ import annotations

import os
import subprocess
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

__all__ = ["Bandwidth", "ByteFloor", "RooflineError", "measure_bandwidth"]

_SOURCE = Path(__file__).parent / "reader.c"
_FLAGS = ("-O3", "-march=native", "-fopenmp", "-std=gnu11")
_BUFFER = 1 << 30
"""Bytes read per pass: more than the capacity of any cache"""


class RooflineError(Exception):
    """The reader could not be built or run."""


@dataclass(frozen=True, slots=True)
class Bandwidth:
    """Bytes read per second by `threads` threads."""

    threads: int
    median: float
    best: float


@dataclass(frozen=True, slots=True)
class ByteFloor:
    """Bytes that a decode step reads at least: all weights, and every sequence's KV and states."""

    weight_bytes: int
    kv_bytes_per_token: int
    state_bytes: int
    """States of one sequence"""
    bandwidth: float
    """Bytes per second"""

    def seconds(self, batch: int, context: float) -> float:
        """Return the shortest time of a step of `batch` sequences of `context` tokens."""
        sequence = context * self.kv_bytes_per_token + self.state_bytes
        read = self.weight_bytes + batch * sequence
        return read / self.bandwidth


def measure_bandwidth(
    threads: Sequence[int] = (), *, seconds: float = 1.0, buffer: int = _BUFFER
) -> list[Bandwidth]:
    """Return the bandwidth for each number of threads; by default one, and one per core.

    Compiles reader.c with `$CC` (default cc) into a temporary folder. Raises RooflineError.
    """
    with tempfile.TemporaryDirectory() as folder:
        reader = Path(folder) / "reader"
        compiler = os.environ.get("CC", "cc")
        _run([compiler, *_FLAGS, str(_SOURCE), "-o", str(reader)])
        return [
            _read(reader, number, seconds, buffer)
            for number in threads or sorted({1, len(os.sched_getaffinity(0))})
        ]


def _read(reader: Path, threads: int, seconds: float, buffer: int) -> Bandwidth:
    median, best = _run([str(reader), str(buffer), str(threads), str(seconds)]).split()
    return Bandwidth(threads, float(median), float(best))


def _run(command: Sequence[str]) -> str:
    try:
        done = subprocess.run(command, check=True, capture_output=True, text=True)
    except FileNotFoundError:
        raise RooflineError(f"{command[0]} was not found: install a C compiler or set CC") from None
    except subprocess.CalledProcessError as error:
        raise RooflineError(f"{' '.join(command)} failed: {error.stderr.strip()}") from None
    return done.stdout
