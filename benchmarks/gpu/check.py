"""The check: its parts in order, within a time, with a report after each."""

from __future__ import annotations

import signal
import subprocess
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from types import FrameType

import torch

from benchmarks.engine import MeasuredEngine
from benchmarks.gpu.checkpoints import FAMILIES, LLAMAS, make_checkpoint
from benchmarks.gpu.correctness import (
    check_attention,
    check_families,
    check_fp8,
    check_graphs,
    release,
)
from benchmarks.gpu.encoders import check_vectors
from benchmarks.gpu.peers import measure_peers
from benchmarks.gpu.report import Figure, Part, Report
from benchmarks.gpu.service import measure_service
from benchmarks.gpu.speed import (
    Loads,
    bandwidth,
    measure_closed,
    measure_one_stream,
    measure_prompts,
    measure_staggered,
)
from benchmarks.results import now

__all__ = ["FULL", "QUICK", "Check"]

QUICK = Loads(
    ("llama", "gpt-oss"),
    (1, 4),
    prompt=24,
    output=8,
    long_prompt=100,
    shared_prefix=64,
    prompts=(16, 64),
    staggered=8,
    one_stream_steps=8,
)
"""Loads that a CPU runs in seconds"""
FULL = Loads(
    tuple(FAMILIES),
    (1, 8, 64, 256),
    prompt=256,
    output=256,
    long_prompt=8000,
    shared_prefix=8000,
    prompts=(128, 512, 2048, 8000),
    staggered=256,
    one_stream_steps=200,
)


_WITH_FP8 = (8, 9)
"""Least compute capability that multiplies FP8"""


class _Cut(BaseException):  # no part may catch it
    """SIGTERM."""


@dataclass(frozen=True, slots=True)
class _Step:
    """A part to run, and the seconds below which it is not begun."""

    name: str
    run: Callable[[], Iterator[dict[str, Figure]]]
    seconds: float


class Check:
    """One run on one device."""

    def __init__(
        self, device: torch.device, checkpoints: Path, results: Path, minutes: float, loads: Loads
    ) -> None:
        self._device = device
        self._checkpoints = checkpoints
        self._results = results
        self._end = time.monotonic() + 60 * minutes
        self._loads = loads
        is_cuda = device.type == "cuda"
        self.report = Report(
            now(),
            torch.cuda.get_device_name() if is_cuda else "CPU",
            torch.__version__,
            _version_of_triton(),
            _commit(),
        )

    def run(self, models: list[str], only: str = "") -> Report:
        """Run the parts whose names contain one of `only`, until the time or SIGTERM ends it.

        only: pieces of names, separated by `|`; empty = all parts.
        """
        signal.signal(signal.SIGTERM, _cut)
        steps = [
            step
            for step in self._steps(models)
            if any(name in step.name for name in only.split("|"))
        ]
        try:
            for number, step in enumerate(steps):
                if time.monotonic() + step.seconds > self._end:
                    self.report.left_out = [each.name for each in steps[number:]]
                    break
                self._run(step)
        except _Cut:
            done = {part.name for part in self.report.parts if not part.failure}
            self.report.left_out = [each.name for each in steps if each.name not in done]
        self.report.save(self._results)
        return self.report

    def _run(self, step: _Step) -> None:
        part = Part(step.name)
        self.report.parts.append(part)
        began = time.monotonic()
        rows: list[dict[str, Figure]] = []
        part.rows = rows
        try:
            for row in step.run():
                rows.append(row)
                print(step.name, row, flush=True)
        except _Cut:
            part.failure = "cut"
            raise
        except Exception as error:  # the other parts go on
            part.failure = f"{type(error).__name__}: {error}"[:1000]
            traceback.print_exc()
            print(step.name, part.failure, flush=True)
        finally:
            part.seconds = time.monotonic() - began
            release()
            self.report.save(self._results)

    def _steps(self, models: list[str]) -> Iterator[_Step]:
        device, folder, names = self._device, self._checkpoints, self._loads.families
        yield _Step("attention", lambda: check_attention(device, folder, names), 20)
        yield _Step("families", lambda: check_families(device, folder, names), 60)
        yield _Step("graphs", lambda: check_graphs(device, folder, names), 30)
        yield _Step("vectors", lambda: check_vectors(device, folder), 20)
        has_fp8 = device.type == "cuda" and torch.cuda.get_device_capability() >= _WITH_FP8
        if has_fp8:
            yield _Step("FP8", lambda: check_fp8(device), 15)
        yield _Step("memory", self._measure_memory, 2)
        for name in models:
            yield _Step(f"speed, {name}", partial(self._speed, name), 90)
        if has_fp8:
            for name in models:
                yield _Step(f"speed in FP8, {name}", partial(self._speed, name, "fp8"), 90)
        for name in models[:1]:
            yield _Step(f"service, {name}", partial(self._service, name), 60)
        for name in models:
            yield _Step(f"peers, {name}", partial(self._peers, name), 60)

    @cached_property
    def _memory(self) -> float:
        """Bytes per second that a copy reads and writes."""
        return bandwidth(self._device, (4 << 30) if self._device.type == "cuda" else (64 << 20))

    def _measure_memory(self) -> Iterator[dict[str, Figure]]:
        yield {"GB/s of a copy, read and written": self._memory / 1e9}

    def _speed(self, name: str, weights: str = "full") -> Iterator[dict[str, Figure]]:
        loads, device, memory = self._loads, self._device, self._memory
        path = make_checkpoint(self._checkpoints / name, LLAMAS[name], device, small=False)
        release()
        began = time.monotonic()
        most = max(loads.streams)
        room = most * (loads.prompt + loads.output + 64) + 2 * loads.long_prompt
        with MeasuredEngine(path, "auto", room, weights=weights, device=device.type) as engine:
            yield {"what": "start", "seconds": time.monotonic() - began}
            yield from measure_one_stream(engine, loads, device, memory)
            prompt_rate = rate = 0.0
            for row in measure_prompts(engine, loads, device):
                if isinstance(found := row["tokens/s"], float):
                    prompt_rate = found
                yield row
            for row in measure_closed(engine, loads, device):
                if row["load"] == "closed" and isinstance(found := row["tokens/s"], float):
                    rate = found
                yield {"what": row.pop("load"), **row}
            for row in measure_staggered(engine, loads, rate, prompt_rate):
                yield {"what": row.pop("load"), **row}

    def _service(self, name: str) -> Iterator[dict[str, Figure]]:
        loads = self._loads
        path = make_checkpoint(self._checkpoints / name, LLAMAS[name], self._device, small=False)
        release()
        yield from measure_service(
            path,
            self._device.type,
            loads.streams,
            loads.prompt,
            loads.output,
            int(LLAMAS[name]["vocab_size"]),
        )

    def _peers(self, name: str) -> Iterator[dict[str, Figure]]:
        loads = self._loads
        path = make_checkpoint(self._checkpoints / name, LLAMAS[name], self._device, small=False)
        vocabulary = int(LLAMAS[name]["vocab_size"])
        yield from measure_peers(path, loads.streams, loads.prompt, loads.output, vocabulary)


def _cut(number: int, frame: FrameType | None) -> None:
    raise _Cut


def _version_of_triton() -> str:
    try:
        import triton
    except ImportError:
        return "none"
    return str(triton.__version__)


def _commit() -> str:
    command = ["git", "-C", str(Path(__file__).parent), "rev-parse", "--short", "HEAD"]
    try:
        found = subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return found
