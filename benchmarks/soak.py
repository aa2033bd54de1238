"""Memory, descriptors, threads and KV blocks of a fleet under mixed load over time.

    python -m benchmarks.soak --minutes 20

The benchmark starts 2 engines, and two of each other service, and keeps a few streams of all kinds
running; one client of ten leaves early. Once a second it reads what each process holds. The table
gives medians after the warm-up and at the end, and the slope between, which is a leak if it
stays positive.
"""

import argparse
import asyncio
import random
import statistics
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import psutil

from benchmarks.tables import markdown
from tests.faults.fleet import Fleet, Node, running_fleet
from tests.faults.workload import KINDS, Asked, ask, requests
from tokenwire.channel import connect
from tokenwire.pb.engine.v1.engine_pb2 import GetLoadRequest
from tokenwire.pb.engine.v1.engine_pb2_grpc import EngineControlServiceStub
from tokenwire.serving.stack_layout import embedded_checkpoint

__all__ = ["main"]

_ENGINES = 2
_TOKENS = 100
_LEAVING = 0.1
"""Share of the clients that leave before the end"""
_LEAVE_SECONDS = 0.5
_SAMPLE_SECONDS = 1.0
_WARM_UP = 0.2
"""Share of the run in which caches fill"""
_WINDOW = 0.1
"""Share of the run over which a median is taken"""


@dataclass(frozen=True, slots=True)
class Sample:
    """Memory, descriptors and threads of one process."""

    seconds: float
    resident: int
    """Bytes"""
    descriptors: int
    threads: int


@dataclass(slots=True)
class Soak:
    """Samples of all processes, and the answers."""

    processes: dict[str, list[Sample]] = field(default_factory=lambda: defaultdict(list))
    free_blocks: dict[str, list[tuple[float, int]]] = field(
        default_factory=lambda: defaultdict(list)
    )
    answers: Counter[str] = field(default_factory=Counter)


async def _watch(fleet: Fleet, soak: Soak) -> None:
    began = time.monotonic()
    channels = {node.name: connect(node.target) for node in fleet.of("engine")}
    try:
        while True:
            now = time.monotonic() - began
            for node in fleet.nodes:
                for name, process in _processes(node).items():
                    soak.processes[name].append(_sample(process, now))
            for name, channel in channels.items():
                answer = await EngineControlServiceStub(channel).GetLoad(GetLoadRequest())
                soak.free_blocks[name].append((now, answer.load.free_blocks))
            await asyncio.sleep(_SAMPLE_SECONDS)
    finally:
        for channel in channels.values():
            await channel.close()


def _processes(node: Node) -> Mapping[str, psutil.Process]:
    """Return the process of a service and its children, by a name that stays the same."""
    parent = psutil.Process(node.pid)
    children = sorted(parent.children(recursive=True), key=lambda child: child.pid)
    named = {f"{node.name}, child {number}": child for number, child in enumerate(children, 1)}
    return {node.name: parent, **named}


def _sample(process: psutil.Process, now: float) -> Sample:
    with process.oneshot():
        return Sample(now, process.memory_info().rss, process.num_fds(), process.num_threads())


async def _client(
    http: httpx.AsyncClient, fleet: Fleet, soak: Soak, pause: float, chance: random.Random
) -> None:
    """Send one request after the other, each with a seed of its own."""
    while True:
        seed = chance.randrange(2**31)
        asked = chance.choice(requests(len(KINDS), _TOKENS, seed))
        urls = chance.sample(fleet.urls, len(fleet.urls))
        if chance.random() < _LEAVING:
            soak.answers[await _leave(http, urls, asked)] += 1
        else:
            answer = await ask(http, urls, asked)
            soak.answers[answer.failure[:80] or "complete"] += 1
        await asyncio.sleep(pause)


async def _leave(http: httpx.AsyncClient, urls: Sequence[str], asked: Asked) -> str:
    try:
        async with asyncio.timeout(_LEAVE_SECONDS):
            await ask(http, urls, asked)
    except TimeoutError:
        return "left early"
    return "complete"


async def _soak(arguments: argparse.Namespace) -> tuple[Soak, list[str]]:
    soak = Soak()
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
    async with (
        running_fleet(arguments.model, arguments.logs, _ENGINES) as fleet,
        httpx.AsyncClient(timeout=120, limits=limits, trust_env=False) as http,
    ):
        tasks = [asyncio.ensure_future(_watch(fleet, soak))]
        for number in range(arguments.streams):
            chance = random.Random(number)
            work = _client(http, fleet, soak, arguments.pause, chance)
            tasks.append(asyncio.ensure_future(work))
        done, running = await asyncio.wait(
            tasks, timeout=60 * arguments.minutes, return_when=asyncio.FIRST_COMPLETED
        )
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)
        for task in done:
            task.result()
        return soak, await fleet.leaks()


def _row(name: str, unit: float, places: Sequence[tuple[float, float]], total: float) -> list[str]:
    """Return the median after the warm-up, the one at the end, and the slope per hour."""
    warm = [(when, value / unit) for when, value in places if when >= _WARM_UP * total]
    first = [value for when, value in warm if when <= (_WARM_UP + _WINDOW) * total]
    last = [value for when, value in warm if when >= (1 - _WINDOW) * total]
    slope = statistics.linear_regression(*zip(*warm, strict=True)).slope * 3600
    return [
        name,
        f"{statistics.median(first):.1f}",
        f"{statistics.median(last):.1f}",
        f"{slope:+.1f}",
    ]


def _describe(soak: Soak, leaks: Sequence[str], minutes: float) -> str:
    total = 60 * minutes
    rows = [["process", "", "after the warm-up", "at the end", "slope per hour"]]
    for name, samples in sorted(soak.processes.items()):
        if samples[-1].seconds < (1 - _WINDOW) * total:
            rows.append([name, "ended", "", "", ""])
            continue
        for what, unit in (("resident", 2**20), ("descriptors", 1), ("threads", 1)):
            values = [(each.seconds, float(getattr(each, what))) for each in samples]
            title, *numbers = _row(what, unit, values, total)
            rows.append([name, f"{title}, MiB" if unit > 1 else title, *numbers])
    for name, blocks in soak.free_blocks.items():
        title, *numbers = _row("free KV blocks", 1, [(s, float(n)) for s, n in blocks], total)
        rows.append([name, title, *numbers])
    answers = ", ".join(f"{count:,} {what}" for what, count in soak.answers.most_common())
    return f"{markdown(rows)}\n\nanswers: {answers}\nleaks: {', '.join(leaks) or 'none'}"


def main() -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", type=Path, default=embedded_checkpoint())
    parser.add_argument("--minutes", type=float, default=20.0)
    parser.add_argument("--streams", type=int, default=8, help="streams at a time")
    parser.add_argument("--pause", type=float, default=0.0, help="seconds between two requests")
    parser.add_argument("--logs", type=Path, help="directory of the services' logs")
    arguments = parser.parse_args()
    arguments.logs = arguments.logs or Path(tempfile.mkdtemp(prefix="tokenwire-soak-"))
    soak, leaks = asyncio.run(_soak(arguments))
    print(_describe(soak, leaks, arguments.minutes))


if __name__ == "__main__":
    main()
