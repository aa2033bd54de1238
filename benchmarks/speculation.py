"""Speedup of `--speculate ngram`: the same prompts with and without it, in this process, in turn.

    python -m benchmarks.speculation --model models/tokenwire-code-6m

Editing and extraction repeat much of their prompt. S1, S8 and S32 have random prompts. At
temperature 1 their output does not repeat, so that speculation only costs time. The greedy output
of random weights, and of very small models, soon repeats itself whatever the prompt.
"""

from __future__ import annotations

import argparse
import os
import random
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from tokenizers import Tokenizer

from benchmarks.prompts import Prompts, vocabulary_size
from benchmarks.results import RESULTS, Machine, now, save
from benchmarks.scenarios import SCENARIOS
from benchmarks.tables import markdown
from services.engine.frontend.child_process import limit_thread_spinning
from tokenwire.load.workloads import ClosedLoop

SOURCES = ("scenarios", "prompts", "results", "tables")
"""Modules of this folder that are the editing prompts' sources"""
REQUESTS, OUTPUT, CACHE_TOKENS = 4, 128, 32_000


@dataclass(frozen=True, slots=True)
class Task:
    name: str
    streams: int
    output: int
    prompts: Sequence[Sequence[int]]
    temperature: float = 0.0


@dataclass(frozen=True, slots=True)
class Gain:
    task: str
    streams: int
    plain: float
    """Median output tokens per second without speculation"""
    speculating: float


@dataclass(frozen=True, slots=True)
class SpeculationReport:
    date: str
    machine: Machine
    model: str
    load_average: float
    gains: Sequence[Gain]


def editing_prompt(source: str) -> str:
    """Return a file, and the beginning of the same file with one name changed."""
    edited = source.replace("name", "title")
    return f"{source}\n\n# The same with `title` in place of `name`:\n{edited[: len(edited) // 4]}"


def extraction_prompt(seed: int) -> str:
    """Return records, and the beginning of a list that repeats them."""
    rng = random.Random(seed)
    records = [
        f'    {{"name": "item-{rng.randrange(1000)}", "price": {rng.randrange(500)}, '
        f'"stock": {rng.randrange(50)}}},\n'
        for _ in range(24)
    ]
    return f"RECORDS = [\n{''.join(records)}]\n\nFIRST = [\n{''.join(records[:3])}"


def tasks(model: Path, seed: str) -> list[Task]:
    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    folder = Path(__file__).parent
    texts = {
        "editing": [editing_prompt((folder / f"{name}.py").read_text()[:2500]) for name in SOURCES],
        "extraction": [extraction_prompt(number) for number in range(REQUESTS)],
    }
    found = [
        Task(name, streams, OUTPUT, [tokenizer.encode(prompt).ids for prompt in prompts])
        for name, prompts in texts.items()
        for streams in (1, 4)
    ]
    fresh = Prompts(vocabulary_size(model), seed)
    for name in ("S1", "S8", "S32"):
        (workload,) = SCENARIOS[name].workloads
        assert isinstance(workload.arrivals, ClosedLoop)
        some = islice(fresh.of(workload), workload.requests)
        ids = [prompt for prompt in some if isinstance(prompt, list)]
        streams = workload.arrivals.concurrency
        found += [
            Task(name, streams, workload.output, ids),
            Task(f"{name}, temperature 1", streams, workload.output, ids, temperature=1.0),
        ]
    return found


def measure(model: Path, seed: str, rounds: int) -> list[Gain]:
    """Every task with and without, in turn."""
    from benchmarks.engine import MeasuredEngine  # torch, which reads the environment once

    engines = [
        MeasuredEngine(model, "bfloat16", CACHE_TOKENS, speculate) for speculate in (False, True)
    ]
    gains = []
    for task in tasks(model, seed):
        rates: tuple[list[float], list[float]] = ([], [])
        for _ in range(rounds):
            for engine, mine in zip(engines, rates, strict=True):
                engine.flush_cache()
                tokens, seconds = engine.complete(
                    task.prompts, task.streams, task.output, task.temperature
                )
                mine.append(tokens / seconds)
        plain, speculating = (round(statistics.median(mine), 1) for mine in rates)
        gains.append(Gain(task.name, task.streams, plain, speculating))
    return gains


def describe(report: SpeculationReport) -> str:
    rows = [["task", "streams", "tokens/s without", "with", "ratio"]]
    rows += [
        [
            gain.task,
            f"{gain.streams}",
            f"{gain.plain:.0f}",
            f"{gain.speculating:.0f}",
            f"{gain.speculating / gain.plain:.2f} ×",
        ]
        for gain in report.gains
    ]
    return f"{report.model}, load average {report.load_average:.1f}\n\n{markdown(rows)}"


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.speculation",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--model", type=Path, required=True, help="a Hugging Face directory")
    parser.add_argument("--rounds", type=int, default=3, help="runs of each task")
    parser.add_argument("--seed", default=f"{time.time_ns()}", help="seed of the random prompts")
    parser.add_argument("--results", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    limit_thread_spinning()
    load_average = os.getloadavg()[0]
    model = arguments.model.resolve()
    report = SpeculationReport(
        date=now(),
        machine=Machine.this(),
        model=model.name,
        load_average=round(load_average, 2),
        gains=measure(model, arguments.seed, arguments.rounds),
    )
    path = save(report, arguments.results, f"{report.date}-speculation-{report.model}")
    print(f"{describe(report)}\n\nwritten to {path}")


if __name__ == "__main__":
    main()
