"""A computing process of the engine, and the exchange of pickled messages with it."""

import asyncio
import multiprocessing
import os
import socket
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.process import BaseProcess
from typing import Any, cast

from services.common.exit_status import exit_status
from services.common.settings import StartupError
from services.engine.framing import Unpacker, pack

__all__ = ["Child", "ChildProcess", "limit_thread_spinning", "spawn"]


@dataclass(frozen=True, slots=True)
class Child:
    """A running process, and this process's end of the socket to it."""

    process: BaseProcess
    link: socket.socket


def spawn(name: str, run: Callable[..., None], *arguments: object) -> Child:
    """Start a process that calls `run(*arguments, link)`, and return at once.

    Raises StartupError where no process, memory or file descriptor is left.
    """
    try:
        return _spawn(name, run, *arguments)
    except OSError as error:
        raise StartupError(f"The process {name} can't be started: {error.strerror}.") from None


def _spawn(name: str, run: Callable[..., None], *arguments: object) -> Child:
    ours, theirs = socket.socketpair()
    # spawned, because a forked process would share the event loop and the threads
    context = multiprocessing.get_context("spawn")
    process = context.Process(target=run, args=(*arguments, theirs), name=name, daemon=True)
    limit_thread_spinning()
    process.start()
    theirs.close()
    return Child(process, ours)


class ChildProcess(asyncio.Protocol):
    """Connection to a process, whose messages go to a callback."""

    def __init__(
        self,
        title: str,
        on_message: Callable[[Any], None],
        on_death: Callable[[str], None],
    ) -> None:
        """title: the process's name in messages, such as "The loop process".

        on_message: called with each message but the first, which `start` returns.
        on_death: called with a sentence when the process dies after its first message.
        """
        self._title = title
        self._on_message = on_message
        self._on_death = on_death
        self._process: BaseProcess | None = None
        self._transport: asyncio.WriteTransport | None = None
        self._unpacker = Unpacker()
        self._first: asyncio.Future[object] = asyncio.get_running_loop().create_future()
        """First message of the process; None if it dies without one"""
        self._is_stopping = False
        self._has_ended = False

    async def start(self, child: Child, *messages: object) -> Any:
        """Send a process its first messages, and return the first message that it sends.

        Raises StartupError if it dies before.
        """
        self._process = child.process
        await asyncio.get_running_loop().create_connection(lambda: self, sock=child.link)
        for message in messages:
            self.send(message)
        first = await self._first
        if first is None:
            raise StartupError(
                f"{self._title} died while it loaded the model ({self._exit_code()})."
            )
        return first

    def send(self, message: object) -> None:
        """Queue a message for the process."""
        if self._transport is not None:
            self._transport.write(pack(message))

    async def stop(self) -> None:
        """End the process at once, with its unfinished work."""
        self._is_stopping = True
        if self._transport is not None:
            self._transport.close()
        if self._process is not None:
            await asyncio.to_thread(self._process.join, 5)
            if self._process.is_alive():
                self._process.kill()

    @property
    def has_ended(self) -> bool:
        """True once the started process has closed its end of the socket."""
        return self._has_ended

    # asyncio.Protocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.WriteTransport, transport)

    def data_received(self, data: bytes) -> None:
        for message in self._unpacker.feed(data):
            if self._first.done():
                self._on_message(message)
            else:
                self._first.set_result(message)

    def connection_lost(self, exc: Exception | None) -> None:
        self._has_ended = True
        if not self._first.done():
            self._first.set_result(None)
        elif not self._is_stopping:
            self._on_death(f"{self._title} died ({self._exit_code()}).")

    def _exit_code(self) -> str:
        if self._process is None:
            return "never started"
        self._process.join(1)
        return exit_status(self._process.exitcode)


def limit_thread_spinning() -> None:
    """Let OpenMP threads spin only briefly, in this process and its children.

    Without spinning, each operator pays for a wake-up; without a limit, the threads take the cores
    from the other services. A thread that waits at a barrier for one without a core spins all the
    time that the other could have its core: libgomp's 300,000 rounds take 15 ms, these 1 ms.
    """
    os.environ.setdefault("GOMP_SPINCOUNT", "20000")
