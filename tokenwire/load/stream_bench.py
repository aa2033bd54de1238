"""Benchmark of a server at several numbers of streams."""

import asyncio
import json
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import cast

from tokenwire.load.exchanges import Latency, read_exchange, refusal, report, why
from tokenwire.load.http_client import HttpClient, HttpReply
from tokenwire.load.load_run import OPENAI_FIELDS, Json, LoadRun, Target
from tokenwire.load.text_prompts import TextPrompts
from tokenwire.load.workloads import ClosedLoop, Workload

__all__ = ["BenchError", "BenchPlan", "Level", "StreamBench", "only_model"]

_OK = 200
_NOT_TAKEN = (400, 422)
"""Statuses by which servers refuse a field that they don't know"""
_FIELDS: Sequence[Mapping[str, Json]] = (
    OPENAI_FIELDS,
    {"stream_options": {"include_usage": True}},
    {},
)
"""Further fields of the requests; the first that the server takes are used"""
_WARM_TOKENS = 8
_LEAST_REQUESTS = 3


class BenchError(Exception):
    """Server that can't be measured. The message is one sentence."""


@dataclass(frozen=True, slots=True)
class BenchPlan:
    """Requests of a benchmark."""

    streams: Sequence[int]
    """Numbers of requests at a time"""
    prompt: int
    """Tokens of a prompt, about"""
    output: int
    """Tokens of an answer"""
    requests: int | None
    """Requests of each level; None = three for one stream, two a stream for more"""
    seconds: float
    """Time after which a level sends no further request"""
    warm_seconds: float
    """Longest time of the first request, which may load the model"""
    text: str = ""
    """Prompt of all requests; empty = random ones"""

    def workload(self, streams: int) -> Workload:
        """Return the requests of a level."""
        count = self.requests or max(_LEAST_REQUESTS, 2 * streams)
        return Workload("streams", ClosedLoop(streams), self.prompt, self.output, count)


@dataclass(frozen=True, slots=True)
class Level:
    """Figures at one number of streams. Latencies are in milliseconds."""

    streams: int
    requests: int
    """Requests that have ended"""
    planned: int
    seconds: float
    tokens_per_second: float
    prompt_tokens: float
    """Mean tokens of a prompt"""
    output_tokens: float
    """Mean tokens of an answer"""
    tokens_per_event: float
    first_token: Latency | None
    inter_token: Latency | None
    """Times between events of one answer"""
    errors: Mapping[str, int]
    """Failed requests by reason"""
    is_usage: bool
    """True if the server stated the numbers of tokens; else events were counted"""


class StreamBench:
    """Benchmark of one model of a server."""

    def __init__(self, client: HttpClient, target: Target, plan: BenchPlan) -> None:
        self._client = client
        self.target = target
        self._plan = plan
        self._run: LoadRun | None = None

    @property
    def ended(self) -> int:
        """Requests of the current level that have ended."""
        return sum(map(len, self._run.outcomes)) if self._run else 0

    async def warm_up(self) -> float:
        """Send a short request; return its seconds. Find out which fields the server takes.

        Raises BenchError if the server refuses or does not answer.
        """
        began = time.monotonic()
        workload = replace(self._plan.workload(1), output=_WARM_TOKENS, requests=1)
        refused = ""
        try:
            async with asyncio.timeout(self._plan.warm_seconds):
                for fields in _FIELDS:
                    self.target = replace(self.target, fields=fields)
                    run = LoadRun(self._client, self.target, self._prompts())
                    [[outcome]] = await run.run([workload])
                    exchange = read_exchange(outcome, workload, exact=False)
                    if exchange.error is None:
                        return time.monotonic() - began
                    refused = refused or exchange.error
                    reply = outcome.reply
                    if not isinstance(reply, HttpReply) or reply.status not in _NOT_TAKEN:
                        break
        except TimeoutError:
            seconds = self._plan.warm_seconds
            raise BenchError(f"The first request had no answer within {seconds:g} s.") from None
        raise BenchError(f"The first request failed: {refused.rstrip('.')}.")

    async def levels(self) -> AsyncIterator[Level]:
        """Yield the figures of each level.

        A level that is cancelled has those of the requests that had ended, and is the last one.
        """
        for streams in self._plan.streams:
            workload = self._plan.workload(streams)
            began = time.perf_counter()
            self._run = LoadRun(self._client, self.target, self._prompts())
            try:
                await self._run.run([workload], self._plan.seconds)
            except asyncio.CancelledError:
                if self.ended:
                    yield self._level(streams, workload, began)
                return
            yield self._level(streams, workload, began)

    def _prompts(self) -> TextPrompts:
        return TextPrompts(f"{time.time_ns()}", self._plan.text)

    def _level(self, streams: int, workload: Workload, began: float) -> Level:
        assert self._run is not None
        [outcomes] = self._run.outcomes
        exchanges = [read_exchange(outcome, workload, exact=False) for outcome in outcomes]
        figures = report(exchanges, ())
        good = [exchange for exchange in exchanges if exchange.error is None]
        seconds = max(exchange.ended for exchange in exchanges) - began
        return Level(
            streams=streams,
            requests=len(exchanges),
            planned=workload.requests or 0,
            seconds=round(seconds, 3),
            tokens_per_second=round(figures.output_tokens / seconds, 2),
            prompt_tokens=round(figures.prompt_tokens / max(len(good), 1), 1),
            output_tokens=round(figures.output_tokens / max(len(good), 1), 1),
            tokens_per_event=figures.tokens_per_event,
            first_token=figures.ttft,
            inter_token=figures.inter_token,
            errors=figures.errors,
            is_usage=bool(good) and all(exchange.has_usage for exchange in good),
        )


async def only_model(client: HttpClient, url: str) -> str:
    """Return the id of the first model that a server lists. Raises BenchError."""
    try:
        reply = await client.get("/v1/models")
    except OSError as error:
        raise BenchError(f"{url} does not answer: {why(error)}.") from None
    if reply.status != _OK:
        raise BenchError(f"{url}/v1/models: {refusal(reply)}")
    try:
        rows = json.loads(reply.body)["data"]
        names = [cast(str, row["id"]) for row in rows]
    except (ValueError, KeyError, TypeError):
        raise BenchError(f"{url}/v1/models is no list of models.") from None
    if not names:
        raise BenchError(f"{url} serves no model.")
    return names[0]
