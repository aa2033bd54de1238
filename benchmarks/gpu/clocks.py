"""Clocks, power and temperature of the card, as nvidia-smi reads them every second."""

from __future__ import annotations

import statistics
import subprocess
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from shutil import which
from threading import Thread

from benchmarks.gpu.report import Figure

__all__ = ["Clocks", "card"]

_READ = "clocks.sm,clocks.mem,power.draw,temperature.gpu"
_NAMES = ("SM MHz", "memory MHz", "W", "°C")
_ABOUT = "driver_version,clocks.max.sm,clocks.max.mem,power.limit,memory.total"
_ABOUT_NAMES = ("driver", "most SM MHz", "most memory MHz", "most W", "memory MiB")
_FORMAT = "--format=csv,noheader,nounits"


@dataclass(slots=True)
class Clocks:
    """Readings of one card in the background; none where there is no nvidia-smi."""

    _readings: list[tuple[float, ...]] = field(default_factory=list)
    _process: subprocess.Popen[str] | None = None

    def start(self) -> None:
        """Begin to read."""
        if which("nvidia-smi") is None:
            return
        command = ["nvidia-smi", f"--query-gpu={_READ}", _FORMAT, "--id=0", "--loop=1"]
        self._process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, process_group=0
        )
        Thread(target=self._read, daemon=True).start()

    def stop(self) -> None:
        """End the program that is read."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()

    def take(self) -> Mapping[str, Figure]:
        """Return the least, median and greatest value of each kind since the last call."""
        taken, self._readings = self._readings, []
        return {
            name: f"{min(values):g}/{statistics.median(values):g}/{max(values):g}"
            for name, values in zip(_NAMES, zip(*taken, strict=True), strict=False)
        }

    def _read(self) -> None:
        assert self._process is not None
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if (reading := _numbers(line)) is not None:
                self._readings.append(reading)


def card() -> Mapping[str, Figure]:
    """Return the driver, and the greatest clocks and power of the card; empty without one."""
    command = ["nvidia-smi", f"--query-gpu={_ABOUT}", _FORMAT, "--id=0"]
    try:
        said = subprocess.run(command, capture_output=True, text=True, check=True, timeout=10)
    except (OSError, subprocess.SubprocessError):
        return {}
    return dict(zip(_ABOUT_NAMES, said.stdout.strip().split(", "), strict=False))


def _numbers(line: str) -> tuple[float, ...] | None:
    """Return the numbers of a line, or None if the card does not tell one of them."""
    with suppress(ValueError):
        numbers = tuple(map(float, line.split(",")))
        return numbers if len(numbers) == len(_NAMES) else None
    return None
