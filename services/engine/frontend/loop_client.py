"""Client of the loop process: start, commands, outputs and end."""

import asyncio
import multiprocessing
import os
import socket
from collections.abc import Callable
from typing import cast

from services.common.settings import StartupError
from services.engine.framing import Unpacker, pack
from services.engine.messages import Command, LoopFailed, LoopReady, ModelDescription, StepOutput
from services.engine.settings import EngineSettings
from tokenwire.serving.exit_status import exit_status

__all__ = ["LoopClient", "limit_thread_spinning"]


class LoopClient(asyncio.Protocol):
    """Starts the loop process, sends it commands, and hands its outputs to a callback."""

    def __init__(
        self,
        settings: EngineSettings,
        on_output: Callable[[StepOutput], None],
        on_death: Callable[[str], None],
    ) -> None:
        self._settings = settings
        self._on_output = on_output
        self._on_death = on_death
        self._process: multiprocessing.process.BaseProcess | None = None
        self._transport: asyncio.WriteTransport | None = None
        self._unpacker = Unpacker()
        self._first: asyncio.Future[object] = asyncio.get_running_loop().create_future()
        """The first message; None if the process dies without one"""
        self._is_ready = False
        """True from LoopReady until `stop`"""

    async def start(self) -> ModelDescription:
        """Start the process and wait until the model is loaded. Raises StartupError."""
        ours, theirs = socket.socketpair()
        # spawn: a fork of this process would share its event loop and threads
        context = multiprocessing.get_context("spawn")
        self._process = context.Process(
            target=_run, args=(self._settings, theirs), name="tokenwire-engine-loop", daemon=True
        )
        limit_thread_spinning()
        self._process.start()
        theirs.close()
        await asyncio.get_running_loop().create_connection(lambda: self, sock=ours)
        first = await self._first
        if isinstance(first, LoopFailed):
            raise StartupError(first.message)
        if not isinstance(first, LoopReady):
            raise StartupError(
                f"The loop process died while it loaded the model ({self._exit_code()})."
            )
        return first.model

    def send(self, command: Command) -> None:
        """Queue a command for the loop's next step."""
        if self._transport is not None:
            self._transport.write(pack(command))

    async def stop(self) -> None:
        """End the process, with all requests that still run."""
        self._is_ready = False
        if self._transport is not None:
            self._transport.close()
        if self._process is not None:
            await asyncio.to_thread(self._process.join, 5)
            if self._process.is_alive():
                self._process.kill()

    # asyncio.Protocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.WriteTransport, transport)

    def data_received(self, data: bytes) -> None:
        for message in self._unpacker.feed(data):
            if isinstance(message, StepOutput):
                self._on_output(message)
            elif not self._first.done():
                self._is_ready = isinstance(message, LoopReady)
                self._first.set_result(message)

    def connection_lost(self, exc: Exception | None) -> None:
        if not self._first.done():
            self._first.set_result(None)
        elif self._is_ready:
            self._on_death(f"The loop process died ({self._exit_code()}).")

    def _exit_code(self) -> str:
        if self._process is None:
            return "never started"
        self._process.join(1)
        return exit_status(self._process.exitcode)


def _run(settings: EngineSettings, link: socket.socket) -> None:
    # imported in the loop process only: the gRPC process must stay free of torch
    from services.engine.loop.loop_process import run

    run(settings, link)


def limit_thread_spinning() -> None:
    """Let OpenMP threads spin only briefly, in this process and its children.

    Without spinning, each operator pays for a wake-up; without a limit, the threads take the cores
    from the other services.
    """
    os.environ.setdefault("GOMP_SPINCOUNT", "20000")
