"""The process that runs the step loop: loads the model, then takes commands and sends outputs.

It is a process of its own because a busy interpreter thread beside it stretches every step.
"""

import logging
import os
import select
import signal
import socket
import time
from collections import deque
from collections.abc import Iterator
from contextlib import suppress
from typing import NoReturn

from services.common import logging as service_logging
from services.common.settings import StartupError
from services.engine.framing import Unpacker, pack
from services.engine.loop.loaded_loop import load_loop
from services.engine.loop.step_loop import StepLoop
from services.engine.messages import Command, LoopFailed, LoopReady
from services.engine.model.checkpoint.errors import CheckpointError
from services.engine.settings import EngineSettings

__all__ = ["run"]

_LOG = logging.getLogger("loop")
_RECEIVE_SECONDS = 0.005
"""That commands may take before each step: the rest of a flood waits, the streams do not"""


def run(settings: EngineSettings, link: socket.socket) -> NoReturn:
    """The life of the process. It ends when the other side of `link` is gone."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)  # the gRPC side decides when to stop
    service_logging.configure("engine", settings.log_level)
    messages = _MessageSocket(link)
    try:
        loaded = load_loop(settings)
    except (CheckpointError, StartupError) as error:
        with suppress(ConnectionError):  # the other side may be gone: another service failed first
            messages.send(LoopFailed(str(error)))
        os._exit(2)
    team = loaded.model.team
    team.watch()
    try:
        with suppress(ConnectionError, EOFError):
            messages.send(LoopReady(loaded.description))
            _run(loaded.steps, messages)
        team.disband()
    except Exception:
        team.look_around()
        _LOG.exception("a step failed; what runs is lost")
        os._exit(1)
    os._exit(0)  # skips torch's slow teardown; nothing is left to save


def _run(loop: StepLoop, messages: "_MessageSocket") -> NoReturn:
    """Step after step. Raises EOFError or ConnectionError when the other side is gone."""
    timeout: float | None = None
    while True:
        messages.wait(timeout)
        output = loop.step(messages.receive)
        if output.outputs or loop.progressed or not loop.is_idle:
            messages.send(output)  # though nothing happened: silence means that a step hangs
        # without progress, what is left waits for credit or masks; look in on those that starve
        timeout = 0.0 if loop.progressed else None if loop.is_idle else 1.0


class _MessageSocket:
    """The link to our parent."""

    def __init__(self, link: socket.socket) -> None:
        self._link = link
        self._unpacker = Unpacker()
        self._arrived: deque[Command] = deque()

    def send(self, message: object) -> None:
        self._link.sendall(pack(message))

    def wait(self, timeout: float | None) -> None:
        """Return when something has come, or after `timeout` seconds."""
        if timeout != 0 and not self._arrived:
            select.select([self._link], [], [], timeout)

    def receive(self) -> Iterator[Command]:
        """The messages that have come, without waiting; where many have, those for which there is
        time before the next step. Raises EOFError when the peer is gone."""
        end = time.monotonic() + _RECEIVE_SECONDS
        while self._arrived or select.select([self._link], [], [], 0)[0]:
            if not self._arrived:
                data = self._link.recv(1 << 20)
                if not data:
                    raise EOFError
                self._arrived.extend(self._unpacker.feed(data))
            while self._arrived:
                yield self._arrived.popleft()
                if time.monotonic() >= end:
                    return
