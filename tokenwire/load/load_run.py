"""Run of a load: sends the requests of workloads. Replies are read after it."""

import asyncio
import json
import random
import time
from collections.abc import Coroutine, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from itertools import islice
from typing import Protocol, TypeAlias

from tokenwire.load.http_client import HttpClient, HttpReply
from tokenwire.load.workloads import ClosedLoop, Workload

__all__ = [
    "OPENAI_FIELDS",
    "Endpoint",
    "Json",
    "LoadRun",
    "Outcome",
    "PromptSource",
    "Target",
    "bodies",
]

Json: TypeAlias = "bool | int | float | str | list[Json] | dict[str, Json] | None"

OPENAI_FIELDS: Mapping[str, Json] = {
    "ignore_eos": True,
    "stream_options": {"include_usage": True},
}


class Endpoint(StrEnum):
    """Path of the requests."""

    COMPLETIONS = "/v1/completions"
    CHAT = "/v1/chat/completions"


@dataclass(frozen=True, slots=True)
class Target:
    """A running server, and the further fields of its completion requests."""

    url: str
    model: str
    fields: Mapping[str, Json] = field(default_factory=lambda: OPENAI_FIELDS)
    text_prompts: bool = False
    endpoint: Endpoint = Endpoint.COMPLETIONS


class PromptSource(Protocol):
    """Maker of prompts."""

    def of(self, workload: Workload) -> Iterator[list[int] | str]:
        """Yield prompts of a workload without end, each as ids or as text."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """Result of one request. Times are of `time.perf_counter`."""

    sent: float
    ended: float
    reply: HttpReply | OSError


class LoadRun:
    """Requests of several workloads, sent at the same time."""

    def __init__(self, client: HttpClient, target: Target, prompts: PromptSource) -> None:
        self._client = client
        self._target = target
        self._prompts = prompts
        self.outcomes: list[list[Outcome]] = []
        """Ended requests of each workload; they are there too if the run was cancelled"""

    async def run(
        self, workloads: Sequence[Workload], seconds: float | None = None
    ) -> list[list[Outcome]]:
        """Send all requests. Workloads without a number of requests end with the others.

        seconds: time after which a workload with a number sends no further request.
        """
        done = asyncio.Event()
        self.outcomes = [[] for _ in workloads]
        bounded: list[Coroutine[None, None, None]] = []
        unbounded: list[Coroutine[None, None, None]] = []
        end = None if seconds is None else time.perf_counter() + seconds
        for workload, results in zip(workloads, self.outcomes, strict=True):
            requests = bodies(self._target, workload, self._prompts)
            if workload.requests is not None:
                requests = _until(end, islice(requests, workload.requests))
            if isinstance(workload.arrivals, ClosedLoop):
                running = self._closed_loop(requests, workload.arrivals.concurrency, results)
            else:
                running = self._open_loop(requests, workload.arrivals.rate, results, done)
            (unbounded if workload.requests is None else bounded).append(running)

        async with asyncio.TaskGroup() as group:
            for running in unbounded:
                group.create_task(running)
            await asyncio.gather(*bounded)
            done.set()
        return self.outcomes

    async def _closed_loop(
        self, requests: Iterator[bytes], concurrency: int, results: list[Outcome]
    ) -> None:
        async def worker() -> None:
            for body in requests:
                results.append(await self._complete(body, time.perf_counter()))  # noqa: PERF401

        await asyncio.gather(*(worker() for _ in range(concurrency)))

    async def _open_loop(
        self, requests: Iterator[bytes], rate: float, results: list[Outcome], done: asyncio.Event
    ) -> None:
        async def arrive(body: bytes, due: float) -> None:
            results.append(await self._complete(body, due))

        gaps = random.Random(rate)
        due = time.perf_counter()
        async with asyncio.TaskGroup() as group:
            for body in requests:
                due += gaps.expovariate(rate)
                try:
                    async with asyncio.timeout(due - time.perf_counter()):
                        await done.wait()
                    return
                except TimeoutError:
                    group.create_task(arrive(body, due))

    async def _complete(self, body: bytes, sent: float) -> Outcome:
        try:
            reply: HttpReply | OSError = await self._client.post(self._target.endpoint, body)
        except OSError as error:  # includes TimeoutError
            reply = error
        return Outcome(sent, time.perf_counter(), reply)


def bodies(target: Target, workload: Workload, prompts: PromptSource) -> Iterator[bytes]:
    """Yield the JSON bodies of a workload's requests without end."""
    fields = dict(target.fields)
    if workload.json_schema is not None:
        schema: dict[str, Json] = {"name": "bench", "schema": json.loads(workload.json_schema)}
        fields["response_format"] = {"type": "json_schema", "json_schema": schema}
        fields.pop("ignore_eos", None)  # The schema decides where the output may end.
    for prompt in prompts.of(workload):
        given = (
            {"messages": [{"role": "user", "content": prompt}]}
            if target.endpoint is Endpoint.CHAT
            else {"prompt": prompt}
        )
        body = {
            "model": target.model,
            **given,
            "max_tokens": workload.output,
            "temperature": workload.temperature,
            "top_p": workload.top_p,
            "stream": True,
            **fields,
        }
        yield json.dumps(body, separators=(",", ":")).encode()


def _until(end: float | None, requests: Iterator[bytes]) -> Iterator[bytes]:
    """Yield requests until a time of `time.perf_counter`."""
    for body in requests:
        if end is not None and time.perf_counter() >= end:
            return
        yield body
