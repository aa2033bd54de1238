"""Run of a check: the parts in their order, within a time, with a report after every row."""

from __future__ import annotations

import signal
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import IO, Any

from benchmarks.gpu.clocks import Clocks, card
from benchmarks.gpu.plan import Part
from benchmarks.gpu.report import Outcome, PartResult, Report
from benchmarks.gpu.worker_process import WorkerExitError, WorkerProcess, WorkerTimeoutError
from benchmarks.results import now

__all__ = ["Limits", "Session"]

_MOST_FAILED_STARTS = 2
"""Number of processes in a row that may fail before they are ready"""
_LOG_CHARACTERS = 3000
"""Number of the log's last characters in the report of a part that hangs or dies"""


class _Cut(BaseException):
    """SIGTERM or SIGINT came."""


@dataclass(frozen=True, slots=True)
class Limits:
    """Times of a check, in seconds."""

    total: float
    """Time within which the check ends"""
    start: float = 90.0
    """Most time from the start of a process until it is ready"""
    factor: float = 2.0
    """A part may take so many times its estimate,"""
    least: float = 45.0
    """or this, whichever is more"""

    def of(self, part: Part) -> float:
        """Return the most seconds of a part."""
        return max(self.factor * part.seconds, self.least)


class Session:
    """One run of a plan."""

    def __init__(
        self,
        parts: Sequence[Part],
        folder: Path,
        arguments: Sequence[str],
        limits: Limits,
        *,
        has_estimates: bool = True,
    ) -> None:
        """folder: where the report goes; arguments: those of the worker.

        has_estimates: whether the plan's times hold on this device, so that parts without enough
        time are left out.
        """
        self._parts = parts
        self._folder = folder
        self._arguments = arguments
        self._limits = limits
        self._has_estimates = has_estimates
        self._end = time.monotonic() + limits.total
        self._clocks = Clocks()
        self._worker: WorkerProcess | None = None
        self._failed_starts = 0
        self.report = Report(now(), _commit(), limits.total / 60)

    def run(self) -> Report:
        """Run the parts. SIGTERM and SIGINT end the check early; its report stays complete."""
        self._folder.mkdir(parents=True, exist_ok=True)
        path = self._folder / f"{self.report.stem}.log"
        with path.open("a+", errors="replace") as log, self._signals():
            try:
                self._clocks.start()
                for part in self._parts:
                    self._run(part, log)
            except _Cut:
                self._leave_out_rest("a signal ended the check")
            except SystemExit as reason:
                self.report.parts.pop()
                self._leave_out_rest(str(reason))
                raise
            finally:
                self._clocks.stop()
                self._end_worker()
                self.report.save(self._folder)
        return self.report

    def _run(self, part: Part, log: IO[str]) -> None:
        """Run a part, or leave it out if its time is not left."""
        result = PartResult(part.name, part.question, part.seconds)
        self.report.parts.append(result)
        left = self._end - time.monotonic()
        if left <= 0 or (self._has_estimates and part.seconds > left):
            result.outcome = Outcome.LEFT_OUT
            result.failure = f"takes about {part.seconds:.0f} s; {max(left, 0):.0f} s were left"
            return
        print(f"{part.name}: {part.question}", flush=True)
        if part.is_alone:
            self._end_worker()
        self._clocks.take()
        began = time.monotonic()
        try:
            self._run_in_worker(part, result, log)
        except _Cut:
            result.outcome, result.failure = Outcome.CUT, "a signal ended the check"
            raise
        finally:
            result.seconds = result.seconds or time.monotonic() - began
            result.clocks = self._clocks.take()
            self.report.save(self._folder)
            if part.is_alone or result.outcome not in (Outcome.RAN, Outcome.LEFT_OUT):
                self._end_worker()
            print(f"{part.name}: {result.outcome} in {result.seconds:.1f} s", flush=True)

    def _run_in_worker(self, part: Part, result: PartResult, log: IO[str]) -> None:
        at = log.seek(0, 2)
        try:
            if self._worker is None:
                self._start_worker(log)
            assert self._worker is not None
            began = time.monotonic()
            self._worker.begin(part.function, part.options)
            for message in self._worker.messages(self._deadline(self._limits.of(part))):
                self._take(message, result)
                if result.outcome != Outcome.RUNNING:
                    break
            result.seconds = time.monotonic() - began
        except WorkerTimeoutError:
            assert self._worker is not None
            self._worker.write_stack()
            is_cut = time.monotonic() >= self._end
            result.outcome = Outcome.CUT if is_cut else Outcome.HUNG
            result.failure = _ending(log, at)
        except WorkerExitError as ending:
            result.outcome = Outcome.DIED
            result.failure = f"{ending}\n{_ending(log, at)}"

    def _start_worker(self, log: IO[str]) -> None:
        """Start a worker, and wait until it is ready.

        Raises SystemExit if it can't run any part.
        """
        if self._failed_starts == _MOST_FAILED_STARTS:
            raise SystemExit(f"no process starts; {log.name} says why")
        self._worker = WorkerProcess(self._arguments, log)
        self._failed_starts += 1
        message = next(self._worker.messages(self._deadline(self._limits.start)))
        if message["kind"] == "unusable":
            raise SystemExit(message["reason"])
        self._failed_starts = 0
        self.report.machine |= message["machine"] | card()

    def _deadline(self, seconds: float) -> float:
        """Return when the wait for something that takes `seconds` ends."""
        return min(time.monotonic() + seconds, self._end)

    def _take(self, message: Mapping[str, Any], result: PartResult) -> None:
        """Note what a worker tells."""
        match message["kind"]:
            case "row":
                result.rows.append(message["row"])
                self.report.save(self._folder)
                print("  ", message["row"], flush=True)
            case "unavailable":
                result.outcome, result.failure = Outcome.LEFT_OUT, message["reason"]
            case "failed":
                result.outcome, result.failure = Outcome.FAILED, message["failure"]
                print(result.failure, flush=True)
            case "ran":
                result.outcome = Outcome.RAN

    def _leave_out_rest(self, reason: str) -> None:
        for part in self._parts[len(self.report.parts) :]:
            result = PartResult(part.name, part.question, part.seconds, Outcome.LEFT_OUT)
            result.failure = reason
            self.report.parts.append(result)

    def _end_worker(self) -> None:
        if self._worker is not None:
            self._worker.kill()
            self._worker = None

    @contextmanager
    def _signals(self) -> Iterator[None]:
        """Raise _Cut on SIGTERM and SIGINT within the `with` block."""
        numbers = (signal.SIGTERM, signal.SIGINT)
        before = [signal.signal(number, _cut) for number in numbers]
        try:
            yield
        finally:
            for number, handler in zip(numbers, before, strict=True):
                signal.signal(number, handler)


def _cut(number: int, frame: FrameType | None) -> None:
    raise _Cut


def _ending(log: IO[str], begin: int) -> str:
    """Return the end of what was written to the log since it had `begin` bytes."""
    log.seek(begin)
    return log.read()[-_LOG_CHARACTERS:]


def _commit() -> str:
    """Return the commit, with a plus sign if files differ from it; "unknown" without git."""

    def git(*arguments: str) -> str:
        command = ["git", "-C", str(Path(__file__).parent), *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()

    try:
        commit = git("rev-parse", "--short=12", "HEAD")
        return commit + ("+" if git("status", "--porcelain", "--untracked-files=no") else "")
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
