"""Scenarios: the loads under which servers are compared."""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import Enum

from tokenwire.load.workloads import ClosedLoop, OpenLoop, Workload

__all__ = ["SCENARIOS", "Figure", "Scenario"]


class Figure(Enum):
    """The figure by which a scenario ranks servers."""

    THROUGHPUT = "output tokens/s"
    TTFT = "TTFT p50 ms"
    STALL = "inter-token p99 / p50 during prefill"

    @property
    def higher_is_better(self) -> bool:
        return self is Figure.THROUGHPUT


@dataclass(frozen=True, slots=True)
class Scenario:
    name: str
    about: str
    workloads: tuple[Workload, ...]
    figure: Figure = Figure.THROUGHPUT
    baseline: str | None = None
    """Name of the scenario that lacks only the feature that this one adds"""

    @property
    def constrained(self) -> bool:
        return any(workload.json_schema for workload in self.workloads)


PEOPLE = """{
  "type": "array",
  "minItems": 100,
  "items": {
    "type": "object",
    "properties": {
      "name": {"type": "string"},
      "age": {"type": "integer"},
      "role": {"enum": ["user", "admin", "guest"]}
    },
    "required": ["name", "age", "role"],
    "additionalProperties": false
  }
}"""
"""Schema of a list that is longer than any output here, so that no output ends early."""


def streams(
    concurrency: int, prompt: int, output: int, requests: int, shared: int = 0
) -> tuple[Workload, ...]:
    return (Workload("streams", ClosedLoop(concurrency), prompt, output, requests, shared=shared),)


SCENARIOS = {
    scenario.name: scenario
    for scenario in (
        Scenario("S1", "one stream: latency of a single user", streams(1, 128, 128, 3)),
        Scenario("S8", "8 streams, medium prompts: a small team", streams(8, 256, 128, 24)),
        Scenario("S32", "32 streams: a loaded server", streams(32, 128, 64, 96)),
        Scenario("S128", "128 streams: saturation", streams(128, 128, 64, 384)),
        Scenario(
            "T32",
            "32 streams whose tokens are drawn: temperature 0.7, top-p 0.9",
            tuple(
                replace(workload, temperature=0.7, top_p=0.9)
                for workload in streams(32, 128, 64, 96)
            ),
            baseline="S32",
        ),
        Scenario("P", "a long prompt alone: prefill", streams(1, 2048, 1, 4), Figure.TTFT),
        Scenario("PX", "8 streams, one shared prefix of 1,024", streams(8, 1088, 32, 24, 1024)),
        Scenario(
            "mixed",
            "long prompts arriving among 8 running streams",
            (
                *streams(8, 128, 128, 32),
                Workload("long", OpenLoop(0.3), prompt=2048, output=1, requests=None),
            ),
            Figure.STALL,
        ),
        Scenario(
            "J32",
            "32 streams, all constrained by a JSON Schema",
            (Workload("json", ClosedLoop(32), 128, 64, 96, json_schema=PEOPLE),),
            baseline="S32",
        ),
        Scenario(
            "J16",
            "32 streams, half of them constrained",
            (
                Workload("free", ClosedLoop(16), 128, 64, 48),
                Workload("json", ClosedLoop(16), 128, 64, 48, json_schema=PEOPLE),
            ),
            baseline="S32",
        ),
    )
}
