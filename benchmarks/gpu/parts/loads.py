"""Loads of an engine in this process: streams that start together, and prompts that come alone."""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path
from types import MappingProxyType
from typing import Any
from unittest.mock import patch

from benchmarks.gpu.checkpoints import LLAMAS
from benchmarks.gpu.context import Context, Row
from services.engine import engine as engine_module
from services.engine.engine import Engine
from services.engine.messages import AddRequest, RequestDone, Token
from services.engine.settings import EngineSettings

__all__ = ["Run", "complete", "first_token", "llama", "some_ids", "start", "streams_row"]


@dataclass(frozen=True, slots=True)
class Run:
    """Requests from the first step to the last answer."""

    tokens: int
    seconds: float
    step_seconds: float
    """Median time between steps that made tokens, in the later half of the run"""

    @property
    def rate(self) -> float:
        """Output tokens per second."""
        return self.tokens / self.seconds


def llama(context: Context, name: str = "8b", **changes: Any) -> Path:
    """Return the checkpoint of a Llama's shape; a tiny one in a dry run.

    changes: other values of config.json. The checkpoint then shares the weights.
    """
    size = context.size(name, "tiny")
    path = context.checkpoint(size, LLAMAS[size])
    return context.variant(path, changes) if changes else path


def start(context: Context, path: Path, **settings: Any) -> Engine:
    """Start an engine with these settings; all others are its defaults."""
    if context.is_dry:
        settings = {"kv_memory": "64MiB"} | settings
    return Engine(path, EngineSettings(device=context.device.type, **settings))


def some_ids(engine: Engine, count: int, seed: object) -> list[int]:
    """Return random ids of the engine's vocabulary, the same for the same seed."""
    size = engine.model.vocabulary_size
    return random.Random(f"{count} {seed}").choices(range(size // 16, 15 * size // 16), k=count)


def complete(
    engine: Engine,
    prompts: Sequence[Sequence[int]],
    output: int,
    *,
    temperature: float = 0.0,
    adapters: Mapping[int, int] = MappingProxyType({}),
) -> Run:
    """Complete prompts that come at once, with an empty prefix cache.

    adapters: number of the adapter of a prompt, by its index; 0 = the model alone.
    """
    engine.flush_cache()
    left, tokens = len(prompts), 0
    times = []
    began = time.perf_counter()
    for index, prompt in enumerate(prompts):
        request = partial(AddRequest, adapter=adapters.get(index, 0))
        with patch.object(engine_module, "AddRequest", request):
            engine.submit(prompt, max_tokens=output, temperature=temperature, ignore_eos=True)
    while left:
        made = 0
        for event in engine.step():
            if isinstance(event, Token):
                made += 1
            elif isinstance(event, RequestDone):
                left -= 1
        tokens += made
        if made:
            times.append(time.perf_counter())
    seconds = time.perf_counter() - began
    gaps = [later - earlier for earlier, later in pairwise(times)]
    return Run(tokens, seconds, statistics.median(gaps[len(gaps) // 2 :] or [0.0]))


def streams_row(engine: Engine, count: int, prompt: int, output: int, *, turns: int = 2) -> Row:
    """Return the speed of `count` streams, of `turns` runs the last."""
    for turn in range(turns):
        prompts = [some_ids(engine, prompt, (turn, number)) for number in range(count)]
        run = complete(engine, prompts, output)
    return {
        "streams": count,
        "prompt": prompt,
        "answer": output,
        "tokens/s": run.rate,
        "ms a step": 1000 * run.step_seconds,
    }


def first_token(engine: Engine, length: int) -> Row:
    """Return the time to the first token of a prompt that comes alone, of two runs the second."""
    for turn in range(2):
        run = complete(engine, [some_ids(engine, length, turn)], 1)
    return {
        "prompt": length,
        "ms to the first token": 1000 * run.seconds,
        "prompt tokens/s": length / run.seconds,
    }
