"""Kernels of a step by name: how often each is launched, and the time that it takes."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch.profiler import ProfilerActivity, profile

from benchmarks.gpu.context import Context, Row, Rows

__all__ = ["Profile", "profile_steps"]

_SLOWEST = 12
"""Number of kernels that a report names, besides those that every layer launches"""
_OF_A_LAYER = 0.5
"""Launches a layer from which on a kernel counts as one of the layers"""


@dataclass(frozen=True, slots=True)
class _Kernel:
    name: str
    launches: float
    """Number of launches of a step; copies and fills of memory count too"""
    seconds: float
    """Seconds of a step"""


@dataclass(frozen=True, slots=True)
class Profile:
    """Steps as torch's profiler has seen them."""

    kernels: Sequence[_Kernel]
    """Kernels, the slowest first"""
    seconds: float
    """Seconds of a step under the profiler"""

    def summary(self) -> Row:
        """Return the figures of a step."""
        busy = sum(kernel.seconds for kernel in self.kernels)
        return {
            "share of time in kernels": busy / self.seconds,
            "launches a step": sum(kernel.launches for kernel in self.kernels),
        }

    def rows(self, layers: int, names: Row) -> Rows:
        """Yield a row for each kernel of a layer, and for the slowest of the others.

        names: figures with which each row begins; `layers` is the number of the model's layers.
        """
        for place, kernel in enumerate(self.kernels):
            of_layer = kernel.launches / layers
            if place < _SLOWEST or of_layer >= _OF_A_LAYER:
                yield {
                    **names,
                    "kernel": kernel.name[:80],
                    "ms a step": 1000 * kernel.seconds,
                    "launches": kernel.launches,
                    "launches a layer": of_layer,
                }


def profile_steps(context: Context, step: Callable[[], object], steps: int) -> Profile:
    """Run some steps under torch's profiler. On a CPU, operations stand for kernels."""
    activity = ProfilerActivity.CUDA if context.on_gpu else ProfilerActivity.CPU
    context.synchronize()
    with profile(activities=[activity]) as profiler:
        began = time.perf_counter()
        for _ in range(steps):
            step()
        context.synchronize()
        seconds = time.perf_counter() - began
    found = sorted(profiler.key_averages(), key=lambda each: -each.self_device_time_total)
    kernels = [
        _Kernel(each.key, each.count / steps, each.self_device_time_total / 1e6 / steps)
        for each in found
    ]
    return Profile(kernels, seconds / steps)
