"""Speed of one model: a step of one stream by kernel, and loads of many kinds."""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from benchmarks.engine import MeasuredEngine
from benchmarks.gpu.context import Context, Row, Rows, release
from benchmarks.gpu.parts.kernel_counts import profile_steps
from benchmarks.gpu.parts.loads import first_token, llama, some_ids
from benchmarks.roofline import ByteFloor
from services.engine.messages import RequestDone, Token

__all__ = ["measure_speed"]

_PROFILED_STEPS = 30
_ARRIVALS = 0.8
"""Rate of staggered requests, as a share of what the engine could complete"""
_LONG = 8
"""One staggered request among so many has a long prompt"""


@dataclass(frozen=True, slots=True)
class _Loads:
    """Sizes of the loads, in tokens and requests."""

    streams: int
    prompt: int
    output: int
    long_prompt: int
    """Tokens of the long prompts among staggered requests"""
    shared_prefix: int
    prompts: Sequence[int]
    """Tokens of prompts that come alone"""
    staggered: int
    """Requests of a staggered load"""
    one_stream_steps: int


_FULL = _Loads(256, 256, 256, 8000, 8000, (128, 2048, 8000), 256, 200)
_TINY = _Loads(4, 24, 8, 100, 64, (16, 64), 8, 8)


def measure_speed(context: Context, model: str, weights: str = "full") -> Rows:
    """Yield the figures of a model of LLAMAS; weights: a value of the engine's flag."""
    loads, path = context.size(_FULL, _TINY), llama(context, model)
    memory = _bandwidth(context, context.size(2 << 30, 16 << 20))
    yield {"what": "GB/s of a copy, read and written", "figure": memory / 1e9}
    room = loads.streams * (loads.prompt + loads.output + 64) + 2 * loads.long_prompt
    weights = weights if context.on_gpu else "full"
    began = time.monotonic()
    device = context.device.type
    with MeasuredEngine(path, "auto", room, weights=weights, device=device) as engine:
        yield {"what": "seconds of the start", "figure": time.monotonic() - began}
        yield from _one_stream(context, engine, loads, memory)
        prompt_rate = 0.0
        for length in loads.prompts:
            row = first_token(engine, length)
            prompt_rate = float(row["prompt tokens/s"] or 0)
            yield row
        rate = 0.0
        for name, tokens, seconds in _closed(engine, loads):
            rate = rate or tokens / seconds
            yield {"load": name, "streams": loads.streams, "tokens/s": tokens / seconds}
        yield _staggered(engine, loads, rate, prompt_rate)
    release()


def _bandwidth(context: Context, size: int) -> float:
    """Return the bytes per second that a copy reads and writes, best of ten."""
    source = torch.empty(size, dtype=torch.uint8, device=context.device)
    target = torch.empty_like(source)
    best = 0.0
    for _ in range(10):
        context.synchronize()
        began = time.perf_counter()
        target.copy_(source)
        context.synchronize()
        best = max(best, 2 * size / (time.perf_counter() - began))
    return best


def _one_stream(context: Context, engine: MeasuredEngine, loads: _Loads, memory: float) -> Rows:
    """Yield the step time of one stream, its share of the memory floor, and its slowest kernels."""
    floor = ByteFloor(engine.weight_bytes, engine.kv_bytes_per_token, engine.state_bytes, memory)
    steps = loads.one_stream_steps
    with engine.decoding(1, loads.prompt, steps + _PROFILED_STEPS + 16) as step:
        for _ in range(8):
            step()
        median = statistics.median(step() for _ in range(steps))
        seen = profile_steps(context, step, _PROFILED_STEPS)
    row: Row = {
        "what": "one stream",
        "ms a step": 1000 * median,
        "share of the memory floor": floor.seconds(1, loads.prompt + steps / 2) / median,
    }
    if context.on_gpu:
        row |= seen.summary()
    yield row
    if context.on_gpu:
        yield from seen.rows(engine.loaded.model.decoder.spec.num_layers, {})


def _closed(engine: MeasuredEngine, loads: _Loads) -> Iterator[tuple[str, int, float]]:
    """Yield names, tokens and seconds of streams that start together."""
    count, output = loads.streams, loads.output

    def prompts(length: int, seed: str) -> list[list[int]]:
        engine.flush_cache()
        return [some_ids(engine, length, (seed, number)) for number in range(count)]

    engine.complete(prompts(loads.prompt, "first"), count, output)
    yield "closed", *engine.complete(prompts(loads.prompt, "second"), count, output)
    prefix = some_ids(engine, loads.shared_prefix, "shared")
    behind = [prefix + each for each in prompts(32, "behind")]
    yield "behind a shared prefix", *engine.complete(behind, count, output)
    one_without = [*behind[:-1], some_ids(engine, len(behind[0]), "alone")]
    engine.flush_cache()
    yield "the same, one stream without it", *engine.complete(one_without, count, output)
    allowed = random.Random(1).randbytes(-(-engine.model.vocabulary_size // 8))
    with engine.masked(allowed):
        masked = prompts(loads.prompt, "masked")
        yield "a mask on all rows", *engine.complete(masked, count, output)
    drawn = prompts(loads.prompt, "drawn")
    yield "drawn at temperature 1", *engine.complete(drawn, count, output, temperature=1.0)


def _staggered(engine: MeasuredEngine, loads: _Loads, rate: float, prompt_rate: float) -> Row:
    """Return times to first token and between tokens of requests that come by chance.

    rate: output tokens/s of a closed loop; prompt_rate: tokens/s of long prompts.
    """
    source = random.Random(5)
    # a closed loop has short prompts too, so only what long ones add counts
    longer = (loads.long_prompt - loads.prompt) / _LONG
    gap = (loads.output / rate + longer / prompt_rate) / _ARRIVALS
    lengths = [
        loads.prompt if number % _LONG else loads.long_prompt for number in range(loads.staggered)
    ]
    waiting = [some_ids(engine, length, number) for number, length in enumerate(lengths)]
    engine.flush_cache()
    began = time.perf_counter()
    arrivals = []
    at = 0.0
    for _ in waiting:
        at += source.expovariate(1 / gap)
        arrivals.append(at)
    first: dict[int, float] = {}
    last: dict[int, float] = {}
    due: dict[int, float] = {}
    between: list[float] = []
    tokens = started = ended = 0
    while ended < len(waiting):
        now = time.perf_counter() - began
        while started < len(waiting) and arrivals[started] <= now:
            handle = engine.submit(
                waiting[started], max_tokens=loads.output, temperature=0.0, ignore_eos=True
            )
            due[handle] = arrivals[started]
            started += 1
        for event in engine.step():
            now = time.perf_counter() - began
            if isinstance(event, Token):
                tokens += 1
                if event.handle in last:
                    between.append(now - last[event.handle])
                first.setdefault(event.handle, now)
                last[event.handle] = now
            elif isinstance(event, RequestDone):
                ended += 1
    to_first = [first[handle] - due[handle] for handle in first]
    return {
        "load": "staggered",
        "requests/s": 1 / gap,
        "tokens/s": tokens / (time.perf_counter() - began),
        "TTFT p50": _share(to_first, 0.5),
        "TTFT p95": _share(to_first, 0.95),
        "between p50": _share(between, 0.5),
        "between p99": _share(between, 0.99),
    }


def _share(values: Sequence[float], share: float) -> float:
    ordered = sorted(values)
    return ordered[min(int(share * len(ordered)), len(ordered) - 1)]
