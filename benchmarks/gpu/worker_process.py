"""A worker as its parent sees it: start, messages within a time, end by force."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from typing import IO, Any

import psutil

__all__ = ["WorkerExitError", "WorkerProcess", "WorkerTimeoutError"]

_DUMP_SECONDS = 2.0
"""Time in which a worker writes where it hangs"""
_POLL_SECONDS = 1.0
_CHUNK = 1 << 16


class WorkerTimeoutError(Exception):
    """A worker sent nothing until the deadline."""


class WorkerExitError(Exception):
    """A worker's process ended; the message says how."""


class WorkerProcess:
    """A process of benchmarks.gpu.worker, the leader of a process group with all it starts."""

    def __init__(self, arguments: Sequence[str], log: IO[str]) -> None:
        """Start it. log: where it writes all that its parts print."""
        self._messages, theirs = os.pipe()
        os.set_blocking(self._messages, False)
        command = [sys.executable, "-m", "benchmarks.gpu.worker", "--messages", str(theirs)]
        try:
            self._process = subprocess.Popen(
                [*command, *arguments],
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                text=True,
                pass_fds=(theirs,),
                process_group=0,
            )
        finally:
            os.close(theirs)
        self._received = b""

    def begin(self, function: str, options: Mapping[str, str | int]) -> None:
        """Let the worker run a part. Raises WorkerExitError if there is no process any more."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(
                json.dumps({"function": function, "options": dict(options)}) + "\n"
            )
            self._process.stdin.flush()
        except OSError as error:
            raise WorkerExitError(self._ending()) from error

    def messages(self, deadline: float) -> Iterator[Mapping[str, Any]]:
        """Yield messages as they come.

        deadline: on the clock of time.monotonic. Raises WorkerTimeoutError at the deadline, and
        WorkerExitError if the process ends.
        """
        while True:
            while b"\n" in self._received:
                line, _, self._received = self._received.partition(b"\n")
                yield json.loads(line)
            left = deadline - time.monotonic()
            if left <= 0:
                raise WorkerTimeoutError
            if select.select([self._messages], [], [], min(left, _POLL_SECONDS))[0]:
                chunk = os.read(self._messages, _CHUNK)
                if not chunk:
                    raise WorkerExitError(self._ending())
                self._received += chunk
            elif self._process.poll() is not None:  # a child of it keeps the pipe open
                raise WorkerExitError(self._ending())

    def write_stack(self) -> None:
        """Let the worker write into the log where each of its threads is."""
        with suppress(ProcessLookupError):
            self._process.send_signal(signal.SIGUSR1)
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(_DUMP_SECONDS)

    def kill(self) -> None:
        """End the process and all that it started, servers with process groups of their own too."""
        started: list[psutil.Process] = []
        with suppress(psutil.NoSuchProcess):
            started = psutil.Process(self._process.pid).children(recursive=True)
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        for process in started:
            with suppress(psutil.NoSuchProcess):
                process.kill()
        self._process.wait()
        with suppress(OSError):
            os.close(self._messages)
        assert self._process.stdin is not None
        with suppress(OSError):
            self._process.stdin.close()

    def _ending(self) -> str:
        try:
            code = self._process.wait(_DUMP_SECONDS)
        except subprocess.TimeoutExpired:
            return "end of its messages"
        return f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
