"""Faults at random moments under streams of all kinds; every answer must be the undisturbed one.

python -m tests.faults.chaos --faults 500 --seed 1
"""

import argparse
import asyncio
import json
import random
import signal
import sys
import tempfile
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass, field, fields
from functools import partial
from pathlib import Path
from typing import TypeAlias

import httpx

from tests.faults.fleet import Fleet, Node, running_fleet
from tests.faults.link import Link
from tests.faults.workload import Answer, Asked, ask, difference, is_tie, requests
from tokenwire.serving.stack_layout import embedded_checkpoint

__all__ = ["Report", "chaos"]

_REQUESTS = 40
"""Different requests, which are repeated until the last fault is over"""
_TOKENS = 150
_STREAM_SECONDS = 180.0
_FROZEN_SECONDS = 3.0
"""More than the time after which a silent service counts as lost"""
_SLOW_SECONDS = 1.0


@dataclass(slots=True)
class Report:
    """Faults, answers, and what was wrong with them."""

    seed: int
    faults: Counter[str] = field(default_factory=Counter)
    answers: Counter[str] = field(default_factory=Counter)
    """Complete answers by kind"""
    differences: list[str] = field(default_factory=list)
    """Answers that are lost, doubled or changed, with the request's kind"""
    ties: int = 0
    """Answers that parted from the undisturbed one at a draw between two tokens"""
    leaks: list[str] = field(default_factory=list)


async def chaos(
    model: Path, logs: Path, *, faults: int, seed: int, streams: int, count: int = _REQUESTS
) -> Report:
    """Inflict this many faults while this many streams run; return what the clients saw.

    count: number of different requests, which the streams repeat.
    """
    report = Report(seed)
    chance = random.Random(seed)
    wanted = requests(count, _TOKENS, seed)
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
    async with (
        running_fleet(model, logs) as fleet,
        httpx.AsyncClient(timeout=_STREAM_SECONDS, limits=limits, trust_env=False) as http,
    ):
        calm = [await ask(http, fleet.urls, asked) for asked in wanted]
        assert not any(answer.failure for answer in calm), [a.failure for a in calm if a.failure]
        over = asyncio.Event()
        suspects: list[_Suspect] = []
        numbers = _rounds(len(wanted), seed)
        clients = [
            asyncio.ensure_future(
                _client(http, fleet, wanted, calm, report, suspects, over, numbers, seed + client)
            )
            for client in range(streams)
        ]
        try:
            await _inflict(fleet, chance, faults, report)
        finally:
            over.set()
            await asyncio.gather(*clients)
        for asked, answer, undisturbed in suspects:
            if await is_tie(http, fleet.urls, asked, answer, undisturbed):
                report.ties += 1
            else:
                why = difference(answer, undisturbed)
                report.differences.append(f"{asked.kind}, seed {asked.body['seed']}: {why}")
        report.leaks = await fleet.leaks()
    return report


def _rounds(count: int, seed: int) -> Iterator[int]:
    """Yield the numbers below `count` in random order, and in another order, for ever."""
    chance, numbers = random.Random(seed), list(range(count))
    while True:
        chance.shuffle(numbers)
        yield from numbers


async def _client(
    http: httpx.AsyncClient,
    fleet: Fleet,
    wanted: Sequence[Asked],
    calm: Sequence[Answer],
    report: Report,
    suspects: "list[_Suspect]",
    over: asyncio.Event,
    numbers: Iterator[int],
    seed: int,
) -> None:
    """Send one request after the other, to the shims in random order; note what is not right."""
    chance = random.Random(seed)
    while not over.is_set():
        number = next(numbers)
        urls = chance.sample(fleet.urls, len(fleet.urls))
        asked = wanted[number]
        try:
            async with asyncio.timeout(_STREAM_SECONDS):
                answer = await ask(http, urls, asked)
        except TimeoutError:
            answer = Answer(failure=f"no end within {_STREAM_SECONDS:g} s")
        if difference(answer, calm[number]):
            suspects.append((asked, answer, calm[number]))
        else:
            report.answers[asked.kind] += 1


async def _inflict(fleet: Fleet, chance: random.Random, count: int, report: Report) -> None:
    """Inflict faults at random moments, on engines or others, one or two at a time."""
    faults = _faults(fleet)
    busy: set[str] = set()
    running: set[asyncio.Task[None]] = set()
    for _ in range(count):
        await asyncio.sleep(chance.uniform(0.0, 1.0))
        while len(running) > 1:
            done, _ = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
            for each in done:
                await each
            running -= done
        name, victim, fault = chance.choice([each for each in faults if each[1] not in busy])
        report.faults[name] += 1
        busy.add(victim)
        task = asyncio.ensure_future(fault())
        task.add_done_callback(lambda _, victim=victim: busy.discard(victim))  # type: ignore[misc]
        running.add(task)
    await asyncio.gather(*running)


_Suspect: TypeAlias = tuple[Asked, Answer, Answer]
"""A request, its answer, and the undisturbed one"""
Fault: TypeAlias = tuple[str, str, Callable[[], Awaitable[None]]]


def _faults(fleet: Fleet) -> list[Fault]:
    """Return each fault with its name and its victim. Two for a service are never at once."""
    found: list[Fault] = []
    for node in fleet.of("engine"):
        found += [
            ("kill engine", node.name, partial(_kill, node)),
            ("kill engine's loop", node.name, partial(_kill_loop, node)),
            ("drain engine", node.name, partial(_drain, node)),
            ("freeze engine", node.name, partial(_freeze, node)),
        ]
    for node, link in zip(fleet.of("engine"), fleet.links, strict=True):
        found += [
            ("cut link", node.name, partial(_cut, link)),
            ("hold link", node.name, partial(_hold, link)),
            ("slow link", node.name, partial(_slow, link)),
        ]
    for node in fleet.of("grammar"):
        found += [
            ("kill grammar", "grammar", partial(_kill, node)),
            ("drain grammar", "grammar", partial(_drain, node)),
            ("freeze grammar", "grammar", partial(_freeze, node)),
        ]
    for node in fleet.of("tokenizer"):
        found += [
            ("kill tokenizer", "tokenizer", partial(_kill, node)),
            ("drain tokenizer", "tokenizer", partial(_drain, node)),
            ("freeze tokenizer", "tokenizer", partial(_freeze, node)),
        ]
    for node in fleet.of("http_shim"):
        found.append(("drain http_shim", "http_shim", partial(_drain, node)))
    return found


async def _kill(node: Node) -> None:
    node.send(signal.SIGKILL)
    await node.start_again()


async def _kill_loop(node: Node) -> None:
    node.kill_loop()
    await node.start_again()


async def _drain(node: Node) -> None:
    node.send(signal.SIGTERM)
    await node.start_again()


async def _freeze(node: Node) -> None:
    node.send(signal.SIGSTOP)
    await asyncio.sleep(_FROZEN_SECONDS)
    node.send(signal.SIGCONT)
    await node.until_ready()


async def _cut(link: Link) -> None:
    link.cut()


async def _hold(link: Link) -> None:
    link.hold()
    await asyncio.sleep(_FROZEN_SECONDS)
    link.release()


async def _slow(link: Link) -> None:
    link.delay = 0.05
    await asyncio.sleep(_SLOW_SECONDS)
    link.delay = 0.0


def main() -> int:
    """Run the command. Return 1 if an answer was lost, doubled or changed, or a block leaked."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", type=Path, default=embedded_checkpoint())
    parser.add_argument("--faults", type=int, default=500)
    parser.add_argument("--streams", type=int, default=24)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--logs", type=Path, help="directory of the services' logs")
    arguments = parser.parse_args()
    logs = arguments.logs or Path(tempfile.mkdtemp(prefix="tokenwire-chaos-"))
    logs.mkdir(parents=True, exist_ok=True)
    report = asyncio.run(
        chaos(
            arguments.model,
            logs,
            faults=arguments.faults,
            seed=arguments.seed,
            streams=arguments.streams,
        )
    )
    print(json.dumps({each.name: getattr(report, each.name) for each in fields(report)}, indent=1))
    return int(bool(report.differences or report.leaks))


if __name__ == "__main__":
    sys.exit(main())
