"""HTTP shim in a process of its own, with the backends that a test passes as flags."""

import asyncio
import itertools
import json
import resource
import signal
import sys
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import jsonschema

from services.http_shim.documentation.openapi import document

__all__ = ["Shim", "assert_documented", "running_jobs", "running_shim", "shim_with_jobs"]


class Shim:
    """A running shim, or another service, and its log."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self.process = process
        self.target = ""
        """host:port"""
        self._lines: list[dict[str, Any]] = []
        self._has_ended = False
        self._changed = asyncio.Condition()

    @property
    def url(self) -> str:
        return f"http://{self.target}"

    async def logged(self, message: str, count: int = 1) -> dict[str, Any]:
        """Wait for the `count`-th log line whose message contains the text, and return it."""
        await self._until(lambda: len(self._found(message)) >= count)
        return self._found(message)[count - 1]

    async def answered(self, identity: str) -> dict[str, Any]:
        """Wait for the log line that answers the request with this x-request-id."""

        def found() -> list[dict[str, Any]]:
            return [line for line in self._lines if line.get("request_id") == identity]

        await self._until(lambda: "status" in (found() or [{}])[-1])
        return found()[-1]

    def count(self, message: str) -> int:
        """Return the number of log lines so far whose message contains the text."""
        return len(self._found(message))

    def hang_up(self) -> None:
        """Send SIGHUP."""
        self.process.send_signal(signal.SIGHUP)

    @contextmanager
    def out_of_descriptors(self) -> Iterator[None]:
        """Let the shim open no file and no socket in the block; open connections stay."""
        pid = self.process.pid
        opened = {int(each.name) for each in Path(f"/proc/{pid}/fd").iterdir()}
        first_free = next(number for number in itertools.count() if number not in opened)
        before = resource.prlimit(pid, resource.RLIMIT_NOFILE)
        resource.prlimit(pid, resource.RLIMIT_NOFILE, (first_free, before[1]))
        try:
            yield
        finally:
            resource.prlimit(pid, resource.RLIMIT_NOFILE, before)

    async def listen(self) -> None:
        """Read the shim's log to its end."""
        assert self.process.stderr is not None
        async for line in self.process.stderr:
            async with self._changed:
                # a failed start ends with plain text, not with a JSON entry
                is_entry = line.startswith(b"{")
                self._lines.append(json.loads(line) if is_entry else {"message": line.decode()})
                self._changed.notify_all()
        async with self._changed:
            self._has_ended = True
            self._changed.notify_all()

    async def _until(self, is_so: Callable[[], bool]) -> None:
        """Wait until the log satisfies the condition; fail if the log ends first."""
        async with self._changed:
            await self._changed.wait_for(lambda: is_so() or self._has_ended)
        assert is_so(), f"the service has ended: {self._lines[-3:]}"

    def _found(self, message: str) -> list[dict[str, Any]]:
        return [line for line in self._lines if message in line["message"]]


def assert_documented(value: object, name: str) -> None:
    """Assert that the value matches the component `name` of the OpenAPI document."""
    jsonschema.validate(value, document() | {"$ref": f"#/components/schemas/{name}"})


@asynccontextmanager
async def running_shim(*flags: str) -> AsyncIterator[Shim]:
    """Run `python -m services.http_shim` on a free port; yield it once it listens.

    It must exit with status 0, or be killed by the block.
    """
    async with _running("http_shim", *flags) as shim:
        yield shim


@asynccontextmanager
async def running_jobs(*flags: str) -> AsyncIterator[Shim]:
    """Run `python -m services.jobs` on a free port; yield it once it listens.

    It must exit with status 0, or be killed by the block.
    """
    async with _running("jobs", "--metrics-port", "-1", *flags) as jobs:
        yield jobs


@asynccontextmanager
async def shim_with_jobs(
    tokenizer: str, *flags: str, shim_flags: Sequence[str] = ()
) -> AsyncIterator[tuple[Shim, Shim]]:
    """Run a jobs service with flags, and a shim in front of it; yield the shim and the jobs."""
    served = ("--tokenizer", tokenizer)
    async with (
        running_jobs(*served, *flags) as jobs,
        running_shim(*served, "--jobs", jobs.target, *shim_flags) as shim,
    ):
        yield shim, jobs


@asynccontextmanager
async def _running(name: str, *flags: str) -> AsyncIterator[Shim]:
    command = (sys.executable, "-m", f"services.{name}")
    own = () if "--port" in flags else ("--port", "0")
    process = await asyncio.create_subprocess_exec(
        *command, *own, "--tokenizer-wait", "0", *flags, stderr=asyncio.subprocess.PIPE
    )
    service = Shim(process)
    listening = asyncio.ensure_future(service.listen())
    try:
        service.target = f"127.0.0.1:{(await service.logged('listening on'))['port']}"
        yield service
        was_killed = process.returncode == -signal.SIGKILL
    finally:
        if process.returncode is None:
            process.terminate()
        await process.wait()
        await listening
    assert process.returncode == 0 or was_killed
