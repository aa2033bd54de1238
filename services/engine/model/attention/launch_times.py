"""Times of kernels on a GPU, by which the engine chooses among kernels that compute the same."""

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import TypeAlias, TypeVar

import torch
from torch import Tensor

__all__ = ["Candidate", "fastest", "seconds_of"]

_LOG = logging.getLogger("loop")
_REPLAYS = 5
_MARGIN = 0.97
"""Share of the usual candidate's time below which another one replaces it, so that restarts choose
the same"""
_TOLERANCE = 0.03
"""Largest difference from the first candidate's output, as a share of its largest number"""

Candidate: TypeAlias = Sequence[Callable[[], Tensor]]
"""Launches of one kernel on different operands, so that the L2 cache holds none of them; each
returns its output"""
Name = TypeVar("Name")


def fastest(candidates: Mapping[Name, Candidate], usual: Name, what: str) -> Name:
    """Return the name of the fastest candidate; `usual` unless another one is clearly faster.

    The output of the first candidate is the reference: one whose output differs, or that fails, is
    left out with a warning. what: name of the operation in the log.
    """
    expected: Tensor | None = None
    times: dict[Name, float] = {}
    for name, launches in candidates.items():
        try:
            output = launches[0]().float()
            if expected is None:
                expected = output.clone()
            difference = (output - expected).abs().max() / expected.abs().max()
            if not difference <= _TOLERANCE:
                raise ValueError(f"its output differs by {float(difference):.2g} of the largest")
            times[name] = seconds_of(launches)
        except Exception as error:  # compilers and libraries raise errors of many types
            why = " ".join(str(error).split())[:200]
            _LOG.warning("%s: %s is not used: %s", what, name, why or type(error).__name__)
    if not times:
        return usual
    best = min(times, key=lambda name: times[name])
    keeps = usual in times and times[best] > _MARGIN * times[usual]
    chosen = usual if keeps else best
    shown = ", ".join(f"{name}: {1e6 * time:.1f} µs" for name, time in times.items())
    _LOG.debug("%s: %s is used, of %s", what, chosen, shown)
    return chosen


def seconds_of(launches: Candidate) -> float:
    """Return the seconds of one launch: the least of several replays of a graph of all.

    A graph excludes the host's time, which is longer than that of small kernels.
    """
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for launch in launches:
            launch()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for launch in launches:
            launch()
    graph.replay()
    times: list[float] = []
    for _ in range(_REPLAYS):
        begun, ended = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        begun.record()
        graph.replay()
        ended.record()
        ended.synchronize()
        times.append(begun.elapsed_time(ended) / 1000)
    return min(times) / len(launches)
