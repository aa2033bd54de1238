"""Process of the step loop: it loads the model, then takes commands and sends outputs.

A process of its own, because a busy interpreter thread beside the loop delays every step.
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
from services.engine.execution.loaded_model import LoadedModel, load
from services.engine.execution.model_runner import ModelRunner, StepCapacity, max_logit_rows
from services.engine.framing import Unpacker, pack
from services.engine.loop.request_table import LoopLimits
from services.engine.loop.step_loop import StepLoop
from services.engine.messages import Command, LoopFailed, LoopReady, ModelDescription
from services.engine.model.checkpoint.config import CheckpointError
from services.engine.model.checkpoint.generation import load_generation_defaults
from services.engine.ranks.group import RankGroup
from services.engine.scheduling.block_pool import BlockPool
from services.engine.scheduling.scheduler import Scheduler
from services.engine.scheduling.step_plan import SchedulerLimits
from services.engine.settings import EngineSettings

__all__ = ["run"]

_LOG = logging.getLogger("loop")
_RECEIVE_SECONDS = 0.005
"""Time limit of commands before each step: the rest of a flood waits, running streams don't"""


def run(settings: EngineSettings, link: socket.socket) -> NoReturn:
    """Run the loop until the gRPC process closes `link`; exit with 1 or 2 after a failure."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)  # the gRPC process decides when to stop
    service_logging.configure("engine", settings.log_level)
    messages = _MessageSocket(link)
    try:
        loop, description, ranks = _load(settings)
    except (CheckpointError, StartupError) as error:
        # the gRPC process may be gone: it stops when another service fails
        with suppress(ConnectionError):
            messages.send(LoopFailed(str(error)))
        os._exit(2)
    ranks.watch()
    try:
        with suppress(ConnectionError, EOFError):
            messages.send(LoopReady(description))
            _run(loop, messages)
        ranks.dissolve()
    except Exception:
        ranks.exit_if_rank_lost()
        _LOG.exception("a step failed; all requests are lost")
        os._exit(1)
    os._exit(0)  # skips torch's slow teardown; nothing is left to save


def _run(loop: StepLoop, messages: "_MessageSocket") -> NoReturn:
    """Run steps forever. Raises EOFError or ConnectionError when the gRPC process is gone."""
    timeout: float | None = None
    while True:
        messages.wait(timeout)
        output = loop.step(messages.receive)
        if output.outputs or loop.progressed or not loop.is_idle:
            messages.send(output)  # even if empty: silence would mean that a step hangs
        # without progress, all requests wait for credit or masks: wake up to cut starved ones
        timeout = 0.0 if loop.progressed else None if loop.is_idle else 1.0


def _load(settings: EngineSettings) -> tuple[StepLoop, ModelDescription, RankGroup]:
    model = load(settings)
    decoder, cache, spec = model.decoder, model.cache, model.decoder.spec
    scheduler = Scheduler(
        SchedulerLimits(
            max_running=settings.max_running,
            max_step_tokens=settings.max_step_tokens,
            mixed_step_factor=settings.mixed_step_factor,
            block_size=cache.block_size,
            rows_at_once=decoder.rows_at_once,
            speculate=settings.speculate == "ngram",
            max_logit_rows=max_logit_rows(settings.max_running),
        ),
        BlockPool(model.num_blocks),
    )
    limits = LoopLimits(
        eos_token_ids=frozenset(spec.eos_token_ids),
        max_waiting=settings.max_waiting,
        starvation_seconds=settings.stall_seconds,
    )
    description = ModelDescription(
        architecture=spec.architecture,
        dtype=str(decoder.dtype).removeprefix("torch."),
        device=decoder.device.type,
        context_length=spec.context_length,
        vocabulary_size=spec.vocab_size,
        eos_token_ids=spec.eos_token_ids,
        bos_token_id=spec.bos_token_id,
        recommended=load_generation_defaults(settings.model),
        weights_fingerprint=model.fingerprint,
        block_size=cache.block_size,
        total_blocks=model.num_blocks,
        kv_bytes=model.kv_bytes,
        weight_bytes=model.weight_bytes,
    )
    runner = ModelRunner(decoder, cache, _graph_room(settings, model))
    overlaps = decoder.device.type == "cuda"
    alone = model.ranks.rank.is_alone
    loop = StepLoop(scheduler, runner, limits, overlaps=overlaps, isolates=alone)
    return loop, description, model.ranks


def _graph_room(settings: EngineSettings, model: LoadedModel) -> StepCapacity | None:
    """Return the size of the largest decode step if decode steps run as CUDA graphs.

    With several ranks they don't: a graph would leave out what rank 0's host sends to the others.
    """
    decoder = model.decoder
    if decoder.device.type != "cuda" or not decoder.is_capturable or not model.ranks.rank.is_alone:
        return None
    blocks = -(-decoder.spec.context_length // decoder.block_size)
    tokens = settings.max_step_tokens + settings.max_running
    return StepCapacity(tokens, settings.max_running, blocks)


class _MessageSocket:
    """Messages to and from the gRPC process."""

    def __init__(self, link: socket.socket) -> None:
        self._link = link
        self._unpacker = Unpacker()
        self._arrived: deque[Command] = deque()

    def send(self, message: object) -> None:
        self._link.sendall(pack(message))

    def wait(self, timeout: float | None) -> None:
        """Return when a command has come, or after `timeout` seconds."""
        if timeout != 0 and not self._arrived:
            select.select([self._link], [], [], timeout)

    def receive(self) -> Iterator[Command]:
        """Return the commands that have come, without waiting; the rest of a flood stays.

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
