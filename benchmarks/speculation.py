"""Speedup of draft tokens: the same prompts without them, by n-grams and by a draft model.

    python -m benchmarks.speculation --model models/tokenwire-code-6m
    python -m benchmarks.speculation --model MODEL --draft SMALLER

The variants are engines in this process, which compute a step each in turn. Editing and extraction
repeat much of their prompt; questions do not. The output behind random prompts does not repeat at
temperature 1, so that speculation only costs time. The greedy output of random weights, and of very
small models, soon repeats itself whatever the prompt.
"""

from __future__ import annotations

import argparse
import os
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice, zip_longest
from pathlib import Path
from typing import TYPE_CHECKING

from tokenizers import Tokenizer

from benchmarks.prompts import Prompts, vocabulary_size
from benchmarks.results import RESULTS, Machine, now, save
from benchmarks.tables import markdown
from services.common.model_files.checkpoint import opened_checkpoint
from services.engine.frontend.child_process import limit_thread_spinning
from tokenwire.load.workloads import ClosedLoop, Workload

if TYPE_CHECKING:
    from benchmarks.engine import MeasuredEngine

SOURCES = ("scenarios", "prompts", "results", "tables")
"""Modules of this folder that are the editing prompts' sources"""
REQUESTS, OUTPUT, CACHE_TOKENS = 4, 128, 32_000
QUESTION_STREAMS, RANDOM_STREAMS = (1, 4, 16, 64), (1, 8, 64)
TOPICS = (
    *("the water cycle", "photosynthesis", "a bicycle's gears", "the moon's phases"),
    *("how bread rises", "the French Revolution", "supply and demand", "a heat pump"),
    *("vaccines", "tides", "how planes fly", "the Roman roads", "volcanoes", "compound interest"),
    *("a search engine", "bees"),
)


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
    """Output tokens per second without speculation"""
    ngrams: float
    """Output tokens per second with n-grams"""
    draft: float | None
    """Output tokens per second with the draft model; None = there is none"""
    accepted: float | None
    """Draft tokens of the draft model that were accepted in a step, for each of its drafts"""


@dataclass(frozen=True, slots=True)
class SpeculationReport:
    date: str
    machine: Machine
    model: str
    draft: str | None
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


def questions(count: int) -> list[str]:
    """Return questions, each of them another one."""
    words = [100 + 50 * number for number in range(-(-count // len(TOPICS)))]
    asked = [f"Explain {topic} in {number} words." for number in words for topic in TOPICS]
    turns = "<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n"
    return [turns.format(each) for each in asked[:count]]


def tasks(model: Path, seed: str) -> list[Task]:
    """Return the tasks. model: directory of a checkpoint."""
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
    for streams in QUESTION_STREAMS:
        asked = [tokenizer.encode(each).ids for each in questions(max(streams, REQUESTS))]
        found.append(Task("questions", streams, OUTPUT, asked))
    fresh = Prompts(vocabulary_size(model), seed)
    for streams in RANDOM_STREAMS:
        workload = Workload("streams", ClosedLoop(streams), 128, 64, None)
        some = islice(fresh.of(workload), max(streams, REQUESTS))
        ids = [prompt for prompt in some if isinstance(prompt, list)]
        found += [
            Task("random", streams, workload.output, ids),
            Task("random, temperature 1", streams, workload.output, ids, temperature=1.0),
        ]
    return found


def measure(
    model: Path, draft: Path | None, weights: str, seed: str, rounds: int, names: str
) -> list[Gain]:
    """Every task with each variant, in turn. names: beginning of the tasks' names."""
    from benchmarks.engine import MeasuredEngine  # torch, which reads the environment once

    variants: list[tuple[bool, Path | None]] = [(False, None), (True, None)]
    if draft is not None:
        variants.append((False, draft))
    engines = [
        MeasuredEngine(model, "auto", CACHE_TOKENS, speculate, weights, draft=path)
        for speculate, path in variants
    ]
    with opened_checkpoint(model) as directory:
        wanted = [task for task in tasks(directory, seed) if task.name.startswith(names)]
    gains = []
    for task in wanted:
        before = _drafts(engines[-1])
        plain, ngrams, *modelled = _rates(engines, task, rounds)
        accepted = None
        if modelled:
            drafts, tokens = (
                now - then for now, then in zip(_drafts(engines[-1]), before, strict=True)
            )
            accepted = round(tokens / drafts, 2) if drafts else 0.0
        made = modelled[0] if modelled else None
        gains.append(Gain(task.name, task.streams, plain, ngrams, made, accepted))
        print(_row(gains[-1]), flush=True)
    return gains


def _rates(engines: Sequence[MeasuredEngine], task: Task, rounds: int) -> list[float]:
    """Return the output tokens per second of each engine while all streams run.

    The engines compute a step each in turn, so that other programs disturb all alike. Requests have
    outputs of different lengths: with equal ones, streams without drafts would begin together.
    """
    tokens, seconds = [0] * len(engines), [0.0] * len(engines)
    for turn in range(rounds):
        rng = random.Random(turn)
        lengths = (task.output // 2, 3 * task.output // 2)
        requests = [(prompt, rng.randint(*lengths)) for prompt in (*task.prompts, *task.prompts)]
        for engine in engines:
            engine.flush_cache()
        loops = [each.completing(requests, task.streams, task.temperature) for each in engines]
        for steps in zip_longest(*loops):
            for index, step in enumerate(steps):
                if step is not None and step.is_full:
                    tokens[index] += step.tokens
                    seconds[index] += step.seconds
    return [round(count / took, 1) for count, took in zip(tokens, seconds, strict=True)]


def _drafts(engine: MeasuredEngine) -> tuple[int, int]:
    """Return the number of drafts of the draft model or head so far, and their accepted tokens."""
    counts = engine.loaded.steps.take_output().load.drafts
    mine = [count for count in counts if count.source not in ("ngram", "prediction")]
    return sum(each.drafts for each in mine), sum(each.accepted for each in mine)


def _row(gain: Gain) -> list[str]:
    row = [gain.task, f"{gain.streams}", f"{gain.plain:.0f}", f"{gain.ngrams / gain.plain:.2f} ×"]
    if gain.draft is not None:
        row += [f"{gain.draft / gain.plain:.2f} ×", f"{gain.accepted:.1f}"]
    return row


def describe(report: SpeculationReport) -> str:
    names = ["task", "streams", "tokens/s without", "n-grams"]
    if report.draft is not None:
        names += ["draft model", "tokens accepted of a draft"]
    rows = [names, *map(_row, report.gains)]
    models = report.model if report.draft is None else f"{report.model} with {report.draft}"
    return f"{models}, load average {report.load_average:.1f}\n\n{markdown(rows)}"


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.speculation",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--model", type=Path, required=True, help="a directory or a GGUF file")
    parser.add_argument("--draft", type=Path, help="the draft model, in the same forms")
    parser.add_argument("--weights", default="full", help="--weights of the engines")
    parser.add_argument("--tasks", default="", help="beginning of the names of the tasks to run")
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
        draft=None if arguments.draft is None else arguments.draft.name,
        load_average=round(load_average, 2),
        gains=measure(
            model,
            arguments.draft,
            arguments.weights,
            arguments.seed,
            arguments.rounds,
            arguments.tasks,
        ),
    )
    path = save(report, arguments.results, f"{report.date}-speculation-{report.model}")
    print(f"{describe(report)}\n\nwritten to {path}")


if __name__ == "__main__":
    main()
