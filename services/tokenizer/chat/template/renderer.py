"""Has conversations rendered by a process that may be lost over it."""

import asyncio
import logging
import signal
import sys
from collections.abc import Mapping

import grpc
import msgspec

from services.tokenizer.chat.template.rendering import (
    FRAME,
    TIMED_OUT,
    Rendering,
    RenderJob,
    Templates,
)
from tokenwire.errors import ServiceError, invalid
from tokenwire.serving.exit_status import exit_status

__all__ = ["Renderer"]

_LOG = logging.getLogger("renderer")
_ENDED = "the process that renders chat templates ended with %s"
_SECONDS = 5.0  # of CPU time for a conversation; most take less than a thousandth of it
_START_SECONDS = 60.0
_MOST_WAITING = 1_024
_MAX_LENGTH = 8 * 1024 * 1024  # characters


class Renderer:
    """The client of one render process, which it starts again when it is gone."""

    def __init__(self, templates: Mapping[str, str], variables: Mapping[str, str]) -> None:
        """Both as `Templates` has them."""
        self._templates = Templates(dict(templates), dict(variables), _MAX_LENGTH, _SECONDS)
        self._process: asyncio.subprocess.Process | None = None
        self._turn = asyncio.Lock()
        self._waiting = 0

    async def render(self, job: RenderJob) -> str:
        """The text that the template makes of the conversation.

        Raises INVALID_ARGUMENT for `messages` with what the template says against them, or when it
        does not come to an end; RESOURCE_EXHAUSTED when too many wait.
        """
        if self._waiting >= _MOST_WAITING:
            raise ServiceError(
                grpc.StatusCode.RESOURCE_EXHAUSTED,
                "TOO_MANY_RENDERS",
                "Too many conversations wait to be rendered.",
                retry_seconds=1,
            )
        self._waiting += 1
        # a client that goes in between leaves no answer behind for the next
        exchange = asyncio.ensure_future(self._exchange(msgspec.json.encode(job)))
        exchange.add_done_callback(self._left)
        rendering = await asyncio.shield(exchange)
        if rendering.error:
            raise invalid("messages", rendering.error)
        return rendering.text

    async def stop(self) -> None:
        """End the process."""
        if self._process is not None:
            await self._kill(self._process)

    def _left(self, exchange: "asyncio.Future[Rendering]") -> None:
        self._waiting -= 1
        if not exchange.cancelled():
            exchange.exception()  # was told to whoever still waits for it

    async def _exchange(self, job: bytes) -> Rendering:
        async with self._turn:
            process = await self._running()
            try:
                answer = await _ask(process, job)
            except (OSError, asyncio.IncompleteReadError):
                # not killed as well: that would hide what it ended with
                code = await process.wait()
                _LOG.warning(_ENDED, exit_status(code))
                self._process = None
                return Rendering(error=_cause(code))
            return msgspec.json.decode(answer, type=Rendering)

    async def _running(self) -> asyncio.subprocess.Process:
        if self._process is not None and self._process.returncode is not None:
            _LOG.warning(_ENDED, exit_status(self._process.returncode))
            self._process = None
        if self._process is None:
            process = self._process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "services.tokenizer.chat.template.render_process"),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                start_new_session=True,  # Ctrl-C is for the service, which then ends this
            )
            try:
                content = msgspec.json.encode(self._templates)
                await asyncio.wait_for(_ask(process, content), _START_SECONDS)
            except (TimeoutError, OSError, asyncio.IncompleteReadError) as error:
                if isinstance(error, TimeoutError):
                    await self._kill(process)
                _LOG.error(_ENDED, exit_status(await process.wait()))
                self._process = None
                raise ServiceError(
                    grpc.StatusCode.UNAVAILABLE,
                    "NO_RENDERER",
                    "The process that renders conversations does not start; see the log.",
                    retry_seconds=1,
                ) from None
        return self._process

    async def _kill(self, process: asyncio.subprocess.Process) -> None:
        if process.returncode is None:
            process.send_signal(signal.SIGKILL)
        await process.wait()


def _cause(code: int) -> str:
    if code == -TIMED_OUT:
        return f"The chat template takes more than {_SECONDS:g} s of CPU time."
    return "The chat template takes too much memory."


async def _ask(process: asyncio.subprocess.Process, content: bytes) -> bytes:
    """Sends a frame; returns the one that answers it."""
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write(FRAME.pack(len(content)) + content)
    await process.stdin.drain()
    [size] = FRAME.unpack(await process.stdout.readexactly(FRAME.size))
    return await process.stdout.readexactly(size)
