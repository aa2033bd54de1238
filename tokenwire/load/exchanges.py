"""Requests of a load that have ended, and the figures that they give."""

import json
import math
import os
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, Self, TypedDict

from tokenwire.load.http_client import HttpReply
from tokenwire.load.load_run import Outcome
from tokenwire.load.workloads import Workload

__all__ = ["Exchange", "Latency", "WorkloadReport", "read_exchange", "refusal", "report", "why"]

_MOST_MESSAGE = 200


@dataclass(frozen=True, slots=True)
class Latency:
    """Percentiles in milliseconds."""

    p50: float
    p90: float
    p99: float
    max: float

    @classmethod
    def of(cls, seconds: Sequence[float]) -> Self | None:
        if not seconds:
            return None
        ordered = sorted(seconds)

        def percentile(share: float) -> float:
            return round(1000 * ordered[math.ceil(share * len(ordered)) - 1], 2)

        return cls(percentile(0.5), percentile(0.9), percentile(0.99), percentile(1.0))


@dataclass(frozen=True, slots=True)
class WorkloadReport:
    """Counts and latencies of one workload's requests.

    `inter_token` is the time between events that carry tokens, and `tokens_per_event` the mean
    number of tokens in one. `inter_token_beside_prefill` is limited to the times in which a
    request of another workload waits for its first token.
    """

    requests: int
    errors: Mapping[str, int]
    prompt_tokens: int
    output_tokens: int
    output_tokens_per_second: float
    tokens_per_event: float
    ttft: Latency | None
    inter_token: Latency | None
    inter_token_beside_prefill: Latency | None


@dataclass(frozen=True, slots=True)
class Exchange:
    """One request. Times are of `time.perf_counter`; `events` are the times of tokens."""

    sent: float
    ended: float
    events: Sequence[float] = ()
    prompt_tokens: int = 0
    output_tokens: int = 0
    has_usage: bool = False
    """True if the server stated the numbers of tokens; else `output_tokens` counts events"""
    error: str | None = None


class _Delta(TypedDict, total=False):
    content: str | None
    reasoning_content: str | None
    reasoning: str | None
    tool_calls: list[Any] | None


class _Choice(TypedDict, total=False):
    text: str
    delta: _Delta
    token_ids: list[int] | None
    finish_reason: str | None


class _Usage(TypedDict):
    prompt_tokens: int
    completion_tokens: int


class _Chunk(TypedDict, total=False):
    choices: list[_Choice]
    usage: _Usage | None
    error: Any


def read_exchange(outcome: Outcome, workload: Workload, *, exact: bool = True) -> Exchange:
    failed = Exchange(outcome.sent, outcome.ended)
    reply = outcome.reply
    if isinstance(reply, OSError):
        return replace(failed, error=why(reply))
    if reply.status != 200:
        return replace(failed, error=refusal(reply))

    times: list[float] = []
    usage: _Usage | None = None
    for arrived, chunk in _chunks(reply.pieces):
        if chunk.get("error"):
            return replace(failed, error=f"in the stream: {chunk['error']}")
        usage = chunk.get("usage") or usage
        if any(_has_tokens(choice) for choice in chunk.get("choices", ())):
            times.append(arrived)
    # The finish reason may come in an event of its own, after the last token's.
    output_tokens = usage["completion_tokens"] if usage else len(times)
    if len(times) > output_tokens:
        times = times[:output_tokens]
    wrong = exact and output_tokens != workload.output
    return Exchange(
        outcome.sent,
        outcome.ended,
        events=times,
        prompt_tokens=usage["prompt_tokens"] if usage else workload.prompt,
        output_tokens=output_tokens,
        has_usage=usage is not None,
        error=f"{output_tokens} tokens instead of {workload.output}" if wrong else None,
    )


def why(error: OSError) -> str:
    """Return the reason why no reply came."""
    return os.strerror(error.errno) if error.errno else f"{error or type(error).__name__}"


def refusal(reply: HttpReply) -> str:
    """Return status and message of a reply that is an error."""
    try:
        message = json.loads(reply.body)["error"]["message"]
    except (ValueError, KeyError, TypeError):
        message = reply.body.decode("utf-8", "replace")[:_MOST_MESSAGE]
    return f"HTTP {reply.status}: {message}"


def _chunks(pieces: Sequence[tuple[float, bytes]]) -> Iterator[tuple[float, _Chunk]]:
    """Yield the stream's data events, each with the arrival time of its last byte."""
    rest = b""
    for arrived, piece in pieces:
        *lines, rest = (rest + piece).split(b"\n")
        for line in lines:
            data = line.strip().removeprefix(b"data:").lstrip()
            if data.startswith(b"{"):
                yield arrived, json.loads(data)


def _has_tokens(choice: _Choice) -> bool:
    delta = choice.get("delta") or {}
    has_text = any(
        delta.get(key) for key in ("content", "reasoning_content", "reasoning", "tool_calls")
    )
    finishes = "delta" not in choice and choice.get("finish_reason")
    return bool(has_text or choice.get("text") or choice.get("token_ids") or finishes)


def report(exchanges: Sequence[Exchange], others: Sequence[Exchange]) -> WorkloadReport:
    served = [exchange for exchange in exchanges if exchange.events]
    prefills = [(other.sent, other.events[0]) for other in others if other.events]
    gaps = [gap for exchange in served for gap in pairwise(exchange.events)]
    beside = [
        (start, end)
        for start, end in gaps
        if any(start < first and sent < end for sent, first in prefills)
    ]
    tokens = sum(exchange.output_tokens for exchange in exchanges)
    span = max(e.ended for e in exchanges) - min(e.sent for e in exchanges) if exchanges else 0.0
    events = sum(len(exchange.events) for exchange in exchanges)
    return WorkloadReport(
        requests=len(exchanges),
        errors=dict(Counter(e.error for e in exchanges if e.error is not None)),
        prompt_tokens=sum(exchange.prompt_tokens for exchange in exchanges),
        output_tokens=tokens,
        output_tokens_per_second=round(tokens / span, 2) if span else 0.0,
        tokens_per_event=round(tokens / events, 3) if events else 0.0,
        ttft=Latency.of([exchange.events[0] - exchange.sent for exchange in served]),
        inter_token=Latency.of([end - start for start, end in gaps]),
        inter_token_beside_prefill=Latency.of([end - start for start, end in beside]),
    )
