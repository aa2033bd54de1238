"""Goodput, refusals and their Retry-After while clients ask for four times what the server can do.

    python -m benchmarks.overload

The benchmark starts the four services and measures their capacity: the tokens per second of as many
streams as run at once. Then requests arrive at four times that rate, at random moments and whatever
the server does. A refused client waits as long as Retry-After says and comes again, once; the
promise is kept if it is not refused again.
"""

import argparse
import asyncio
import multiprocessing
import os
import random
import statistics
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from multiprocessing.queues import Queue
from pathlib import Path
from typing import Any

import httpx

from benchmarks.processes import Launch, ProcessTree, ServiceUse, free_port, running
from benchmarks.tables import markdown
from tokenwire.serving.stack_layout import embedded_checkpoint

__all__ = ["main"]

_PATH = "/v1/completions"
_HEALTH_SECONDS = 0.25
"""Time between two probes"""
_CLIENT_SECONDS = 300.0


@dataclass(slots=True)
class Requests:
    """Outcomes of the requests of a phase."""

    completed: int = 0
    tokens: int = 0
    refused: int = 0
    """First attempts that got 429"""
    kept: int = 0
    """Second attempts that were served after Retry-After"""
    broken: int = 0
    """Second attempts that got 429 again"""
    waits: list[int] = field(default_factory=list)
    """Seconds of Retry-After"""
    failures: list[str] = field(default_factory=list)
    ends: list[tuple[float, int]] = field(default_factory=list)
    """time.monotonic() and tokens of each completed request"""


class Client:
    """Sends requests for half to one and a half times as many tokens, so that no two keep step."""

    def __init__(self, http: httpx.AsyncClient, url: str, tokens: int) -> None:
        self._http = http
        self._url = url
        self._tokens = tokens
        self._seeds = random.Random(1)

    async def ask(self, seen: Requests) -> int | None:
        """Send a request. Return the seconds of Retry-After if it is refused, else None."""
        tokens = self._seeds.randint(self._tokens // 2, self._tokens * 3 // 2)
        body: dict[str, Any] = {"model": "default", "ignore_eos": True, "max_tokens": tokens}
        body |= {"prompt": f"import {self._seeds.randrange(10**6)}\n", "temperature": 0.8}
        try:
            answer = await self._http.post(self._url + _PATH, json=body)
        except httpx.HTTPError as error:
            seen.failures.append(type(error).__name__)
            return None
        if answer.status_code == 429:
            return int(answer.headers["retry-after"])
        if answer.status_code != 200:
            seen.failures.append(f"{answer.status_code} {answer.text[:100]}")
            return None
        seen.completed += 1
        tokens = answer.json()["usage"]["completion_tokens"]
        seen.tokens += tokens
        seen.ends.append((time.monotonic(), tokens))
        return None

    async def insist(self, seen: Requests) -> None:
        """Send a request, and once again after the time of a refusal."""
        wait = await self.ask(seen)
        if wait is None:
            return
        seen.refused += 1
        seen.waits.append(wait)
        await asyncio.sleep(wait)
        if await self.ask(seen) is None:
            seen.kept += 1
        else:
            seen.broken += 1


async def _capacity(client: Client, streams: int, seconds: float) -> float:
    """Return the tokens per second of this many streams, which begin anew when they end."""
    seen = Requests()
    began = time.monotonic()

    async def repeat() -> None:
        while time.monotonic() < began + seconds:
            await client.ask(seen)

    await asyncio.gather(*(repeat() for _ in range(streams)))
    # without the start and the end, in which streams are missing
    inner = [tokens for when, tokens in seen.ends if began + seconds / 4 < when < began + seconds]
    return sum(inner) / (seconds * 3 / 4)


async def _flood(client: Client, rate: float, seconds: float) -> tuple[Requests, float]:
    """Let requests arrive at this rate. Return them, and the goodput during the arrivals."""
    seen = Requests()
    began = time.monotonic()
    chance = random.Random(2)
    clients: list[asyncio.Task[None]] = []
    due = began
    while (due := due + chance.expovariate(rate)) < began + seconds:
        await asyncio.sleep(max(0.0, due - time.monotonic()))
        clients.append(asyncio.ensure_future(client.insist(seen)))
    await asyncio.gather(*clients)
    inner = [tokens for when, tokens in seen.ends if began + seconds / 4 < when < began + seconds]
    return seen, sum(inner) / (seconds * 3 / 4)


def _probe(url: str, latencies: "Queue[float]") -> None:
    """Ask for the server's health until the process is ended. Put the seconds that it takes."""
    while True:
        began = time.monotonic()
        with urllib.request.urlopen(url + "/ready", timeout=60) as answer:
            assert answer.status == 200
        latencies.put(time.monotonic() - began)
        time.sleep(_HEALTH_SECONDS)


@contextmanager
def _probing(url: str) -> Iterator[list[float]]:
    """Probe the server's health in a process of its own; fill the list at the end."""
    context = multiprocessing.get_context("spawn")
    latencies: Queue[float] = context.Queue()
    found: list[float] = []
    process = context.Process(target=_probe, args=(url, latencies), daemon=True)
    process.start()
    yield found
    assert process.is_alive(), "the server was not ready"
    while not latencies.empty():
        found.append(latencies.get())
    process.terminate()
    process.join()


async def _measure(arguments: argparse.Namespace, url: str, tree: ProcessTree) -> str:
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=100)
    async with httpx.AsyncClient(timeout=_CLIENT_SECONDS, limits=limits, trust_env=False) as http:
        client = Client(http, url, arguments.tokens)
        capacities = [await _capacity(client, arguments.running, arguments.seconds)]
        before = tree.by_service()
        rate = arguments.times * capacities[0] / arguments.tokens
        with _probing(url) as latencies:
            seen, goodput = await _flood(client, rate, arguments.seconds)
        after = tree.by_service()
        capacities.append(await _capacity(client, arguments.running, arguments.seconds))
    return _describe(seen, capacities, goodput, rate, (before, after), latencies)


def _describe(
    seen: Requests,
    capacities: Sequence[float],
    goodput: float,
    rate: float,
    uses: tuple[Mapping[str, ServiceUse], Mapping[str, ServiceUse]],
    latencies: Sequence[float],
) -> str:
    capacity = statistics.mean(capacities)
    asked = seen.completed + seen.broken + len(seen.failures)
    rows = [
        ["", ""],
        ["capacity, before and after", " and ".join(f"{each:,.0f}" for each in capacities)],
        ["offered", f"{rate:.1f} requests/s, {asked:,} in all"],
        ["goodput", f"{goodput:,.0f} tokens/s, {goodput / capacity:.0%} of the mean capacity"],
        ["refused at first", f"{seen.refused / max(asked, 1):.0%}"],
        ["Retry-After kept", f"{seen.kept / max(seen.refused, 1):.0%}"],
        [
            "Retry-After, median and most",
            f"{statistics.median(seen.waits or [0]):.0f} s, {max(seen.waits, default=0)} s",
        ],
        ["failed", f"{len(seen.failures)}"],
        ["/ready, p99", f"{1000 * sorted(latencies)[int(0.99 * len(latencies))]:.0f} ms"],
        *(
            [f"{name}, before and after", f"{_mebibytes(use)} and {_mebibytes(uses[1][name])} MiB"]
            for name, use in uses[0].items()
        ),
    ]
    return "\n".join([markdown(rows), *sorted(set(seen.failures))])


def _mebibytes(use: ServiceUse) -> str:
    return f"{use.resident_bytes / 2**20:,.0f}"


def main() -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", type=Path, default=embedded_checkpoint())
    parser.add_argument("--seconds", type=float, default=20.0, help="time in which requests arrive")
    parser.add_argument("--times", type=float, default=4.0, help="arrivals, of the capacity")
    parser.add_argument("--tokens", type=int, default=256, help="output tokens of a request")
    parser.add_argument("--running", type=int, default=16, help="sequences that run at once")
    parser.add_argument("--waiting", type=int, default=32, help="sequences that may wait")
    parser.add_argument("--logs", type=Path, default=Path(tempfile.gettempdir()))
    arguments = parser.parse_args()
    port = free_port()
    limits = f"--max-running {arguments.running} --max-waiting {arguments.waiting}"
    command = [
        *(sys.executable, "-m", "tokenwire", "serve", "--model", str(arguments.model)),
        *("--port", str(port), "--tokenizer-port", str(free_port())),
        *("--engine-port", str(free_port()), "--grammar-port", str(free_port())),
        *("--no-jobs", "--engine-args", f"--kv-memory 48MiB {limits}"),
    ]
    launch = Launch(command, dict(os.environ), f"http://127.0.0.1:{port}", "/ready")
    with running(launch, arguments.logs / "tokenwire-overload.log") as tree:
        print(asyncio.run(_measure(arguments, launch.url, tree)))


if __name__ == "__main__":
    main()
