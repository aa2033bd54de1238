"""The process that runs the step loop: loads the model, then takes commands and sends outputs.

It is a process of its own because a busy interpreter thread beside it stretches every step.
"""

import logging
import os
import pickle
import select
import signal
import socket
import struct
import time
from collections.abc import Iterator
from contextlib import suppress
from typing import NoReturn

import torch

from services.common import logging as service_logging
from services.common.settings import StartupError
from services.engine.attention import KVCache
from services.engine.block_pool import BlockPool
from services.engine.kernels.memory import touch
from services.engine.memory import choose_num_blocks
from services.engine.messages import Command, LoopFailed, LoopReady, ModelDescription
from services.engine.model.errors import CheckpointError
from services.engine.model.fingerprint import weights_fingerprint
from services.engine.model.loader import load_generation_defaults, load_model, resolve_dtype
from services.engine.model_runner import ModelRunner, StepRoom
from services.engine.scheduler import Scheduler, SchedulerLimits
from services.engine.settings import EngineSettings
from services.engine.step_loop import LoopLimits, StepLoop

__all__ = ["run"]

_LOG = logging.getLogger("loop")
_HEADER = struct.Struct("<Q")


def run(settings: EngineSettings, link: socket.socket) -> NoReturn:
    """The life of the process. It ends when the other side of `link` is gone."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)  # the gRPC side decides when to stop
    service_logging.configure("engine", settings.log_level)
    messages = _MessageSocket(link)
    try:
        loop, description = _load(settings)
    except (CheckpointError, StartupError) as error:
        messages.send(LoopFailed(str(error)))
        os._exit(2)
    try:
        with suppress(ConnectionError, EOFError):
            messages.send(LoopReady(description))
            _run(loop, messages)
    except Exception:
        _LOG.exception("a step failed; what runs is lost")
        os._exit(1)
    os._exit(0)  # skips torch's slow teardown; nothing is left to save


def _run(loop: StepLoop, messages: "_MessageSocket") -> None:
    timeout: float | None = None
    while not loop.stopped:
        messages.wait(timeout)
        output = loop.step(messages.receive)
        if output.outputs or loop.progressed:
            messages.send(output)
        # without progress, what is left waits for credit or masks; look in on those that starve
        timeout = 0.0 if loop.progressed else None if loop.is_idle else 1.0


def _load(settings: EngineSettings) -> tuple[StepLoop, ModelDescription]:
    began = time.monotonic()
    device = _device(settings.device)
    if settings.threads:
        torch.set_num_threads(settings.threads)
    torch.set_grad_enabled(False)
    decoder = load_model(
        settings.model,
        resolve_dtype(settings.dtype),
        progress=True,
        device=device,
        weights=settings.weights,
    )
    spec, size = decoder.spec, decoder.block_size
    per_block = KVCache.bytes_per_block(spec, size, decoder.dtype)
    least = -(-spec.context_length // size)
    num_blocks = choose_num_blocks(
        settings.kv_memory, per_block, least * settings.max_running, least, device
    )
    allocating = time.monotonic()
    is_cuda = device.type == "cuda"
    cache = decoder.allocate_cache(num_blocks + is_cuda, size)  # one that padding writes to
    if device.type == "cpu":
        for tensor in (*cache.keys, *cache.values):
            touch(tensor)
    _LOG.info(
        "KV cache: %d blocks of %d tokens, %.2f GiB, allocated in %.1f s",
        num_blocks,
        size,
        num_blocks * per_block / 2**30,
        time.monotonic() - allocating,
    )
    scheduler = Scheduler(
        SchedulerLimits(
            max_running=settings.max_running,
            max_step_tokens=settings.max_step_tokens,
            mixed_step_factor=settings.mixed_step_factor,
            block_size=size,
            speculate=settings.speculate == "ngram",
        ),
        BlockPool(num_blocks),
    )
    limits = LoopLimits(
        eos_token_ids=frozenset(spec.eos_token_ids),
        max_waiting=settings.max_waiting,
    )
    defaults = load_generation_defaults(settings.model)
    fields = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
    recommended = {name: getattr(defaults, name) for name in fields}
    description = ModelDescription(
        architecture=spec.architecture,
        dtype=str(decoder.dtype).removeprefix("torch."),
        device=device.type,
        context_length=spec.context_length,
        vocabulary_size=spec.vocab_size,
        eos_token_ids=spec.eos_token_ids,
        bos_token_id=spec.bos_token_id,
        recommended={k: float(v) for k, v in recommended.items() if v is not None},
        weights_fingerprint=weights_fingerprint(settings.model, settings.weights),
        block_size=size,
        total_blocks=num_blocks,
        kv_bytes=num_blocks * per_block,
        weight_bytes=decoder.weight_bytes,
        load_seconds=time.monotonic() - began,
    )
    room = StepRoom(settings.max_step_tokens + settings.max_running, settings.max_running, least)
    runner = ModelRunner(decoder, cache, room if is_cuda and decoder.is_capturable else None)
    return StepLoop(scheduler, runner, limits, overlaps=is_cuda), description


def _device(name: str) -> torch.device:
    if name == "cuda" and not torch.cuda.is_available():
        raise StartupError("--device cuda: torch finds no CUDA device.")
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    return torch.device(name)


class _MessageSocket:
    """Pickled messages over a socket, each behind its length. The peer is our own parent."""

    def __init__(self, link: socket.socket) -> None:
        self._link = link
        self._buffer = bytearray()

    def send(self, message: object) -> None:
        data = pickle.dumps(message, protocol=pickle.HIGHEST_PROTOCOL)
        self._link.sendall(_HEADER.pack(len(data)) + data)

    def wait(self, timeout: float | None) -> None:
        """Return when bytes have come, or after `timeout` seconds."""
        if timeout != 0:
            select.select([self._link], [], [], timeout)

    def receive(self) -> Iterator[Command]:
        """The messages that have come, without waiting. Raises EOFError when the peer is gone."""
        while select.select([self._link], [], [], 0)[0]:
            data = self._link.recv(1 << 20)
            if not data:
                raise EOFError
            self._buffer += data
        start = 0
        while len(self._buffer) - start >= _HEADER.size:
            (size,) = _HEADER.unpack_from(self._buffer, start)
            end = start + _HEADER.size + size
            if len(self._buffer) < end:
                break
            yield pickle.loads(memoryview(self._buffer)[start + _HEADER.size : end].tobytes())
            start = end
        del self._buffer[:start]
