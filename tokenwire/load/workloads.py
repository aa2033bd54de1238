"""Requests of a load: how long they are, and when they are sent."""

from dataclasses import dataclass

__all__ = ["ClosedLoop", "OpenLoop", "Workload"]


@dataclass(frozen=True, slots=True)
class ClosedLoop:
    """A constant number of running requests: the next one starts when one ends."""

    concurrency: int


@dataclass(frozen=True, slots=True)
class OpenLoop:
    """Poisson arrivals of `rate` requests per second, independent of the server's answers."""

    rate: float


@dataclass(frozen=True, slots=True)
class Workload:
    """Requests of one kind. All lengths are in tokens. Every prompt is new and random.

    `shared` is the length of the prefix that all requests of one run share.
    If `requests` is None, requests arrive until the scenario's other workloads end.
    """

    name: str
    arrivals: ClosedLoop | OpenLoop
    prompt: int
    output: int
    requests: int | None
    shared: int = 0
    json_schema: str | None = None
    """JSON text of the schema of the output. It allows no end before `output` tokens."""
    temperature: float = 0.0
    top_p: float = 1.0
