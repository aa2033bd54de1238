"""Clients of the services: processes that send a part of a load each, all at once.

The processes import this module, so it imports no torch.
"""

from __future__ import annotations

import asyncio
import os
import time
from abc import ABC, abstractmethod
from dataclasses import dataclass, replace
from itertools import islice
from multiprocessing import get_context
from multiprocessing.queues import Queue
from multiprocessing.synchronize import Barrier

from benchmarks.prompts import Prompts
from tokenwire.client import EngineClient
from tokenwire.load.exchanges import read_exchange
from tokenwire.load.http_client import HttpClient
from tokenwire.load.load_run import LoadRun, Target
from tokenwire.load.workloads import ClosedLoop, Workload

__all__ = ["Load", "OverGrpc", "OverHttp", "Way", "run_at_once"]

_CLIENTS = 8
"""Most processes of clients: one reads about 60,000 tokens a second"""
_MOST_SECONDS = 120.0
"""Time in which a load ends"""


@dataclass(frozen=True, slots=True)
class Load:
    """Streams that come at once. Lengths are in tokens."""

    streams: int
    prompt: int
    output: int

    @property
    def workload(self) -> Workload:
        """The load as the HTTP client takes it."""
        arrivals = ClosedLoop(self.streams)
        return Workload("delivery", arrivals, self.prompt, self.output, self.streams)


class Way(ABC):
    """A client of one of the services."""

    @abstractmethod
    async def tokens(self, load: Load, seed: str) -> int:
        """Run a load; return the output tokens."""


@dataclass(frozen=True, slots=True)
class OverHttp(Way):
    """A client of the HTTP shim."""

    target: Target
    vocabulary: int

    async def tokens(self, load: Load, seed: str) -> int:
        client = HttpClient(self.target.url)
        run = LoadRun(client, self.target, Prompts(self.vocabulary, seed))
        (outcomes,) = await run.run((load.workload,))
        exchanges = [read_exchange(outcome, load.workload) for outcome in outcomes]
        if errors := [each.error for each in exchanges if each.error is not None]:
            raise RuntimeError(f"over HTTP: {errors[0]}")
        return sum(each.output_tokens for each in exchanges)


@dataclass(frozen=True, slots=True)
class OverGrpc(Way):
    """A client of the engine, without the services in front of it."""

    port: int
    vocabulary: int

    async def tokens(self, load: Load, seed: str) -> int:
        prompts = Prompts(self.vocabulary, seed).of(load.workload)
        async with EngineClient(f"127.0.0.1:{self.port}") as client:

            async def answer(prompt: list[int] | str) -> int:
                assert isinstance(prompt, list)
                async with client.stream(
                    prompt, max_tokens=load.output, temperature=0, ignore_eos=True
                ) as stream:
                    async for _ in stream:
                        pass
                    assert stream.usage is not None
                    return stream.usage.completion_tokens

            return sum(await asyncio.gather(*map(answer, islice(prompts, load.streams))))


def run_at_once(way: Way, load: Load, seed: str) -> float:
    """Run a load in several processes at once, and return the output tokens per second."""
    context = get_context("spawn")
    clients = min(_CLIENTS, max(1, (os.cpu_count() or 2) // 4), load.streams)
    barrier = context.Barrier(clients)
    results: Queue[tuple[int, float, float] | str] = context.Queue()
    processes = []
    for number in range(clients):
        streams = load.streams // clients + (number < load.streams % clients)
        part = replace(load, streams=streams)
        arguments = (way, part, f"{seed} {number}", barrier, results)
        processes.append(context.Process(target=_client, args=arguments, daemon=True))
    for process in processes:
        process.start()
    found = [results.get(timeout=_MOST_SECONDS) for _ in processes]
    for process in processes:
        process.join()
    for result in found:
        if isinstance(result, str):
            raise RuntimeError(result)
    runs = [result for result in found if not isinstance(result, str)]
    seconds = max(ended for _, _, ended in runs) - min(began for _, began, _ in runs)
    return sum(tokens for tokens, _, _ in runs) / seconds


def _client(
    way: Way,
    load: Load,
    seed: str,
    barrier: Barrier,
    results: Queue[tuple[int, float, float] | str],
) -> None:
    """Run a part of a load, once all clients have imported what they need."""
    try:
        barrier.wait(timeout=_MOST_SECONDS)
        began = time.monotonic()
        results.put((asyncio.run(way.tokens(load, seed)), began, time.monotonic()))
    except Exception as error:
        results.put(f"{type(error).__name__}: {error}")
