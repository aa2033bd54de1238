"""The gRPC side's handle on the step loop's process."""

import asyncio
import multiprocessing
import os
import pickle
import socket
import struct
from collections.abc import Callable

from services.common.settings import StartupError
from services.engine.messages import Command, LoopFailed, LoopReady, ModelDescription, StepOutput
from services.engine.settings import EngineSettings

__all__ = ["EngineProcess", "set_thread_waiting"]

_HEADER = struct.Struct("<Q")


class EngineProcess:
    """Starts the loop, sends it commands, and hands on what it reports."""

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
        self._writer: asyncio.StreamWriter | None = None
        self._reading: asyncio.Task[None] | None = None

    async def start(self) -> ModelDescription:
        """Start the process and wait until the model is loaded. Raises StartupError."""
        ours, theirs = socket.socketpair()
        # imported there alone: this process must stay free of torch
        context = multiprocessing.get_context("spawn")
        self._process = context.Process(
            target=_run, args=(self._settings, theirs), name="tokenwire-engine-loop", daemon=True
        )
        set_thread_waiting()
        self._process.start()
        theirs.close()
        reader, self._writer = await asyncio.open_connection(sock=ours)
        first = await _read(reader)
        if isinstance(first, LoopFailed):
            raise StartupError(first.message)
        if not isinstance(first, LoopReady):
            raise StartupError(f"The engine's process died while it loaded ({self._exit_code()}).")
        self._reading = asyncio.ensure_future(self._read(reader))
        return first.model

    def send(self, command: Command) -> None:
        """Queue a command for the loop's next step."""
        if self._writer is not None:
            data = pickle.dumps(command, protocol=pickle.HIGHEST_PROTOCOL)
            self._writer.write(_HEADER.pack(len(data)) + data)

    async def stop(self) -> None:
        """End the process; what it still runs is lost."""
        if self._reading is not None:
            self._reading.cancel()
        if self._writer is not None:
            self._writer.close()
        if self._process is not None:
            await asyncio.to_thread(self._process.join, 5)
            if self._process.is_alive():
                self._process.kill()

    async def _read(self, reader: asyncio.StreamReader) -> None:
        while isinstance(message := await _read(reader), StepOutput):
            self._on_output(message)
        self._on_death(f"The engine's process died ({self._exit_code()}).")

    def _exit_code(self) -> str:
        if self._process is None:
            return "never started"
        self._process.join(1)
        return f"exit code {self._process.exitcode}"


async def _read(reader: asyncio.StreamReader) -> object:
    """One message; None at the end."""
    try:
        (size,) = _HEADER.unpack(await reader.readexactly(_HEADER.size))
        return pickle.loads(await reader.readexactly(size))
    except (asyncio.IncompleteReadError, ConnectionError):
        return None


def _run(settings: EngineSettings, link: socket.socket) -> None:
    from services.engine.loop_process import run

    run(settings, link)


def set_thread_waiting() -> None:
    """Let OpenMP's threads spin only briefly between operators.

    Without spinning each operator pays a wake-up; without a bound the threads take the cores from
    the other services.
    """
    os.environ.setdefault("GOMP_SPINCOUNT", "20000")
