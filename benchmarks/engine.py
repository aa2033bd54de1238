"""The engine's step loop in this process, without gRPC: the upper bound of the services' speed.

Call `limit_thread_spinning` before importing this module: torch reads OpenMP's settings on import.
"""

from __future__ import annotations

import random
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from ctypes import Array, c_double
from itertools import islice
from pathlib import Path
from typing import ParamSpec, TypeVar
from unittest.mock import patch

import torch

from benchmarks.prompts import Prompts
from benchmarks.scenarios import ClosedLoop, Workload
from services.engine.batch.step_batch import StepBatch
from services.engine.execution.model_runner import ModelRunner, StepCapacity
from services.engine.kernels.library import Kernel, OperationCall
from services.engine.loop import step_loop
from services.engine.loop.request_table import LoopLimits
from services.engine.loop.step_loop import StepLoop
from services.engine.messages import (
    AddRequest,
    CancelRequest,
    CheckedRequest,
    FlushCache,
    Output,
    Refused,
    RequestDone,
    SamplingSettings,
    ScoredPrompt,
    StoppingSettings,
    Token,
)
from services.engine.model.attention import AttentionBackend, KVCache
from services.engine.model.loader import load_model, resolve_dtype
from services.engine.model.operators.interface import Gate, Operators, Projection
from services.engine.model.operators.recording import Recording
from services.engine.sampling.sampler import sample
from services.engine.scheduling.block_pool import BlockPool, hash_block
from services.engine.scheduling.scheduler import Scheduler
from services.engine.scheduling.step_plan import SchedulerLimits
from services.engine.settings import EngineSettings

__all__ = ["Engine", "Stopwatch"]

_SALT = b"benchmark"

_PARTS = {
    Kernel.NORM: "norm, rotation",
    Kernel.LINEAR: "linear",
    Kernel.ROTATION: "norm, rotation",
    Kernel.ATTENTION: "attention",
    Kernel.KEEP: "norm, rotation",
}

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")


class Engine:
    """A model and its step loop, with the engine's default limits.

    `tokens` is the capacity of the KV cache.
    """

    def __init__(
        self,
        model: Path,
        dtype: str,
        tokens: int,
        speculate: bool = False,
        weights: str = "full",
        device: str = "cpu",
    ) -> None:
        torch.set_grad_enabled(False)
        settings = EngineSettings()
        decoder = load_model(
            model, resolve_dtype(dtype), device=torch.device(device), weights=weights
        )
        decoder.reserve(settings.max_step_tokens + settings.max_running, settings.max_running)
        self._block_size = decoder.block_size
        num_blocks = -(-tokens // self._block_size)
        cache = decoder.allocate_cache(num_blocks + 1)
        for tensor in (*cache.keys, *cache.values):
            # Write every page: unwritten ones share a zero page, which stays in the CPU cache.
            tensor.fill_(0.01)
        limits = SchedulerLimits(
            max_running=settings.max_running,
            max_step_tokens=settings.max_step_tokens,
            mixed_step_factor=settings.mixed_step_factor,
            block_size=self._block_size,
            rows_at_once=decoder.rows_at_once,
            speculate=speculate,
        )
        self._pool = BlockPool(num_blocks)
        room = StepCapacity(
            settings.max_step_tokens + settings.max_running,
            settings.max_running,
            -(-decoder.spec.context_length // self._block_size),
        )
        self._loop = StepLoop(
            Scheduler(limits, self._pool),
            ModelRunner(decoder, cache, room if decoder.is_capturable else None),
            LoopLimits(frozenset(), settings.max_waiting),
            overlaps=device != "cpu",
        )
        self._context_length = decoder.spec.context_length
        self._ids = range(decoder.spec.vocab_size // 16, 15 * decoder.spec.vocab_size // 16)
        self._random = random.Random(0)
        self._handles = 0
        self.weight_bytes = decoder.weight_bytes
        self.kv_bytes_per_token = (
            KVCache.bytes_per_block(decoder.spec, self._block_size, decoder.dtype)
            // self._block_size
        )

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
        waiting = iter(prompts)
        tokens = 0
        began = time.perf_counter()
        unfinished = 0
        for prompt in islice(waiting, concurrency):
            self._add(prompt, output, temperature)
            unfinished += 1
        while unfinished:
            for event in self._step():
                if isinstance(event, Token):
                    tokens += 1
                elif isinstance(event, RequestDone):
                    unfinished -= 1
                    for prompt in islice(waiting, 1):
                        self._add(prompt, output, temperature)
                        unfinished += 1
        return tokens, time.perf_counter() - began

    def complete_scored(self, prompt: Sequence[int], output: int) -> tuple[list[int], list[float]]:
        """Return the greedy continuation's token ids and log-probabilities."""
        self._add(prompt, output, logprobs=0)
        tokens: list[Token] = []
        done = False
        while not done:
            outputs = self._step()
            tokens += [output for output in outputs if isinstance(output, Token)]
            done = any(isinstance(output, RequestDone) for output in outputs)
        return [t.id for t in tokens], [t.score.logprob for t in tokens if t.score is not None]

    def score(self, prompt: Sequence[int]) -> list[float]:
        """Return the log-probability of each prompt token after the first."""
        self._add(prompt, 0, prompt_logprobs=0)
        scores: list[float] = []
        done = False
        while not done:
            outputs = self._step()
            scored = [output for output in outputs if isinstance(output, ScoredPrompt)]
            scores += [score.logprob for output in scored for score in output.scores]
            done = any(isinstance(output, RequestDone) for output in outputs)
        return scores

    def forget(self) -> None:
        """Empty the prefix cache."""
        self._loop.apply([FlushCache()])

    def prefill(self, length: int) -> float:
        """Return the seconds from a new prompt of `length` tokens to its first token, run alone."""
        self._add(self._random.choices(self._ids, k=length), 1)
        began = time.perf_counter()
        while not any(isinstance(output, RequestDone) for output in self._step()):
            pass
        return time.perf_counter() - began

    @contextmanager
    def decoding(self, batch: int, context: int, most: int) -> Iterator[Callable[[], float]]:
        """Decode `batch` sequences of `context` tokens, up to `most` tokens each.

        Yield a function that runs one step and returns its seconds.
        """
        # Cache whole blocks, so that prefill computes only the last token of each prompt.
        cached = context // self._block_size * self._block_size
        prompts = [self._random.choices(self._ids, k=cached + 1) for _ in range(batch)]
        for prompt in prompts:
            self._remember(prompt)
        waiting = {self._add(prompt, most + batch) for prompt in prompts}
        handles = list(waiting)
        while waiting:
            waiting -= {output.handle for output in self._step() if isinstance(output, Token)}

        def step() -> float:
            began = time.perf_counter()
            self._step()
            return time.perf_counter() - began

        yield step
        self._loop.apply([CancelRequest(handle) for handle in handles])
        self._step()

    def _step(self) -> Sequence[Output]:
        outputs = self._loop.step(list).outputs
        for output in outputs:
            if isinstance(output, Refused):
                raise RuntimeError(f"the engine refused a request: {output.message}")
        return outputs

    def _add(
        self,
        prompt: Sequence[int],
        output: int,
        temperature: float = 0.0,
        logprobs: int | None = None,
        prompt_logprobs: int | None = None,
    ) -> int:
        self._handles += 1
        checked = CheckedRequest(
            prompts=[prompt],
            n=1,
            sampling=SamplingSettings(temperature, top_p=1.0, top_k=0, min_p=0.0, seed=0),
            stopping=StoppingSettings(output, 0, True, self._context_length, frozenset()),
            logprobs=logprobs,
            prompt_logprobs=prompt_logprobs,
            resume=(),
            constrained=False,
        )
        arrival = time.monotonic()
        self._loop.apply([AddRequest(self._handles, checked, None, _SALT, 0, arrival)])
        return self._handles

    def _remember(self, prompt: Sequence[int]) -> None:
        """Put a prompt into the prefix cache without computing it; step times stay the same."""
        ids = torch.tensor(prompt, dtype=torch.int32).numpy()
        blocks = self._pool.allocate(len(prompt) // self._block_size)
        name = _SALT
        for index, block in enumerate(blocks):
            start = index * self._block_size
            name = hash_block(name, ids[start : start + self._block_size])
            self._pool.cache(block, name)
        self._pool.release(blocks)


class Stopwatch:
    """Seconds spent in each part of a step, without the parts that it calls."""

    def __init__(self) -> None:
        self.seconds: defaultdict[str, float] = defaultdict(float)
        self._within: list[float] = []

    def timed(
        self, part: str, function: Callable[Arguments, Result]
    ) -> Callable[Arguments, Result]:
        def wrapper(*args: Arguments.args, **kwargs: Arguments.kwargs) -> Result:
            self._within.append(0.0)
            began = time.perf_counter()
            try:
                return function(*args, **kwargs)
            finally:
                took = time.perf_counter() - began
                self.seconds[part] += took - self._within.pop()
                if self._within:
                    self._within[-1] += took

        return wrapper

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Time the operators of every model, and sampling, in the `with` block."""
        operations: tuple[tuple[str, type[object], tuple[str, ...]], ...] = (
            (_PARTS[Kernel.LINEAR], Projection, ("into", "add_to", "argmax")),
            (_PARTS[Kernel.LINEAR], Gate, ("into",)),
            (_PARTS[Kernel.ATTENTION], AttentionBackend, ("attend",)),
            (_PARTS[Kernel.NORM], Operators, ("rms_norm", "rotate", "keep")),
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
            patches.enter_context(patch.object(step_loop, "sample", sampling))
            yield

    def _timed_replay(self) -> Callable[..., None]:
        replay = Recording.replay

        def timed(recording: Recording, operations: Array[OperationCall], batch: StepBatch) -> None:
            seconds = (c_double * len(Kernel))()
            replay(recording, operations, batch, seconds)
            for kernel in Kernel:
                self.seconds[_PARTS[kernel]] += seconds[kernel]

        return timed


def _implementations(base: type[object]) -> Iterator[type[object]]:
    for kind in base.__subclasses__():
        yield kind
        yield from _implementations(kind)


def _ids(prompt: list[int] | str) -> list[int]:
    assert isinstance(prompt, list)
    return prompt
