"""Prefix-cache hits and balance of several engines, by the way in which requests are spread.

    python -m benchmarks.routing --engines 4

Conversations with shared system prompts take turns; each turn sends all that was said before. The
tokenizer service places the requests by prefix and load. Beside it, each engine has a tokenizer
service of its own, over which the client spreads the same turns round robin, or to the one with
the fewest requests, or the gateway smg by its policy cache_aware (over HTTP). The best possible is
one cache without limits for all engines.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import random
import re
import statistics
import sys
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

import httpx

from benchmarks.processes import free_port
from benchmarks.results import RESULTS, Machine, now, save
from services.common.block_hash import prefix_hashes, tenant_salt
from services.common.network.health import is_serving
from tokenwire.channel import connect
from tokenwire.client import Client
from tokenwire.pb.completion.v1 import models_pb2
from tokenwire.pb.completion.v1.completion_pb2_grpc import CompletionServiceStub
from tokenwire.pb.engine.v1 import engine_pb2
from tokenwire.pb.engine.v1.engine_pb2_grpc import EngineControlServiceStub
from tokenwire.serving.stack_layout import embedded_checkpoint

Choose: TypeAlias = Callable[[], int]
_POLL_SECONDS = 0.1
_REPORT_SECONDS = 1.0
_MOST_ID = 4_000
_SMG = "smg cache_aware"
_POLICIES = ("prefix and load", "round robin", "least requests", _SMG)


@dataclass(frozen=True, slots=True)
class Workload:
    """Conversations, each of which repeats its system prompt and all earlier turns."""

    conversations: int
    systems: int
    system_tokens: int
    turns: int
    turn_tokens: int
    answer_tokens: int
    pause_seconds: float
    """Mean of the exponential pauses between the turns of a conversation"""


@dataclass(slots=True)
class Tally:
    """Result of one policy."""

    hit_tokens: int = 0
    possible_tokens: int = 0
    """Tokens that one cache without limits would have had"""
    computed: list[float] = field(default_factory=list)
    """Prompt tokens without a hit, and generated tokens, by engine"""
    seconds: float = 0.0
    first_token_seconds: list[float] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Figures:
    """Figures of one policy."""

    policy: str
    hits_of_possible: float
    load_max_by_mean: float
    seconds: float
    p50_first_token_seconds: float
    p95_first_token_seconds: float


@dataclass(frozen=True, slots=True)
class Report:
    """A run with its conditions."""

    date: str
    machine: Machine
    engines: int
    seed: int
    workload: Workload
    figures: Sequence[Figures]


@dataclass(frozen=True, slots=True)
class _Service:
    """A process of the fleet."""

    target: str
    metrics: str
    """URL"""


@dataclass(slots=True)
class _Answer:
    """Output of one turn."""

    ids: list[int] = field(default_factory=list)
    cached_tokens: int = 0
    first_token_at: float = 0.0
    """On the monotonic clock"""

    def take(self, ids: Sequence[int]) -> None:
        self.first_token_at = self.first_token_at or time.monotonic()
        self.ids += ids


class _Gateway:
    """smg in front of the tokenizer services that have one engine each."""

    def __init__(self, http: httpx.AsyncClient, model: str) -> None:
        self._http = http
        self._model = model

    async def until_ready(self, workers: int) -> None:
        while await self._count_ready() < workers:  # noqa: ASYNC110 - another process
            await asyncio.sleep(_POLL_SECONDS)

    async def ask(self, prompt: Sequence[int], tokens: int) -> _Answer:
        sampling = {"max_new_tokens": tokens, "temperature": 0, "ignore_eos": True}
        body = {"model": self._model, "input_ids": prompt, "sampling_params": sampling}
        answer = _Answer()
        async with self._http.stream("POST", "/generate", json=body | {"stream": True}) as stream:
            stream.raise_for_status()
            async for line in stream.aiter_lines():
                if line.startswith("data: {"):
                    event = json.loads(line.removeprefix("data: "))
                    answer.take(event["output_ids"])
                    answer.cached_tokens = event["meta_info"]["cached_tokens"]
        return answer

    async def _count_ready(self) -> int:
        try:
            answer = await self._http.get("/workers")
        except httpx.TransportError:
            return 0
        return sum(worker["status"] == "ready" for worker in answer.json()["workers"])


class _Fleet:
    """Engines, a tokenizer service for all, one for each, and a gateway before the latter."""

    def __init__(
        self,
        engines: Sequence[_Service],
        shared: Client,
        own: Sequence[Client],
        gateway: _Gateway,
    ) -> None:
        self.engines = engines
        self.shared = shared
        self.own = own
        self.gateway = gateway
        self.block_size = 0

    async def flush(self) -> None:
        """Empty the prefix caches."""
        for engine in self.engines:
            async with connect(engine.target) as channel:
                control: Any = EngineControlServiceStub(channel)
                await control.FlushCache(engine_pb2.FlushCacheRequest())
                model = await control.GetModel(engine_pb2.GetModelRequest())
                self.block_size = model.block_size
        await asyncio.sleep(_REPORT_SECONDS)

    async def computed(self) -> list[float]:
        """Return the prompt and generated tokens that each engine computed since its start."""
        computed = []
        async with httpx.AsyncClient() as http:
            for engine in self.engines:
                text = (await http.get(engine.metrics)).text
                found = re.findall(r"^tokenwire_engine_(\w+)_tokens_total\S* (\S+)$", text, re.M)
                tokens = {kind: float(value) for kind, value in found}
                computed.append(tokens["prompt"] - tokens["cached"] + tokens["generated"])
        return computed


@asynccontextmanager
async def _service(name: str, *arguments: str) -> AsyncIterator[_Service]:
    port, metrics = free_port(), free_port()
    service = _Service(f"127.0.0.1:{port}", f"http://127.0.0.1:{metrics}/metrics")
    command = (sys.executable, "-m", f"services.{name}", "--port", str(port))
    flags = ("--metrics-port", str(metrics), "--log-level", "warning", *arguments)
    process = await asyncio.create_subprocess_exec(*command, *flags)
    try:
        while not await is_serving(service.target):  # noqa: ASYNC110 - another process
            await asyncio.sleep(_POLL_SECONDS)
        yield service
    finally:
        process.terminate()
        await process.wait()


@asynccontextmanager
async def _gateway(workers: Sequence[_Service], model: str) -> AsyncIterator[_Gateway]:
    port, metrics = free_port(), free_port()
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "smg", "launch", "--policy", "cache_aware"),
        *("--worker-urls", *(f"grpc://{worker.target}" for worker in workers)),
        *("--port", str(port), "--prometheus-port", str(metrics), "--log-level", "error"),
        *("--worker-startup-check-interval", "1"),
        stdout=asyncio.subprocess.DEVNULL,
    )
    try:
        url = f"http://127.0.0.1:{port}"
        async with httpx.AsyncClient(base_url=url, timeout=None) as http:
            gateway = _Gateway(http, model)
            await gateway.until_ready(len(workers))
            yield gateway
    finally:
        process.kill()
        await process.wait()


@asynccontextmanager
async def _fleet(model: Path, count: int) -> AsyncIterator[_Fleet]:
    few = ("--kv-memory", "96MiB", "--threads", "1", "--dtype", "float32")
    async with AsyncExitStack() as stack:
        enter = stack.enter_async_context
        checkpoint = ("--model", str(model))
        engines = [await enter(_service("engine", *checkpoint, *few)) for _ in range(count)]
        targets = [engine.target for engine in engines]
        each = ("tokenizer", *checkpoint, "--vllm-api", "--engine")
        own = [await enter(_service(*each, target)) for target in targets]
        every = ("--engine", ",".join(targets))
        shared = await enter(_service("tokenizer", *checkpoint, *every))
        await _until_all_serve(shared.target, count)
        clients = [await enter(Client(each.target)) for each in [shared, *own]]
        gateway = await enter(_gateway(own, model.name))
        yield _Fleet(engines, clients[0], clients[1:], gateway)


async def _until_all_serve(tokenizer: str, count: int) -> None:
    serving = models_pb2.ENGINE_STATE_SERVING
    async with connect(tokenizer) as channel:
        stub = CompletionServiceStub(channel)
        while True:
            answer = await stub.GetStatus(models_pb2.GetStatusRequest())
            if [engine.state for engine in answer.models[0].engines].count(serving) == count:
                return
            await asyncio.sleep(_POLL_SECONDS)


class _Round:
    """One policy over the whole workload."""

    def __init__(self, fleet: _Fleet, workload: Workload, seed: int, policy: str) -> None:
        self._fleet = fleet
        self._workload = workload
        self._seed = seed
        self._policy = policy
        self._seen: set[bytes] = set()
        self._turn = itertools.count()
        self._open = [0] * len(fleet.own)
        self.tally = Tally()

    async def run(self) -> Tally:
        await self._fleet.flush()
        before = await self._fleet.computed()
        began = time.monotonic()
        chance = random.Random(self._seed)
        systems = [
            [chance.randrange(100, _MOST_ID) for _ in range(self._workload.system_tokens)]
            for _ in range(self._workload.systems)
        ]
        await asyncio.gather(
            *(
                self._converse(systems[i % len(systems)], random.Random(self._seed + i))
                for i in range(self._workload.conversations)
            )
        )
        self.tally.seconds = time.monotonic() - began
        after = await self._fleet.computed()
        self.tally.computed = [end - start for end, start in zip(after, before, strict=True)]
        return self.tally

    async def _converse(self, system: Sequence[int], chance: random.Random) -> None:
        said = list(system)
        for _ in range(self._workload.turns):
            await asyncio.sleep(chance.expovariate(1 / self._workload.pause_seconds))
            said += [chance.randrange(100, _MOST_ID) for _ in range(self._workload.turn_tokens)]
            said += await self._ask(said)

    async def _ask(self, prompt: list[int]) -> Sequence[int]:
        began = time.monotonic()
        hashes = prefix_hashes(prompt[:-1], tenant_salt(""), self._fleet.block_size)
        possible = next((i for i, h in enumerate(hashes) if h not in self._seen), len(hashes))
        self._seen.update(hashes)
        if self._policy == _SMG:
            answer = await self._fleet.gateway.ask(prompt, self._workload.answer_tokens)
        else:
            answer = await self._complete(prompt)
        self._seen.update(
            prefix_hashes([*prompt, *answer.ids[:-1]], tenant_salt(""), self._fleet.block_size)
        )
        tally = self.tally
        tally.hit_tokens += answer.cached_tokens
        tally.possible_tokens += possible * self._fleet.block_size
        tally.first_token_seconds.append(answer.first_token_at - began)
        return answer.ids

    async def _complete(self, prompt: list[int]) -> _Answer:
        place = self._choose()
        client = self._fleet.shared if place is None else self._fleet.own[place]
        if place is not None:
            self._open[place] += 1
        tokens = self._workload.answer_tokens
        fields: Any = {"max_tokens": tokens, "ignore_eos": True, "temperature": 0}
        answer = _Answer()
        async with client.stream(prompt, **fields) as stream:
            async for delta in stream:
                answer.take(delta.token_ids)
        if place is not None:
            self._open[place] -= 1
        assert stream.usage is not None
        answer.cached_tokens = stream.usage.cached_tokens
        return answer

    def _choose(self) -> int | None:
        """Return the number of the engine; None leaves the choice to the tokenizer service."""
        match self._policy:
            case "round robin":
                return next(self._turn) % len(self._open)
            case "least requests":
                least = min(self._open)
                return random.choice([i for i, n in enumerate(self._open) if n == least])
        return None


def _figures(policy: str, tallies: Sequence[Tally]) -> Figures:
    """Return the figures of one policy over all its rounds."""
    first = sorted(seconds for tally in tallies for seconds in tally.first_token_seconds)
    loads = [max(tally.computed) / statistics.mean(tally.computed) for tally in tallies]
    return Figures(
        policy,
        sum(t.hit_tokens for t in tallies) / sum(t.possible_tokens for t in tallies),
        statistics.median(loads),
        statistics.median(tally.seconds for tally in tallies),
        first[len(first) // 2],
        first[int(len(first) * 0.95)],
    )


async def _measure(arguments: argparse.Namespace) -> None:
    workload = Workload(
        arguments.conversations, arguments.systems, 512, arguments.turns, 48, 24, arguments.pause
    )
    tallies: dict[str, list[Tally]] = {policy: [] for policy in _POLICIES}
    async with _fleet(arguments.model, arguments.engines) as fleet:
        for number in range(arguments.rounds):
            for policy in _POLICIES:
                round_ = _Round(fleet, workload, arguments.seed + 1000 * number, policy)
                tallies[policy].append(await round_.run())
    figures = [_figures(policy, tallies[policy]) for policy in _POLICIES]
    print("| policy | hits of the possible | load, max ÷ mean | seconds | TTFT p50 | p95 |")
    print("|---|---|---|---|---|---|")
    for each in figures:
        print(
            f"| {each.policy} | {each.hits_of_possible:.1%} | {each.load_max_by_mean:.2f} "
            f"| {each.seconds:.1f} | {1e3 * each.p50_first_token_seconds:.0f} ms "
            f"| {1e3 * each.p95_first_token_seconds:.0f} ms |"
        )
    report = Report(now(), Machine.this(), arguments.engines, arguments.seed, workload, figures)
    if arguments.save:
        print(save(report, RESULTS, f"routing-{report.date}"))


def main() -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--model", type=Path, default=embedded_checkpoint())
    parser.add_argument("--engines", type=int, default=4)
    parser.add_argument("--conversations", type=int, default=64)
    parser.add_argument("--systems", type=int, default=8, help="system prompts they share")
    parser.add_argument("--turns", type=int, default=6)
    parser.add_argument("--pause", type=float, default=1.0, help="mean seconds between turns")
    parser.add_argument("--rounds", type=int, default=3, help="measurements of each policy")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--save", action="store_true", help=f"write a JSON file in {RESULTS.name}")
    asyncio.run(_measure(parser.parse_args()))


if __name__ == "__main__":
    main()
