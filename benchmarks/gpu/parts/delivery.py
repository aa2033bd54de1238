"""Delivery: the loop's own speed beside gRPC to the engine and HTTP through all services."""

from __future__ import annotations

import asyncio
import os
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import islice
from multiprocessing import get_context
from multiprocessing.queues import Queue
from multiprocessing.synchronize import Barrier
from pathlib import Path

from benchmarks.gpu.context import Context, Row, Rows, release
from benchmarks.gpu.parts.loads import llama, start, streams_row
from benchmarks.gpu.random_tokenizer import add_tokenizer
from benchmarks.peers import Tokenwire
from benchmarks.processes import ProcessTree, ServiceUse, free_port, running
from benchmarks.prompts import Prompts, vocabulary_size
from tokenwire.client import EngineClient
from tokenwire.load.exchanges import read_exchange
from tokenwire.load.http_client import HttpClient
from tokenwire.load.load_run import LoadRun, Target
from tokenwire.load.workloads import ClosedLoop, Workload

__all__ = ["measure_delivery"]

_CLIENTS = 8
"""Most processes of clients: one reads about 60,000 tokens a second"""
_MOST_SECONDS = 120.0
"""Time in which a load ends"""
_LEAST_SHARE = 0.95
"""Least speed over HTTP, as a share of the loop's"""


@dataclass(frozen=True, slots=True)
class _Load:
    """Streams that come at once. Lengths are in tokens."""

    streams: int
    prompt: int
    output: int

    @property
    def workload(self) -> Workload:
        """The load as the HTTP client takes it."""
        arrivals = ClosedLoop(self.streams)
        return Workload("delivery", arrivals, self.prompt, self.output, self.streams)


def measure_delivery(context: Context, model: str) -> Rows:
    """Yield output tokens/s along each path by number of streams, and the CPU of each service.

    model: a name of LLAMAS. The services have their defaults. On a card the second run counts.
    """
    path = llama(context, model, eos_token_id=0)  # grammars need a token that ends a text
    add_tokenizer(path)
    loads = context.size((_Load(64, 256, 256), _Load(256, 256, 256)), (_Load(4, 16, 8),))
    rates = {}
    with start(context, path) as engine:
        for load in loads:
            row = streams_row(engine, load.streams, load.prompt, load.output)
            rates[load] = float(row["tokens/s"] or 0)
            yield {"path": "loop", "streams": load.streams, "tokens/s": rates[load]}
    release()
    vocabulary = vocabulary_size(path)
    with _serving(context, path) as (server, url, tree):
        ways: dict[str, _Way] = {
            "gRPC to the engine": _OverGrpc(server.engine_port, vocabulary),
            "HTTP": _OverHttp(Target(url, server.served_name(path)), vocabulary),
        }
        for load in loads:
            for name, way in ways.items():
                if context.on_gpu:
                    _at_once(way, load, "warm")
                before = tree.by_service()
                rate = _at_once(way, load, "measured")
                share = rate / rates[load]
                found: Row = {
                    "path": name,
                    "streams": load.streams,
                    "tokens/s": rate,
                    "share of the loop": share,
                }
                if name == "HTTP" and load is loads[-1] and context.on_gpu:
                    found["ok"] = share >= _LEAST_SHARE
                yield found | _cpu(before, tree)


@contextmanager
def _serving(context: Context, path: Path) -> Iterator[tuple[Tokenwire, str, ProcessTree]]:
    """Run all services with their defaults. Yield the server, its URL and its processes."""
    kv_memory = " --kv-memory 64MiB" if context.is_dry else ""
    server = Tokenwire(f"--device {context.device.type}{kv_memory}")
    launch = server.launch(server.install(path), path, free_port())
    with running(launch, context.checkpoints / f"delivery-{path.name}.log") as tree:
        yield server, launch.url, tree


class _Way(ABC):
    """A client of one of the services."""

    @abstractmethod
    async def tokens(self, load: _Load, seed: str) -> int:
        """Run a load; return the output tokens."""


@dataclass(frozen=True, slots=True)
class _OverHttp(_Way):
    """A client of the HTTP shim."""

    target: Target
    vocabulary: int

    async def tokens(self, load: _Load, seed: str) -> int:
        client = HttpClient(self.target.url)
        run = LoadRun(client, self.target, Prompts(self.vocabulary, seed))
        (outcomes,) = await run.run((load.workload,))
        exchanges = [read_exchange(outcome, load.workload) for outcome in outcomes]
        if errors := [each.error for each in exchanges if each.error is not None]:
            raise RuntimeError(f"over HTTP: {errors[0]}")
        return sum(each.output_tokens for each in exchanges)


@dataclass(frozen=True, slots=True)
class _OverGrpc(_Way):
    """A client of the engine, without the services in front of it."""

    port: int
    vocabulary: int

    async def tokens(self, load: _Load, seed: str) -> int:
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


def _at_once(way: _Way, load: _Load, seed: str) -> float:
    """Run a load in several processes at once; return the output tokens per second."""
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
    way: _Way,
    load: _Load,
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


def _cpu(before: dict[str, ServiceUse], tree: ProcessTree) -> Row:
    """Return the CPU seconds of each service since `before`."""
    return {
        f"CPU s, {name}": use.cpu_seconds - (before[name].cpu_seconds if name in before else 0.0)
        for name, use in sorted(tree.by_service().items())
    }
