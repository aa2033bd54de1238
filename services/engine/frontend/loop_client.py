"""Client of the loop process, for its start, its commands, its outputs and its end."""

import signal
import socket
from collections.abc import Callable
from typing import Any

from services.common.process import collector_paused
from services.common.settings import StartupError
from services.engine.deferred_modules import defer_torch_modules
from services.engine.frontend.child_process import Child, ChildProcess, spawn
from services.engine.messages import Command, LoopFailed, StepOutput
from services.engine.model_description import ModelDescription
from services.engine.settings import EngineSettings

__all__ = ["LoopClient", "spawn_loop"]


def spawn_loop() -> Child:
    """Start the loop process, which imports torch and then waits for `LoopClient.start`.

    The import takes a second or two, in which this process reads and checks the model's files.
    """
    return spawn("tokenwire-engine-loop", _run)


class LoopClient:
    """Client that starts the loop process, sends it commands, and passes on its outputs."""

    def __init__(
        self,
        settings: EngineSettings,
        child: Child,
        on_output: Callable[[StepOutput], None],
        on_death: Callable[[str], None],
    ) -> None:
        self._settings = settings
        self._child = child
        self._on_death = on_death
        self._is_ready = False
        self._process = ChildProcess("The loop process", on_output, self._on_end)

    async def start(self) -> ModelDescription:
        """Wait until the process has loaded the model. Raises StartupError."""
        first: Any = await self._process.start(self._child, self._settings)
        if isinstance(first, LoopFailed):
            raise StartupError(first.message)
        self._is_ready = True
        model: ModelDescription = first.model
        return model

    def send(self, command: Command) -> None:
        """Queue a command for the loop's next step."""
        self._process.send(command)

    async def stop(self) -> None:
        """End the process and all requests that still run."""
        await self._process.stop()

    def _on_end(self, why: str) -> None:
        if self._is_ready:  # otherwise `start` has raised the reason
            self._on_death(why)


def _run(link: socket.socket) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the gRPC process decides when to stop
    defer_torch_modules()
    # imported only in the loop process, because the gRPC process must stay free of torch
    with collector_paused():
        from services.engine.loop.loop_process import run

    run(link)
