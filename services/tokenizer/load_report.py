"""Load of this service for balancers: averages of its request rates and of its engines' load."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from services.tokenizer.engines.engine_load import EngineLoad
from tokenwire.pb.orca.v1 import orca_pb2

__all__ = ["LoadAverage", "RequestCounts"]

_WINDOW_SECONDS = 5.0
"""Time constant of the averages: after it, they show two thirds of a change"""
_LEAST_UTILIZATION = 0.01


@dataclass(frozen=True, slots=True)
class RequestCounts:
    """Requests since the start of the process."""

    started: int
    failed: int
    """Number of requests that failed through no fault of the client"""


class LoadAverage:
    """Averages in which a measurement counts exponentially less with its age."""

    def __init__(self, now: float, counts: RequestCounts, cpu_seconds: float) -> None:
        """now: monotonic time in seconds. cpu_seconds: CPU time of the process so far."""
        self._now = now
        self._counts = counts
        self._cpu_seconds = cpu_seconds
        self._requests = self._failures = self._cpu = self._engines = 0.0
        self._loads: Sequence[EngineLoad] = ()

    def add(
        self, now: float, counts: RequestCounts, cpu_seconds: float, loads: Sequence[EngineLoad]
    ) -> None:
        """Add a measurement. loads: loads of the engines that serve; empty = full load."""
        passed = now - self._now
        if passed <= 0:
            return
        engines = sum(load.utilization for load in loads) / len(loads) if loads else 1.0
        weight = -math.expm1(-passed / _WINDOW_SECONDS)
        self._requests += weight * (
            (counts.started - self._counts.started) / passed - self._requests
        )
        self._failures += weight * ((counts.failed - self._counts.failed) / passed - self._failures)
        self._cpu += weight * ((cpu_seconds - self._cpu_seconds) / passed - self._cpu)
        self._engines += weight * (engines - self._engines)
        self._now, self._counts, self._cpu_seconds = now, counts, cpu_seconds
        self._loads = loads

    def report(self) -> orca_pb2.OrcaLoadReport:
        """Return the load as a message of ORCA."""
        loads = self._loads
        total = sum(load.total_blocks for load in loads)
        used_blocks = sum(load.used_blocks for load in loads)
        return orca_pb2.OrcaLoadReport(
            cpu_utilization=self._cpu,
            rps_fractional=self._requests,
            eps=self._failures,
            named_metrics={
                "num_requests_running": sum(load.running for load in loads),
                "num_requests_waiting": sum(load.waiting for load in loads),
                "kv_cache_usage_perc": used_blocks / total if total else 0.0,
            },
            application_utilization=max(self._engines, self._cpu, _LEAST_UTILIZATION),
        )
