"""Requests of many kinds on an engine with few KV blocks; answers must be those of an idle one.

python -m tests.faults.crowding --answers 3000 --seed 1
"""

import argparse
import asyncio
import json
import random
import re
import sys
import tempfile
from collections import Counter
from dataclasses import dataclass, field, fields
from pathlib import Path

import httpx

from tests.faults.fleet import Node, running_fleet
from tests.faults.workload import (
    KINDS,
    OTHER_KINDS,
    Answer,
    Asked,
    ask,
    difference,
    is_tie,
    requests,
)
from tokenwire.serving.stack_layout import embedded_checkpoint

__all__ = ["Report", "crowd"]

_STREAMS = 32
"""Streams at a time"""
_REQUESTS = 130
"""Different requests, which are repeated"""
_TOKENS = 120
_KV_MEMORY = "12MiB"
"""Room for about 2,400 tokens, of the 5,800 that these streams have at their ends"""
_STREAM_SECONDS = 300.0
_METRICS_OFFSET = 1000
"""Added to the port of gRPC"""


@dataclass(slots=True)
class Report:
    """Answers, and what was wrong with them."""

    seed: int
    answers: Counter[str] = field(default_factory=Counter)
    """Answers by kind that equal those of an idle engine"""
    ties: list[str] = field(default_factory=list)
    """Answers that parted at a draw between two tokens"""
    differences: list[str] = field(default_factory=list)
    """Answers that differ otherwise"""
    preemptions: int = 0


async def crowd(model: Path, logs: Path, *, answers: int, seed: int) -> Report:
    """Ask for each answer alone, and then for this many of them side by side."""
    report = Report(seed)
    wanted = requests(min(_REQUESTS, answers), _TOKENS, seed, {**KINDS, **OTHER_KINDS})
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
    async with (
        running_fleet(model, logs, engines=1, kv_memory=_KV_MEMORY) as fleet,
        httpx.AsyncClient(timeout=_STREAM_SECONDS, limits=limits, trust_env=False) as http,
    ):
        calm = [await ask(http, fleet.urls, asked) for asked in wanted]
        assert not any(answer.failure for answer in calm), [a.failure for a in calm if a.failure]
        numbers = [number % len(wanted) for number in range(answers)]
        random.Random(seed).shuffle(numbers)
        suspects: list[tuple[Asked, Answer, Answer]] = []

        async def client() -> None:
            while numbers:
                number = numbers.pop()
                answer = await ask(http, fleet.urls, wanted[number])
                if difference(answer, calm[number]):
                    suspects.append((wanted[number], answer, calm[number]))
                else:
                    report.answers[wanted[number].kind] += 1

        await asyncio.gather(*(client() for _ in range(_STREAMS)))
        for asked, answer, undisturbed in suspects:
            tie = await is_tie(http, fleet.urls, asked, answer, undisturbed)
            text = f"{asked.kind}, seed {asked.body['seed']}: {difference(answer, undisturbed)}"
            (report.ties if tie else report.differences).append(text)
        report.preemptions = await _preemptions(http, fleet.of("engine")[0])
    return report


async def _preemptions(http: httpx.AsyncClient, engine: Node) -> int:
    host, port = engine.target.split(":")
    metrics = (await http.get(f"http://{host}:{int(port) + _METRICS_OFFSET}/metrics")).text
    counts = re.findall(r"^tokenwire_engine_preemptions_total\S* (\S+)$", metrics, re.MULTILINE)
    return int(sum(map(float, counts)))


def main() -> int:
    """Run the command. Return 1 if an answer differs."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", type=Path, default=embedded_checkpoint())
    parser.add_argument("--answers", type=int, default=3000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--logs", type=Path, help="directory of the services' logs")
    arguments = parser.parse_args()
    logs = arguments.logs or Path(tempfile.mkdtemp(prefix="tokenwire-crowding-"))
    logs.mkdir(parents=True, exist_ok=True)
    report = asyncio.run(
        crowd(arguments.model, logs, answers=arguments.answers, seed=arguments.seed)
    )
    print(json.dumps({each.name: getattr(report, each.name) for each in fields(report)}, indent=1))
    return int(bool(report.differences))


if __name__ == "__main__":
    sys.exit(main())
