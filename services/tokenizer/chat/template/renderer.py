"""Client of the render process, which a hostile conversation can crash."""

import asyncio
import logging
import signal
import sys
from collections.abc import Mapping
from contextlib import suppress
from functools import partial

import grpc
import msgspec

from services.common.exit_status import exit_status
from services.common.sharing.fair_turns import FairTurns
from services.common.sharing.shares import Shares
from services.common.sharing.tenant import current_tenant
from services.tokenizer.chat.template.render_protocol import (
    FRAME,
    TIMED_OUT,
    Rendering,
    RenderJob,
    Templates,
)
from tokenwire.errors import ServiceError, invalid

__all__ = ["Renderer"]

_LOG = logging.getLogger("renderer")
_ENDED = "the process that renders chat templates ended with %s"
_SECONDS = 5.0  # of CPU time for a conversation; most take less than 5 ms
_WALL_SECONDS = 20.0  # enough for a process that gets a quarter of a processor
_START_SECONDS = 60.0
_MAX_WAITING = 1_024
_MAX_LENGTH = 8 * 1024 * 1024  # characters


class _ProcessEndedError(Exception):
    """End of the render process before it answered."""

    def __init__(self, *, is_killed: bool) -> None:
        super().__init__()
        self.is_killed = is_killed
        """True if the process was killed, for example by the kernel when memory ran out"""


class Renderer:
    """One render process, which is started again after its end."""

    def __init__(self, templates: Mapping[str, str], variables: Mapping[str, str]) -> None:
        """templates: Jinja sources by name. variables: variables of all templates."""
        self._templates = Templates(dict(templates), dict(variables), _MAX_LENGTH, _SECONDS)
        self._process: asyncio.subprocess.Process | None = None
        self._turns = FairTurns(1)
        self._waiting = Shares(_MAX_WAITING, reserve=_MAX_WAITING)
        self._is_stopping = False

    async def render(self, job: RenderJob) -> Rendering:
        """Return the rendering of a conversation, which has no error.

        Raises INVALID_ARGUMENT for the messages if the template refuses them or exceeds a limit,
        RESOURCE_EXHAUSTED if too many conversations wait, and UNAVAILABLE if the process can't
        start, or if two processes in a row are killed or hang.
        """
        tenant = current_tenant.get()
        if not self._waiting.has_room(tenant, 1):
            raise ServiceError(
                grpc.StatusCode.RESOURCE_EXHAUSTED,
                "TOO_MANY_RENDERS",
                "Too many conversations wait to be rendered; try again.",
                retry_seconds=1,
            )
        self._waiting.add(tenant, 1)
        # shielded: the answer to a client that left must not reach the next one
        exchange = asyncio.ensure_future(self._exchange(msgspec.json.encode(job), tenant))
        exchange.add_done_callback(partial(self._on_exchanged, tenant))
        rendering = await asyncio.shield(exchange)
        if rendering.error:
            raise invalid("conversation.messages", rendering.error, reason="TEMPLATE_REFUSED")
        return rendering

    async def stop(self) -> None:
        """End the process, even while it starts. This is not logged as an error."""
        self._is_stopping = True
        if self._process is not None:
            await self._kill(self._process)
        async with self._turns.turn(
            ""
        ):  # a process that is being created ends as soon as it exists
            pass

    def _on_exchanged(self, tenant: str, exchange: "asyncio.Future[Rendering]") -> None:
        self._waiting.add(tenant, -1)
        if not exchange.cancelled():
            exchange.exception()  # asyncio logs an exception that no client retrieves

    async def _exchange(self, job: bytes, tenant: str) -> Rendering:
        """Return the answer of a process, or of a fresh one if the first ends or hangs."""
        async with self._turns.turn(tenant, len(job)):
            with suppress(_ProcessEndedError):
                return await self._answer(job)
            try:
                return await self._answer(job)
            except _ProcessEndedError as end:
                if end.is_killed:
                    raise _no_renderer("was killed twice, or hung") from None
                return Rendering(error="The chat template takes too much memory.")

    async def _answer(self, job: bytes) -> Rendering:
        """Return the answer of the process. Raises _ProcessEndedError if it ends or hangs."""
        process = await self._started_process()
        try:
            answer = await asyncio.wait_for(_ask(process, job), _WALL_SECONDS)
            return msgspec.json.decode(answer, type=Rendering)
        except TimeoutError:
            _LOG.warning("the process that renders chat templates hangs: it is killed")
            await self._kill(process)
        except (OSError, asyncio.IncompleteReadError):
            # no kill here: it would hide the exit status
            status = exit_status(await process.wait())
            if not self._is_stopping:
                _LOG.warning(_ENDED, status)
        self._process = None
        code = process.returncode
        if code == -TIMED_OUT:  # a fresh process would take as long
            limit = f"{_SECONDS:g} s of CPU time"
            return Rendering(error=f"The chat template takes more than {limit}.")
        raise _ProcessEndedError(is_killed=code == -signal.SIGKILL)

    async def _started_process(self) -> asyncio.subprocess.Process:
        if self._process is not None and self._process.returncode is not None:
            _LOG.warning(_ENDED, exit_status(self._process.returncode))
            self._process = None
        if self._process is None:
            self._process = await self._start()
        return self._process

    async def _start(self) -> asyncio.subprocess.Process:
        """Return a new process. Raises UNAVAILABLE if it can't start, or after `stop`."""
        if self._is_stopping:
            raise _no_renderer("does not start")
        process = self._process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "services.tokenizer.chat.template.render_process"),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            start_new_session=True,  # the service ends the process after Ctrl-C
        )
        try:
            if self._is_stopping:
                await self._kill(process)
            content = msgspec.json.encode(self._templates)
            await asyncio.wait_for(_ask(process, content), _START_SECONDS)
        except (TimeoutError, OSError, asyncio.IncompleteReadError) as error:
            if isinstance(error, TimeoutError):
                await self._kill(process)
            status = exit_status(await process.wait())
            if not self._is_stopping:
                _LOG.error(_ENDED, status)
            self._process = None
            raise _no_renderer("does not start") from None
        return process

    async def _kill(self, process: asyncio.subprocess.Process) -> None:
        if process.returncode is None:
            process.send_signal(signal.SIGKILL)
        await process.wait()


def _no_renderer(problem: str) -> ServiceError:
    return ServiceError(
        grpc.StatusCode.UNAVAILABLE,
        "NO_RENDERER",
        f"The process that renders conversations {problem}; see the server's log.",
        retry_seconds=1,
    )


async def _ask(process: asyncio.subprocess.Process, content: bytes) -> bytes:
    """Send a frame; return its answer."""
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write(FRAME.pack(len(content)) + content)
    await process.stdin.drain()
    [size] = FRAME.unpack(await process.stdout.readexactly(FRAME.size))
    return await process.stdout.readexactly(size)
