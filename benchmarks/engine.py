"""The engine's step loop in this process, without gRPC: the upper bound of the services' speed.

Call `limit_thread_spinning` before importing this module: torch reads OpenMP's settings on import.
"""

from __future__ import annotations

import gc
import random
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from ctypes import Array, c_double
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple, ParamSpec, TypeVar
from unittest.mock import patch

import torch

from benchmarks.prompts import Prompts
from services.common.block_hash import hash_block
from services.engine import engine
from services.engine.batch.step_batch import StepBatch
from services.engine.checked_request import SamplingSettings
from services.engine.engine import Engine
from services.engine.execution import loaded_model
from services.engine.execution.cache_need import CacheNeed
from services.engine.execution.memory_budget import choose_num_blocks
from services.engine.kernels.library import Kernel
from services.engine.kernels.structures import OperationCall
from services.engine.loop import step_sampler
from services.engine.messages import RequestDone, Token
from services.engine.model.attention import AttentionBackend
from services.engine.model.operators.interface import Gate, Operators, Projection
from services.engine.model.operators.recording import Recording
from services.engine.sampling.sampler import sample
from services.engine.settings import EngineSettings
from tokenwire.load.workloads import ClosedLoop, Workload

__all__ = ["PARTS", "MeasuredEngine", "MeasuredStep", "Stopwatch"]

_PART_OF_A_BLOCK = 256
"""Tokens by which the KV cache may be cut to whole blocks"""
_LONG_SEQUENCE = 4096
"""Tokens that the engine expects of a sequence"""
PARTS = {
    Kernel.NORM: "norm, rotation",
    Kernel.LINEAR: "linear",
    Kernel.ROTATION: "norm, rotation",
    Kernel.ATTENTION: "attention",
    Kernel.KEEP: "norm, rotation",
    Kernel.ROW_NORM: "norm, rotation",
    Kernel.GROUPED_LINEAR: "linear",
    Kernel.FLOAT_LINEAR: "linear",
    Kernel.GATE_ROWS: "linear",
    Kernel.PAGED_ATTENTION: "attention",
    Kernel.DELTA_RULE: "attention",
    Kernel.ARRANGE: "norm, rotation",
    Kernel.STATE_SCAN: "attention",
    Kernel.MIXTURE: "linear",
    Kernel.SCALE: "norm, rotation",
    Kernel.LATENT_DECODE: "attention",
}
"""Part of a step that each kernel counts to"""

gc.freeze()  # as the service does with what it has imported

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")


class MeasuredStep(NamedTuple):
    """Outcome of a step of a closed loop."""

    tokens: int
    """Output tokens"""
    seconds: float
    is_full: bool
    """True if as many requests ran as may at once"""


class MeasuredEngine(Engine):
    """An engine in this process, with the default limits of the service and loads to measure."""

    def __init__(
        self,
        model: Path,
        dtype: str,
        tokens: int,
        speculate: bool = False,
        weights: str = "full",
        device: str = "cpu",
        streams: int = 1,
        model_code: str = "auto",
        kv_dtype: str = "auto",
        draft: Path | None = None,
        dependent_launch: bool = False,
    ) -> None:
        """tokens: what the KV cache has to hold; streams: sequences that run at once.

        draft: model that makes draft tokens; None = there is none.
        """
        settings = EngineSettings(
            dtype=dtype,
            device=device,
            weights=weights,
            model_code=model_code,
            kv_dtype=kv_dtype,
            dependent_launch=dependent_launch,
            speculate="ngram" if speculate else "off" if draft is None else "auto",
            draft="" if draft is None else str(draft),
        )

        def choose(_: str, context: str, need: CacheNeed, *arguments: Any, **keywords: Any) -> int:
            memory = str(_cache_bytes(need, tokens, streams))
            return choose_num_blocks(memory, context, need, *arguments, **keywords)

        with patch.object(loaded_model, "choose_num_blocks", choose):
            super().__init__(model, settings)
        size = self.model.vocabulary_size
        self._ids = range(size // 16, 15 * size // 16)
        self._random = random.Random(0)

    @property
    def weight_bytes(self) -> int:
        return self.model.weight_bytes

    @property
    def kv_bytes_per_token(self) -> int:
        states = self.loaded.model.state_slots * self.state_bytes
        tokens = self.model.total_blocks * self.model.block_size
        return (self.model.kv_bytes - states) // tokens

    @property
    def state_bytes(self) -> int:
        """Bytes of a sequence's states."""
        return self.loaded.model.decoder.state_bytes

    def serve(self, workload: Workload, prompts: Prompts) -> tuple[int, float]:
        """Run a closed loop to its end. Return the output tokens and the seconds."""
        assert isinstance(workload.arrivals, ClosedLoop)
        some = map(_ids, islice(prompts.of(workload), workload.requests))
        return self.complete(some, workload.arrivals.concurrency, workload.output)

    def complete(
        self,
        prompts: Iterable[Sequence[int]],
        concurrency: int,
        output: int,
        temperature: float = 0.0,
    ) -> tuple[int, float]:
        """Complete prompts, `concurrency` at a time. Return the output tokens and the seconds."""
        began = time.perf_counter()
        requests = ((prompt, output) for prompt in prompts)
        tokens = sum(step.tokens for step in self.completing(requests, concurrency, temperature))
        return tokens, time.perf_counter() - began

    def completing(
        self,
        requests: Iterable[tuple[Sequence[int], int]],
        concurrency: int,
        temperature: float = 0.0,
    ) -> Iterator[MeasuredStep]:
        """Complete prompts, each with its number of output tokens. Yield each step."""
        waiting = iter(requests)
        unfinished = 0
        for prompt, output in islice(waiting, concurrency):
            self._add(prompt, output, temperature)
            unfinished += 1
        while unfinished:
            began = time.perf_counter()
            events = self.step()
            seconds = time.perf_counter() - began
            tokens = sum(isinstance(event, Token) for event in events)
            yield MeasuredStep(tokens, seconds, unfinished == concurrency)
            for _ in filter(lambda event: isinstance(event, RequestDone), events):
                unfinished -= 1
                for prompt, output in islice(waiting, 1):
                    self._add(prompt, output, temperature)
                    unfinished += 1

    def prefill(self, length: int) -> float:
        """Return the seconds from a new prompt of `length` tokens to its first token, run alone."""
        self._add(self._random.choices(self._ids, k=length), 1)
        began = time.perf_counter()
        while not any(isinstance(output, RequestDone) for output in self.step()):
            pass
        return time.perf_counter() - began

    @contextmanager
    def decoding(self, batch: int, context: int, most: int) -> Iterator[Callable[[], float]]:
        """Decode `batch` sequences of `context` tokens, up to `most` tokens each.

        Yield a function that runs one step and returns its seconds.
        """
        # whole blocks, so that one token of each sequence is left to compute
        size = self.model.block_size
        cached = context // size * size
        prompts = [self._random.choices(self._ids, k=cached + 1) for _ in range(batch)]
        for prompt in prompts:
            self._remember(prompt)
        waiting = {self._add(prompt, most + batch) for prompt in prompts}
        handles = list(waiting)
        while waiting:
            waiting -= {output.handle for output in self.step() if isinstance(output, Token)}

        def step() -> float:
            began = time.perf_counter()
            self.step()
            return time.perf_counter() - began

        yield step
        self.cancel(handles)
        self.step()

    @contextmanager
    def masked(self, allowed: bytes) -> Iterator[None]:
        """Let requests draw only ids whose bits are set, as a grammar's mask does."""

        def settings(**values: Any) -> SamplingSettings:
            return SamplingSettings(**values, allowed=allowed)

        with patch.object(engine, "SamplingSettings", settings):
            yield

    def _add(self, prompt: Sequence[int], output: int, temperature: float = 0.0) -> int:
        return self.submit(
            prompt, max_tokens=output, temperature=temperature, seed=0, ignore_eos=True
        )

    def _remember(self, prompt: Sequence[int]) -> None:
        """Put a prompt into the prefix cache without computing it; step times stay the same."""
        ids = torch.tensor(prompt, dtype=torch.int32).numpy()
        size = self.model.block_size
        for group in self.loaded.caches.groups:
            blocks = group.pool.allocate(len(prompt) // size)
            name = b""
            for index, block in enumerate(blocks):
                start = index * size
                name = hash_block(name, ids[start : start + size].tobytes())
                group.pool.cache(block, name)
            group.pool.release(blocks)


class Stopwatch:
    """Seconds spent in each part of a step, without the parts that it calls."""

    def __init__(self, clock: Callable[[], float] | None = None) -> None:
        """clock: returns seconds; None = time.perf_counter."""
        self._clock = clock or time.perf_counter
        self.seconds: defaultdict[str, float] = defaultdict(float)
        self._within: list[float] = []

    def timed(
        self, part: str, function: Callable[Arguments, Result]
    ) -> Callable[Arguments, Result]:
        def wrapper(*args: Arguments.args, **kwargs: Arguments.kwargs) -> Result:
            self._within.append(0.0)
            began = self._clock()
            try:
                return function(*args, **kwargs)
            finally:
                took = self._clock() - began
                self.seconds[part] += took - self._within.pop()
                if self._within:
                    self._within[-1] += took

        return wrapper

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Time the operators of every model, and sampling, in the `with` block."""
        operations: tuple[tuple[str, type[object], tuple[str, ...]], ...] = (
            (PARTS[Kernel.LINEAR], Projection, ("into", "add_to", "argmax")),
            (PARTS[Kernel.LINEAR], Gate, ("into",)),
            (PARTS[Kernel.ATTENTION], AttentionBackend, ("attend",)),
            (PARTS[Kernel.NORM], Operators, ("rms_norm", "rotate", "keep")),
        )
        with ExitStack() as patches:
            for part, base, names in operations:
                for kind in _implementations(base):
                    for name in names:
                        if name in vars(kind):
                            timed = self.timed(part, vars(kind)[name])
                            patches.enter_context(patch.object(kind, name, timed))
            patches.enter_context(patch.object(Recording, "replay", self._timed_replay()))
            sampling = self.timed("sampling", sample)
            patches.enter_context(patch.object(step_sampler, "sample", sampling))
            yield

    def _timed_replay(self) -> Callable[..., None]:
        replay = Recording.replay

        def timed(recording: Recording, operations: Array[OperationCall], batch: StepBatch) -> None:
            seconds = (c_double * len(Kernel))()
            replay(recording, operations, batch, seconds)
            for kernel in Kernel:
                self.seconds[PARTS[kernel]] += seconds[kernel]

        return timed


def _implementations(base: type[object]) -> Iterator[type[object]]:
    for kind in base.__subclasses__():
        yield kind
        yield from _implementations(kind)


def _cache_bytes(need: CacheNeed, tokens: int, streams: int) -> int:
    """Return the memory that holds so many tokens, and the states of so many sequences."""
    if need.state_bytes:
        # The engine counts on long sequences when it divides memory between pages and states.
        longest = need.blocks(min(need.model_context, _LONG_SEQUENCE))
        return need.bytes(max(-(-tokens // need.block_size), streams * longest))
    blocks = -(-(tokens + _PART_OF_A_BLOCK) // need.block_size)
    return blocks * sum(group.block_bytes for group in need.groups)


def _ids(prompt: list[int] | str) -> list[int]:
    assert isinstance(prompt, list)
    return prompt
