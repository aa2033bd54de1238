"""A rolling restart: each service of a fleet in turn, under streams of all kinds.

python -m tests.faults.rolling --times 3
"""

import argparse
import asyncio
import random
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import httpx

from tests.faults.fleet import Node, running_fleet
from tests.faults.workload import Answer, Asked, ask, difference, is_tie, requests
from tokenwire.serving.stack_layout import embedded_checkpoint

__all__ = ["Restart", "roll"]

_TOKENS = 150
_STREAM_SECONDS = 180.0


@dataclass(slots=True)
class Restart:
    """Answers and pauses of the clients while one service was restarted."""

    name: str
    """The service; "none" for the time before"""
    seconds: float = 0.0
    """From the signal until the service serves again"""
    answers: int = 0
    failures: list[str] = field(default_factory=list)
    suspects: list[tuple[Asked, Answer, Answer]] = field(default_factory=list)
    """Requests whose answer differs, with the answer and the undisturbed one"""
    changed: int = 0
    ties: int = 0
    """Answers that part from the undisturbed one at a draw between two tokens"""
    pauses: list[float] = field(default_factory=list)
    """The longest pause of each stream, in seconds"""


async def roll(
    model: Path,
    logs: Path,
    *,
    engines: int = 2,
    streams: int = 16,
    times: int = 1,
    seed: int = 1,
    wanted: int = 40,
    calm: float = 5.0,
) -> list[Restart]:
    """Restart each service by SIGTERM while this many streams run; return what clients saw.

    wanted: number of different requests, which the streams repeat. calm: seconds of streams before
    the first restart.
    """
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
    async with (
        running_fleet(model, logs, engines) as fleet,
        httpx.AsyncClient(timeout=_STREAM_SECONDS, limits=limits, trust_env=False) as http,
    ):
        clients = _Clients(http, fleet.urls, requests(wanted, _TOKENS, seed), seed)
        await clients.prepare()
        restarts = [Restart("none")]
        async with clients.running(streams, restarts[0]):
            await asyncio.sleep(calm)
        for node in [*fleet.nodes] * times:
            restart = next((each for each in restarts if each.name == node.name), None)
            if restart is None:
                restart = Restart(node.name)
                restarts.append(restart)
            async with clients.running(streams, restart):
                await _restart(node, restart)
        for restart in restarts:
            await clients.judge(restart)
        leaks = await fleet.leaks()
        assert not leaks, leaks
    return restarts


async def _restart(node: Node, restart: Restart) -> None:
    began = time.monotonic()
    node.send(signal.SIGTERM)
    await node.start_again()
    restart.seconds = max(restart.seconds, time.monotonic() - began)


class _Clients:
    """Clients that repeat requests whose undisturbed answers are known."""

    def __init__(
        self, http: httpx.AsyncClient, urls: Sequence[str], wanted: Sequence[Asked], seed: int
    ) -> None:
        self._http = http
        self._urls = urls
        self._wanted = wanted
        self._calm: list[Answer] = []
        self._chance = random.Random(seed)

    async def prepare(self) -> None:
        """Get the undisturbed answers."""
        self._calm = [await ask(self._http, self._urls, asked) for asked in self._wanted]
        failures = [answer.failure for answer in self._calm if answer.failure]
        assert not failures, failures

    @asynccontextmanager
    async def running(self, streams: int, restart: Restart) -> AsyncIterator[None]:
        """Keep this many streams running in the `with` block, and let them end after it."""
        over = asyncio.Event()
        clients = [asyncio.ensure_future(self._repeat(over, restart)) for _ in range(streams)]
        try:
            yield
        finally:
            over.set()
            await asyncio.gather(*clients)

    async def _repeat(self, over: asyncio.Event, restart: Restart) -> None:
        while not over.is_set():
            number = self._chance.randrange(len(self._wanted))
            urls = self._chance.sample(self._urls, len(self._urls))
            asked, calm = self._wanted[number], self._calm[number]
            answer = await ask(self._http, urls, asked)
            restart.answers += 1
            restart.pauses.append(answer.longest_pause)
            if answer.failure:
                restart.failures.append(f"{asked.kind}: {answer.failure}")
            elif difference(answer, calm):
                restart.suspects.append((asked, answer, calm))

    async def judge(self, restart: Restart) -> None:
        """Tell ties from answers that the restart changed."""
        for asked, answer, calm in restart.suspects:
            if await is_tie(self._http, self._urls, asked, answer, calm):
                restart.ties += 1
            else:
                restart.changed += 1


def _row(restart: Restart) -> str:
    pauses = sorted(restart.pauses)
    return (
        f"| {restart.name} | {restart.seconds:.1f} s | {restart.answers} "
        f"| {len(restart.failures)} | {restart.changed} | {restart.ties} "
        f"| {statistics.median(pauses):.2f} s | {pauses[-1]:.2f} s |"
    )


def main() -> int:
    """Run the command. Return 1 if an answer failed or was changed."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", type=Path, default=embedded_checkpoint())
    parser.add_argument("--engines", type=int, default=2)
    parser.add_argument("--streams", type=int, default=16)
    parser.add_argument("--times", type=int, default=1, help="restarts of each service")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--logs", type=Path, help="directory of the services' logs")
    arguments = parser.parse_args()
    logs = arguments.logs or Path(tempfile.mkdtemp(prefix="tokenwire-rolling-"))
    logs.mkdir(parents=True, exist_ok=True)
    restarts = asyncio.run(
        roll(
            arguments.model,
            logs,
            engines=arguments.engines,
            streams=arguments.streams,
            times=arguments.times,
            seed=arguments.seed,
        )
    )
    print(
        "| restarted | until it serves | answers | failed | changed | ties | pause, median | most |"
    )
    print("|---|---|---|---|---|---|---|---|")
    for restart in restarts:
        print(_row(restart))
    for why in sorted({why for restart in restarts for why in restart.failures}):
        print(why, file=sys.stderr)
    return int(any(restart.failures or restart.changed for restart in restarts))


if __name__ == "__main__":
    sys.exit(main())
