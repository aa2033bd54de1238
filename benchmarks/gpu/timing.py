"""Time of kernels on a device, from CUDA graphs over buffers that the L2 cache does not hold."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence

import torch

from benchmarks.gpu.context import Context, Row

__all__ = ["case", "copies", "seconds"]

_L2_BYTES = 300_000_000
"""Bytes of buffers that are used in turn: several times the largest L2 cache"""
_REPEATS = 10


def copies(context: Context, size: int) -> int:
    """Return how many buffers of `size` bytes the cache does not hold together; at least two."""
    return max(2, _L2_BYTES // size) if context.on_gpu else 2


def seconds(context: Context, calls: Sequence[Callable[[], object]]) -> float:
    """Return the median seconds of one call.

    calls: the same work on different buffers. They are captured into one graph, so the launches
    cost nothing.
    """
    if not context.on_gpu:
        began = time.perf_counter()
        for call in calls:
            call()
        return (time.perf_counter() - began) / len(calls)
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    with torch.cuda.stream(stream):
        for call in calls[:3]:
            call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    times: list[float] = []
    for _ in range(_REPEATS):
        begin, end = (
            torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
            for _ in range(2)
        )
        begin.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end))
    return statistics.median(times) / 1000 / len(calls)


def case(
    context: Context,
    names: Row,
    make: Callable[[], Sequence[Callable[[], object]]],
    *,
    bytes_moved: float = 0.0,
    operations: float = 0.0,
) -> Row:
    """Time the calls that `make` returns, and return a row with the rates.

    An error becomes a row without figures, since one way may be missing in a release of torch
    while another is there.
    """
    try:
        spent = seconds(context, make())
    except Exception as error:
        return {**names, "failure": f"{type(error).__name__}: {error}"[:300]}
    row: Row = {**names, "µs": 1e6 * spent}
    if bytes_moved:
        row["TB/s"] = bytes_moved / spent / 1e12
    if operations:
        row["TFLOP/s"] = operations / spent / 1e12
    return row
