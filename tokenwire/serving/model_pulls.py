"""Downloads of models from the hub, and removals, for clients of a running server."""

import asyncio
import json
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing, asynccontextmanager, suppress
from dataclasses import dataclass

import grpc

from tokenwire.errors import ServiceError
from tokenwire.serving.load_errors import stopping

__all__ = ["ModelPulls", "PullProgress"]

_MOST_PULLS = 4
_COMPLAINT_BYTES = 64 * 1024


@dataclass(frozen=True, slots=True)
class PullProgress:
    """Progress of a download, in bytes."""

    completed: int
    total: int
    path: str = ""
    """Directory or GGUF file, once all of it is there"""


class ModelPulls:
    """Downloads of a server, each in a process of its own, which ends with its client."""

    def __init__(self) -> None:
        self._running = 0
        self._processes: set[Process] = set()
        self._is_closed = False

    def close(self) -> None:
        """End the downloads that run, and refuse further ones, because the server stops."""
        self._is_closed = True
        for process in self._processes:
            with suppress(ProcessLookupError):
                process.terminate()

    async def pull(self, name: str) -> AsyncGenerator[PullProgress, None]:
        """Download a model; yield the progress. Raises ServiceError.

        What an interrupted download has stays in the cache, and the next one goes on with it.
        """
        if self._is_closed:
            raise stopping()
        if self._running == _MOST_PULLS:
            raise ServiceError(
                grpc.StatusCode.RESOURCE_EXHAUSTED,
                "TOO_MANY_PULLS",
                f"{_MOST_PULLS} models are being downloaded; try again when one is there.",
                retry_seconds=30,
            )
        self._running += 1
        try:
            async with (
                _command("pull", "--json", "--", name) as process,
                aclosing(self._output(process)) as lines,
            ):
                async for line in lines:
                    yield _progress(json.loads(line))
                await _end(process, "PULL_FAILED")
        finally:
            self._running -= 1

    async def _output(self, process: Process) -> AsyncGenerator[bytes, None]:
        """Yield the lines of a download. Raises UNAVAILABLE if the server stops meanwhile."""
        assert process.stdout is not None
        self._processes.add(process)
        try:
            while not self._is_closed and (line := await process.stdout.readline()):
                yield line
        finally:
            self._processes.discard(process)
        if self._is_closed:
            raise stopping()

    async def remove(self, name: str) -> None:
        """Remove a model's files from the hub's cache. Raises ServiceError."""
        async with _command("rm", "--yes", "--", name) as process:
            await _end(process, "REMOVAL_FAILED")


@asynccontextmanager
async def _command(*arguments: str) -> AsyncIterator[Process]:
    """Run `tokenwire ARGUMENTS`, at most as long as the context."""
    command = (sys.executable, "-m", "tokenwire", *arguments)
    process = await asyncio.create_subprocess_exec(*command, stdout=PIPE, stderr=PIPE)
    try:
        yield process
    finally:
        if process.returncode is None:
            process.terminate()
        await process.wait()


async def _end(process: Process, reason: str) -> None:
    """Wait for the end of a command. Raises FAILED_PRECONDITION with what it complained of."""
    assert process.stderr is not None
    complaint = (await process.stderr.read(_COMPLAINT_BYTES)).decode("utf-8", "replace").strip()
    if await process.wait() != 0:
        line = complaint.splitlines()[-1] if complaint else "it gave no reason."
        message = line.removeprefix("tokenwire: ")
        raise ServiceError(grpc.StatusCode.FAILED_PRECONDITION, reason, message)


def _progress(line: dict[str, object]) -> PullProgress:
    completed, total = line.get("completed", 0), line.get("total", 0)
    assert isinstance(completed, int)
    assert isinstance(total, int)
    return PullProgress(completed, total, str(line.get("path", "")))
