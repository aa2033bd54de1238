"""Comparison of Tokenwire and its peers on the same checkpoint, machine and prompts.

    python -m benchmarks.run --model ~/.cache/tokenwire-bench/models/bench-350m --against vllm

Machines are noisy, so compare only ratios of one run. `--rounds 2` measures every server twice, in
turn. The table shows the median of a scenario's measurements. The exit code is 1 if one of
Tokenwire's requests failed or had a wrong number of tokens.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import uvloop
from tokenizers import Tokenizer

from benchmarks import CACHE
from benchmarks.load import Measurement, describe, measure, served_model, warm_up
from benchmarks.peers import PEERS, Server, Tokenwire
from benchmarks.plot import BarChart, bar_chart
from benchmarks.processes import ProcessTree, ServerError, free_port, running
from benchmarks.prompts import Prompts, vocabulary_size
from benchmarks.results import RESULTS, Machine, now, save
from benchmarks.scenarios import SCENARIOS, Scenario
from benchmarks.tables import markdown, number
from tokenwire.load.load_run import Target


@dataclass(frozen=True, slots=True)
class Run:
    """The figures of a run with all their conditions, as saved in `benchmarks/results`."""

    date: str
    machine: Machine
    model: str
    seed: str
    tokenwire_args: str
    versions: Mapping[str, Mapping[str, str]]
    scenarios: Sequence[Scenario]
    measurements: Mapping[str, Sequence[Measurement]]
    """Measurements by server, in order of time"""

    def figure(self, server: str, scenario: Scenario) -> float | None:
        """Return the median figure of a server, or None if no measurement is without errors."""
        figures = [
            figure
            for measurement in self.measurements[server]
            if measurement.scenario == scenario.name and not measurement.errors
            if (figure := measurement.figure(scenario.figure)) is not None
        ]
        return statistics.median(figures) if figures else None

    def relative(self, scenario: Scenario) -> Mapping[str, float]:
        """Return each server's figure relative to the best peer; higher is better.

        The first server is Tokenwire, and the others are its peers.
        """
        figures = {server: self.figure(server, scenario) for server in self.measurements}
        if not scenario.figure.higher_is_better:
            figures = {server: 1 / figure for server, figure in figures.items() if figure}
        known = {server: figure for server, figure in figures.items() if figure}
        first = next(iter(self.measurements))
        best = max((figure for server, figure in known.items() if server != first), default=None)
        return {server: figure / best for server, figure in known.items()} if best else {}

    @property
    def failures(self) -> list[str]:
        """The first server's failed requests and wrong output lengths, with their counts."""
        first = next(iter(self.measurements))
        return [
            f"{measurement.scenario}, {workload}: {count} × {error}"
            for measurement in self.measurements[first]
            for workload, report in measurement.workloads.items()
            for error, count in report.errors.items()
        ]


def table(run: Run) -> str:
    """Return one row per scenario: each server's figure, and the first's ratio to the best peer."""
    first, *others = run.measurements
    rows = [["scenario", "figure", first, *others] + [f"{first} against the best"] * bool(others)]
    for scenario in run.scenarios:
        figures = [number(run.figure(server, scenario)) for server in run.measurements]
        row = [scenario.name, scenario.figure.value, *figures]
        if others:
            ratio = run.relative(scenario).get(first)
            row.append(f"{ratio:.2f} ×" if ratio else "-")
        rows.append(row)
    return markdown(rows)


def against_baseline(run: Run) -> str:
    """Return the ratio of each scenario's figure to its baseline's, for those with a baseline."""
    rows = [["scenario", *run.measurements]]
    for scenario in run.scenarios:
        if scenario.baseline is not None:
            baseline = SCENARIOS[scenario.baseline]
            row = [f"{scenario.name} / {baseline.name}"]
            for server in run.measurements:
                with_it, without = run.figure(server, scenario), run.figure(server, baseline)
                row.append(f"{with_it / without:.2f}" if with_it and without else "-")
            rows.append(row)
    return markdown(rows) if len(rows) > 1 else ""


def chart(run: Run) -> str:
    """Return an SVG of `Run.relative`."""
    _, *others = run.measurements
    return bar_chart(
        BarChart(
            title=f"{run.model}: speed relative to the best of {', '.join(others)}",
            subtitle=f"{run.date[:10]}, {run.machine.cpu}, {run.machine.cores} cores; "
            "higher is better",
            series=list(run.measurements),
            groups={scenario.name: run.relative(scenario) for scenario in run.scenarios},
        )
    )


@contextmanager
def started(server: Server, arguments: argparse.Namespace) -> Iterator[tuple[Target, ProcessTree]]:
    """Start a server on a free port, and stop it at the end."""
    launch = server.launch(server.install(arguments.cache), arguments.model, free_port())
    began = time.monotonic()
    with running(launch, arguments.cache / "logs" / f"{server.name}.log") as tree:
        print(f"{server.name}: ready after {time.monotonic() - began:.0f} s", flush=True)
        name = server.served_name(arguments.model)
        yield Target(launch.url, name, server.fields, server.text_prompts), tree


@contextmanager
def already_running(arguments: argparse.Namespace) -> Iterator[tuple[Target, ProcessTree | None]]:
    """Yield the Tokenwire that already runs at `--url`."""
    tree = ProcessTree(arguments.pid) if arguments.pid else None
    yield Target(arguments.url, uvloop.run(served_model(arguments.url))), tree


async def measure_all(
    target: Target,
    tree: ProcessTree | None,
    scenarios: Sequence[Scenario],
    arguments: argparse.Namespace,
    seed: str,
) -> list[Measurement]:
    """Measure all scenarios, each `--repeat` times. A new `seed` gives new prompts."""
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


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.run",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--model", type=Path, required=True, help="a Hugging Face directory")
    parser.add_argument("--scenarios", default="S1,S8,S32", help=f"some of {', '.join(SCENARIOS)}")
    parser.add_argument("--against", default="", help=f"some of {', '.join(PEERS)}; or: installed")
    parser.add_argument("--tokenwire-args", default="", help="further flags of Tokenwire's engine")
    parser.add_argument("--url", help="measure the Tokenwire at this URL instead of starting one")
    parser.add_argument("--pid", type=int, help="with --url: its root process, for CPU and memory")
    parser.add_argument("--repeat", type=int, default=2, help="measurements per round")
    parser.add_argument("--rounds", type=int, default=1, help="rounds over all servers")
    parser.add_argument("--seed", default=f"{time.time_ns()}", help="seed of the prompts")
    parser.add_argument("--cache", type=Path, default=CACHE)
    parser.add_argument("--results", type=Path, default=RESULTS)
    return parser.parse_args()


def chosen_scenarios(names: str) -> list[Scenario]:
    """Return the named scenarios and their baselines."""
    scenarios: dict[str, Scenario] = {}
    for name in names.split(","):
        scenario = SCENARIOS[name]
        if scenario.baseline is not None:
            scenarios[scenario.baseline] = SCENARIOS[scenario.baseline]
        scenarios[name] = scenario
    return list(scenarios.values())


def chosen_peers(names: str, cache: Path) -> list[Server]:
    if names == "installed":
        return [peer for kind in PEERS.values() if (peer := kind()).is_installed(cache)]
    return [PEERS[name]() for name in names.split(",") if name]


def main() -> None:
    arguments = _arguments()
    arguments.model = arguments.model.resolve()
    scenarios = chosen_scenarios(arguments.scenarios)
    servers: list[Server] = [Tokenwire(arguments.tokenwire_args)]
    servers += chosen_peers(arguments.against, arguments.cache)
    measurements: dict[str, list[Measurement]] = {server.name: [] for server in servers}
    for round_number in range(arguments.rounds):
        for server in servers:
            remote = arguments.url and isinstance(server, Tokenwire)
            place = already_running(arguments) if remote else started(server, arguments)
            seed = f"{arguments.seed} {round_number}"
            able = [s for s in scenarios if server.constrains or not s.constrained]
            try:
                with place as (target, tree):
                    measurements[server.name] += uvloop.run(
                        measure_all(target, tree, able, arguments, seed)
                    )
            except ServerError as error:
                print(f"{server.name}: {error}", flush=True)
    run = Run(
        date=now(),
        machine=Machine.this(),
        model=arguments.model.name,
        seed=arguments.seed,
        tokenwire_args=arguments.tokenwire_args,
        versions={
            server.name: server.versions(server.install(arguments.cache))
            for server in servers
            if measurements[server.name]
        },
        scenarios=scenarios,
        measurements=measurements,
    )
    path = save(run, arguments.results, f"{run.date}-{run.model}")
    if len(servers) > 1:
        path.with_suffix(".svg").write_text(chart(run))
    print("", table(run), against_baseline(run), f"written to {path}", sep="\n\n")
    if not measurements[Tokenwire.name] or run.failures:
        failures = "\n".join(run.failures) or "it did not start"
        raise SystemExit(f"tokenwire FAILED; the table omits failed measurements:\n{failures}")


if __name__ == "__main__":
    main()
