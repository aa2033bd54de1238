"""Process of the step loop: it gets its settings, loads the model, takes commands, sends outputs.

It is a separate process, because a busy interpreter thread beside the loop delays every step.
"""

import gc
import logging
import select
import signal
import socket
import time
from collections import deque
from collections.abc import Iterator
from contextlib import suppress
from typing import NoReturn

from services.common import logging as service_logging
from services.common.process import end_process, ends_with_peer
from services.common.settings import StartupError
from services.engine.framing import Unpacker, pack
from services.engine.loop.encoder_turns import EncoderTurns
from services.engine.loop.loaded_loop import LoadedLoop, load_loop
from services.engine.loop.step_loop import StepLoop
from services.engine.messages import Command, LoopFailed, LoopReady
from services.engine.model.checkpoint.config import CheckpointError
from services.engine.settings import EngineSettings

__all__ = ["run"]

_LOG = logging.getLogger("loop")
_RECEIVE_SECONDS = 0.005
"""Seconds for taking commands before each step. The rest of a flood waits for the next step,
because running streams must not wait for the flood"""
_READING_SECONDS = 0.01
"""Seconds between two checks of adapters that are being read while no step runs"""
_LEAST_SHARE = 0.1
"""Shortest turn of the image encoder, as a multiple of a step's time"""


def run(link: socket.socket) -> NoReturn:
    """Run the loop until the gRPC process closes `link`; exit with 1 or 2 after a failure."""
    messages = _MessageSocket(link)
    try:
        settings = messages.settings()
    except (ConnectionError, EOFError):
        end_process(0)  # the gRPC process has refused to start, and has reported the reason
    # The gRPC process decides when to stop. It ends a loop process without settings by this signal.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    service_logging.configure("engine", settings.log_level, settings.log_format)
    try:
        with ends_with_peer(link):
            loaded = load_loop(settings)
    except (CheckpointError, StartupError) as error:
        # the gRPC process may be gone: it stops when another service fails
        with suppress(ConnectionError):
            messages.send(LoopFailed(str(error)))
        end_process(2)
    ranks = loaded.model.ranks
    try:
        with suppress(ConnectionError, EOFError):
            messages.send(LoopReady(loaded.description))
            _run(loaded.steps, messages, _encoder_turns(settings, loaded))
        ranks.dissolve()
    except Exception:
        ranks.exit_if_rank_lost()
        _LOG.exception("a step failed; all requests are lost")
        end_process(1)
    end_process(0)


def _encoder_turns(settings: EngineSettings, loaded: LoadedLoop) -> EncoderTurns | None:
    """Return the image encoder's turns; None on a GPU, which runs the encoder beside the steps."""
    if loaded.description.device != "cpu":
        return None
    return EncoderTurns(max(settings.mixed_step_factor - 1, _LEAST_SHARE))


def _run(loop: StepLoop, messages: "_MessageSocket", turns: EncoderTurns | None) -> NoReturn:
    """Run steps forever. Raises EOFError or ConnectionError when the gRPC process is gone."""
    timeout: float | None = None
    gc.freeze()  # the model lives as long as the process; no collection needs to visit it
    while True:
        messages.wait(timeout)
        while seconds := loop.spare_seconds:
            messages.wait(seconds)
            loop.apply(messages.receive())
        started = time.monotonic()
        output = loop.step(messages.receive)
        if output.outputs or output.cache or loop.progressed or not loop.is_idle:
            messages.send(output)  # even if empty: without outputs a step counts as hanging
        if turns is not None and loop.encoder_works and loop.progressed:
            turns.give(time.monotonic() - started, had_prompts=loop.had_prompts)
        # without progress, all requests wait for credit or masks: wake up to abort starved requests
        timeout = 0.0 if loop.progressed else None if loop.is_idle else 1.0
        if loop.reads_adapters and not loop.progressed:
            timeout = _READING_SECONDS


class _MessageSocket:
    """Messages to and from the gRPC process."""

    def __init__(self, link: socket.socket) -> None:
        self._link = link
        self._unpacker = Unpacker()
        self._arrived: deque[Command] = deque()

    def send(self, message: object) -> None:
        self._link.sendall(pack(message))

    def settings(self) -> EngineSettings:
        """Wait for the first message. Raises EOFError when the peer is gone."""
        while True:
            data = self._link.recv(1 << 20)
            if not data:
                raise EOFError
            settings: EngineSettings
            settings, *commands = self._unpacker.feed(data) or [None]
            if settings is not None:
                self._arrived.extend(commands)
                return settings

    def wait(self, timeout: float | None) -> None:
        """Wait until a command has come, for at most `timeout` seconds."""
        if timeout != 0 and not self._arrived:
            select.select([self._link], [], [], timeout)

    def receive(self) -> Iterator[Command]:
        """Return the commands that have come, without waiting. The rest of a flood stays for later.

        Raises EOFError when the peer is gone.
        """
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
            if time.monotonic() >= end:  # in the middle of a large message
                return
