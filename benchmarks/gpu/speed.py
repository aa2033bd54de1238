"""Speed on a GPU: streams that start at once and by chance, shared prefixes, masks, one stream."""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch.profiler import ProfilerActivity, profile

from benchmarks.engine import MeasuredEngine
from benchmarks.gpu.report import Figure
from benchmarks.roofline import ByteFloor
from services.engine.messages import RequestDone, Token

__all__ = [
    "Loads",
    "bandwidth",
    "measure_closed",
    "measure_one_stream",
    "measure_prompts",
    "measure_staggered",
]

_PROFILED_STEPS = 30
_ARRIVALS = 0.8
"""Rate of staggered requests, as a share of what the engine could complete"""
_LONG = 8
"""One staggered request among so many has a long prompt"""


@dataclass(frozen=True, slots=True)
class Loads:
    """Sizes of the loads, in tokens and requests."""

    families: Sequence[str]
    """Small families whose results are checked"""
    streams: Sequence[int]
    prompt: int
    output: int
    long_prompt: int
    """Of the long prompts among staggered requests"""
    shared_prefix: int
    prompts: Sequence[int]
    """Of prompts that come alone"""
    staggered: int
    """Requests of a staggered load"""
    one_stream_steps: int


def bandwidth(device: torch.device, size: int) -> float:
    """Return the bytes per second that a copy reads and writes, best of ten."""
    source = torch.empty(size, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    best = 0.0
    for _ in range(10):
        _wait(device)
        began = time.perf_counter()
        target.copy_(source)
        _wait(device)
        best = max(best, 2 * size / (time.perf_counter() - began))
    return best


def measure_one_stream(
    engine: MeasuredEngine, loads: Loads, device: torch.device, memory: float
) -> Iterator[dict[str, Figure]]:
    """Yield the step time of one stream, its share of the memory floor, and its slowest kernels."""
    floor = ByteFloor(engine.weight_bytes, engine.kv_bytes_per_token, engine.state_bytes, memory)
    steps = loads.one_stream_steps
    on_gpu = device.type == "cuda"
    with engine.decoding(1, loads.prompt, steps + _PROFILED_STEPS + 16) as step:
        for _ in range(8):
            step()
        median = statistics.median(step() for _ in range(steps))
        _wait(device)
        activity = ProfilerActivity.CUDA if on_gpu else ProfilerActivity.CPU
        with profile(activities=[activity]) as profiler:
            began = time.perf_counter()
            for _ in range(_PROFILED_STEPS):
                step()
            _wait(device)
            seconds = time.perf_counter() - began
    kernels = sorted(profiler.key_averages(), key=lambda each: -each.self_device_time_total)
    busy = sum(each.self_device_time_total for each in kernels) / 1e6
    launches = sum(each.count for each in kernels) / _PROFILED_STEPS
    yield {
        "what": "one stream",
        "ms": 1000 * median,
        "share of the memory floor": floor.seconds(1, loads.prompt + steps / 2) / median,
        "share of time in kernels": busy / seconds if on_gpu else None,
        "launches a step": launches if on_gpu else None,
    }
    for each in kernels[:12] if on_gpu else ():
        yield {"what": each.key[:80], "ms": each.self_device_time_total / 1000 / _PROFILED_STEPS}


def measure_prompts(
    engine: MeasuredEngine, loads: Loads, device: torch.device
) -> Iterator[dict[str, Figure]]:
    """Yield the time to first token of a lone prompt by length, of two runs the second."""
    for length in loads.prompts:
        seconds = 0.0
        for turn in range(2):
            engine.flush_cache()
            _, seconds = engine.complete(prompts(engine, 1, length, turn), 1, 1)
            _wait(device)
        yield {
            "what": f"a prompt of {length}",
            "ms": 1000 * seconds,
            "tokens/s": length / seconds,
        }


def measure_closed(
    engine: MeasuredEngine, loads: Loads, device: torch.device
) -> Iterator[dict[str, Figure]]:
    """Yield output tokens/s by number of streams, of two runs the second."""
    for count in loads.streams:
        rate = 0.0
        for _ in range(2):
            engine.flush_cache()
            tokens, seconds = engine.complete(
                prompts(engine, count, loads.prompt, count), count, loads.output
            )
            _wait(device)
            rate = tokens / seconds
        yield {"load": "closed", "streams": count, "tokens/s": rate}
    count = max(loads.streams)
    prefix = prompts(engine, 1, loads.shared_prefix, 99)[0]
    behind = [prefix + each for each in prompts(engine, count, 32, 98)]
    engine.flush_cache()
    tokens, seconds = engine.complete(behind, count, loads.output)
    yield {"load": "behind a shared prefix", "streams": count, "tokens/s": tokens / seconds}
    engine.flush_cache()
    size = engine.model.vocabulary_size
    allowed = bytes(random.Random(1).randbytes(-(-size // 8)))
    with engine.masked(allowed):
        tokens, seconds = engine.complete(
            prompts(engine, count, loads.prompt, 97), count, loads.output
        )
    yield {"load": "a mask on all rows", "streams": count, "tokens/s": tokens / seconds}
    engine.flush_cache()
    tokens, seconds = engine.complete(
        prompts(engine, count, loads.prompt, 96), count, loads.output, temperature=1.0
    )
    yield {"load": "drawn at temperature 1", "streams": count, "tokens/s": tokens / seconds}


def measure_staggered(
    engine: MeasuredEngine, loads: Loads, rate: float, prompt_rate: float
) -> Iterator[dict[str, Figure]]:
    """Yield times to first token and between tokens of requests that come by chance.

    rate: output tokens/s of a closed loop; prompt_rate: tokens/s of long prompts.
    """
    source = random.Random(5)
    # a closed loop has short prompts too, so only what long ones add counts
    longer = (loads.long_prompt - loads.prompt) / _LONG
    gap = (loads.output / rate + longer / prompt_rate) / _ARRIVALS
    lengths = [
        loads.prompt if number % _LONG else loads.long_prompt for number in range(loads.staggered)
    ]
    waiting = [prompts(engine, 1, length, number)[0] for number, length in enumerate(lengths)]
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
    yield {
        "load": f"staggered, {1 / gap:.1f} requests/s",
        "tokens/s": tokens / (time.perf_counter() - began),
        "TTFT p50": _share(to_first, 0.5),
        "TTFT p95": _share(to_first, 0.95),
        "between p50": _share(between, 0.5),
        "between p99": _share(between, 0.99),
    }


def prompts(engine: MeasuredEngine, count: int, length: int, seed: int) -> list[list[int]]:
    """Return random prompts, none of which the engine has seen."""
    source = random.Random(f"{seed} {length}")
    size = engine.model.vocabulary_size
    return [source.choices(range(size // 16, 15 * size // 16), k=length) for _ in range(count)]


def _share(values: Sequence[float], share: float) -> float:
    ordered = sorted(values)
    return ordered[min(int(share * len(ordered)), len(ordered) - 1)]


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()
