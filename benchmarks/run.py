"""Measure Tokenwire and its peers in turn, on the same checkpoint, machine and prompts.

    python -m benchmarks.run --model bench-models/bench-350m --scenarios S1,S8,S32 --against vllm

Machines are noisy: only ratios taken in one run count. `--rounds 2` goes round all servers twice;
the median of all measurements of a scenario is what the table shows.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import socket
import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path

import psutil
import uvloop
from tokenizers import Tokenizer

from benchmarks.load import Measurement, Target, describe, measure, served_model, warm_up
from benchmarks.peers import PEERS, Server, Tokenwire
from benchmarks.processes import ProcessTree, ServerError, running
from benchmarks.prompts import Prompts, vocabulary_size
from benchmarks.scenarios import SCENARIOS, Scenario

RESULTS = Path(__file__).parent / "results"


@dataclass(frozen=True, slots=True)
class Machine:
    cpu: str
    cores: int
    memory_gib: float
    system: str

    @classmethod
    def this(cls) -> Machine:
        memory = psutil.virtual_memory().total / 2**30
        return cls(
            _cpu_model(),
            os.cpu_count() or 1,
            round(memory, 1),
            f"{platform.system()} {platform.machine()}",
        )


@dataclass(frozen=True, slots=True)
class Run:
    """What is written to `benchmarks/results`: everything needed to read the figures later."""

    date: str
    machine: Machine
    model: str
    seed: str
    versions: Mapping[str, Mapping[str, str]]
    scenarios: Sequence[Scenario]
    measurements: Mapping[str, Sequence[Measurement]]
    """By server, in the order in which they were taken."""

    def save(self, directory: Path) -> Path:
        directory.mkdir(parents=True, exist_ok=True)
        path = directory / f"{self.date.replace(':', '')}-{self.model}.json"
        path.write_text(json.dumps(asdict(self), indent=1, default=lambda kind: kind.value) + "\n")
        return path

    def figure(self, server: str, scenario: Scenario) -> float | None:
        """The median of what was measured."""
        figures = [
            figure
            for measurement in self.measurements[server]
            if measurement.scenario == scenario.name and not measurement.errors
            if (figure := measurement.figure(scenario.figure)) is not None
        ]
        return statistics.median(figures) if figures else None


def table(run: Run) -> str:
    """One row a scenario: each server's figure, and the first server's against the best other."""
    first, *others = run.measurements
    header = ["scenario", "figure", first, *others]
    if others:
        header.append(f"{first} / best other")
    rows = [header]
    for scenario in run.scenarios:
        own = run.figure(first, scenario)
        theirs = [run.figure(other, scenario) for other in others]
        row = [scenario.name, scenario.figure.value, _number(own), *map(_number, theirs)]
        if others:
            known = [figure for figure in theirs if figure is not None]
            best = max if scenario.figure.higher_is_better else min
            row.append(f"{own / best(known):.2f}" if own is not None and known else "-")
        rows.append(row)
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = [
        "| " + " | ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) + " |"
        for row in rows
    ]
    lines.insert(1, "|" + "|".join("-" * (width + 2) for width in widths) + "|")
    return "\n".join(lines)


def _number(figure: float | None) -> str:
    if figure is None:
        return "-"
    return f"{figure:.0f}" if figure >= 100 else f"{figure:.3g}"


@contextmanager
def started(server: Server, arguments: argparse.Namespace) -> Iterator[tuple[Target, ProcessTree]]:
    """A server on a free port of this machine, stopped at the end."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    launch = server.launch(server.install(arguments.cache), arguments.model, port)
    began = time.monotonic()
    with running(launch, arguments.cache / "logs" / f"{server.name}.log") as tree:
        print(f"{server.name}: ready after {time.monotonic() - began:.0f} s", flush=True)
        name = server.served_name(arguments.model)
        yield Target(launch.url, name, server.fields, server.text_prompts), tree


@contextmanager
def already_running(arguments: argparse.Namespace) -> Iterator[tuple[Target, ProcessTree | None]]:
    """Tokenwire as it runs at `--url`."""
    tree = ProcessTree(arguments.pid) if arguments.pid else None
    yield Target(arguments.url, uvloop.run(served_model(arguments.url))), tree


async def measure_all(
    target: Target,
    tree: ProcessTree | None,
    scenarios: Sequence[Scenario],
    arguments: argparse.Namespace,
    seed: str,
) -> list[Measurement]:
    """All scenarios, each `--repeat` times; `seed` is what makes prompts new."""
    vocabulary = vocabulary_size(arguments.model)
    tokenizer = None
    if target.text_prompts:
        tokenizer = Tokenizer.from_file(str(arguments.model / "tokenizer.json"))
    measurements = []
    for scenario in scenarios:
        await warm_up(target, scenario, Prompts(vocabulary, f"{seed} warm-up", tokenizer))
        for repetition in range(arguments.repeat):
            prompts = Prompts(vocabulary, f"{seed} {repetition}", tokenizer)
            measurements.append(await measure(target, scenario, prompts, tree))
            print(describe(measurements[-1]), flush=True)
    return measurements


def _cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.machine())


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.run",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--model", type=Path, required=True, help="a Hugging Face directory")
    parser.add_argument("--scenarios", default="S1,S8,S32", help=f"of {', '.join(SCENARIOS)}")
    parser.add_argument("--against", default="", help=f"peers, of {', '.join(PEERS)}")
    parser.add_argument("--url", help="measure the Tokenwire that runs here, rather than start one")
    parser.add_argument("--pid", type=int, help="with --url: its supervisor, for CPU and memory")
    parser.add_argument("--repeat", type=int, default=2, help="measurements in a row")
    parser.add_argument("--rounds", type=int, default=1, help="times round all servers")
    parser.add_argument("--seed", default=f"{time.time_ns()}", help="of the prompts")
    parser.add_argument("--cache", type=Path, default=Path.home() / ".cache" / "tokenwire-bench")
    parser.add_argument("--results", type=Path, default=RESULTS)
    return parser.parse_args()


def main() -> None:
    arguments = _arguments()
    arguments.model = arguments.model.resolve()
    scenarios = [SCENARIOS[name] for name in arguments.scenarios.split(",")]
    servers: list[Server] = [Tokenwire()]
    servers += [PEERS[name]() for name in arguments.against.split(",") if name]
    measurements: dict[str, list[Measurement]] = {server.name: [] for server in servers}
    for round_number in range(arguments.rounds):
        for server in servers:
            remote = arguments.url and isinstance(server, Tokenwire)
            place = already_running(arguments) if remote else started(server, arguments)
            seed = f"{arguments.seed} {round_number}"
            try:
                with place as (target, tree):
                    measurements[server.name] += uvloop.run(
                        measure_all(target, tree, scenarios, arguments, seed)
                    )
            except ServerError as error:
                print(f"{server.name}: {error}", flush=True)
    run = Run(
        date=datetime.now(UTC).isoformat(timespec="seconds"),
        machine=Machine.this(),
        model=arguments.model.name,
        seed=arguments.seed,
        versions={
            server.name: server.versions(server.install(arguments.cache))
            for server in servers
            if measurements[server.name]
        },
        scenarios=scenarios,
        measurements=measurements,
    )
    print(f"\n{table(run)}\n\nwritten to {run.save(arguments.results)}")


if __name__ == "__main__":
    main()
