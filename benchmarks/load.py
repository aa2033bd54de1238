"""Load generator: throughput and latencies of a server under a scenario's requests.

python -m benchmarks.load --url http://127.0.0.1:8000 --model models/embedded --scenarios S1,S8
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import uvloop

from benchmarks.processes import ProcessTree
from benchmarks.prompts import Prompts, vocabulary_size
from benchmarks.scenarios import SCENARIOS, Figure, Scenario
from tokenwire.load.exchanges import Latency, WorkloadReport, read_exchange, report
from tokenwire.load.http_client import HttpClient
from tokenwire.load.load_run import LoadRun, Target
from tokenwire.load.workloads import ClosedLoop, OpenLoop, Workload

__all__ = ["Measurement", "describe", "measure", "served_model", "warm_up"]


@dataclass(frozen=True, slots=True)
class Measurement:
    """One scenario against one server. CPU times are seconds, memory is bytes."""

    scenario: str
    seconds: float
    output_tokens_per_second: float
    workloads: Mapping[str, WorkloadReport]
    client_cpu: float
    server_cpu: float | None
    server_memory: int | None
    load_average_before: float

    def figure(self, figure: Figure) -> float | None:
        """Return the figure by which servers are ranked, or None if it was not measured."""
        first = next(iter(self.workloads.values()))
        if figure is Figure.THROUGHPUT:
            return self.output_tokens_per_second
        if figure is Figure.TTFT:
            return first.ttft.p50 if first.ttft else None
        if first.inter_token is None or first.inter_token_beside_prefill is None:
            return None
        return first.inter_token_beside_prefill.p99 / first.inter_token.p50

    @property
    def errors(self) -> int:
        return sum(sum(each.errors.values()) for each in self.workloads.values())


async def measure(
    target: Target, scenario: Scenario, prompts: Prompts, tree: ProcessTree | None = None
) -> Measurement:
    """Run a scenario. `tree` gives the server's CPU time and memory."""
    client = HttpClient(target.url)
    load_average = os.getloadavg()[0]
    server_before = tree.cpu_seconds() if tree else 0.0
    client_before = time.process_time()
    started = time.perf_counter()
    raw = await LoadRun(client, target, prompts).run(scenario.workloads)
    client_cpu = time.process_time() - client_before
    server_cpu = tree.cpu_seconds() - server_before if tree else None
    client.close()

    exchanges = {
        workload.name: [read_exchange(outcome, workload) for outcome in outcomes]
        for workload, outcomes in zip(scenario.workloads, raw, strict=True)
    }
    seconds = max(one.ended for several in exchanges.values() for one in several) - started
    reports = {}
    for name, several in exchanges.items():
        others = [one for other, those in exchanges.items() if other != name for one in those]
        reports[name] = report(several, others)
    return Measurement(
        scenario=scenario.name,
        seconds=round(seconds, 3),
        output_tokens_per_second=round(
            sum(each.output_tokens for each in reports.values()) / seconds, 2
        ),
        workloads=reports,
        client_cpu=round(client_cpu, 3),
        server_cpu=round(server_cpu, 3) if server_cpu is not None else None,
        server_memory=tree.resident_bytes() if tree else None,
        load_average_before=round(load_average, 2),
    )


async def warm_up(target: Target, scenario: Scenario, prompts: Prompts) -> None:
    """Send as many short requests as the scenario runs at a time.

    Initialisation on first use then falls outside the measurement.
    """
    short = tuple(
        replace(workload, output=min(workload.output, 4), requests=_at_a_time(workload))
        for workload in scenario.workloads
    )
    client = HttpClient(target.url)
    await LoadRun(client, target, prompts).run(short)
    client.close()


def _at_a_time(workload: Workload) -> int:
    return workload.arrivals.concurrency if isinstance(workload.arrivals, ClosedLoop) else 1


async def served_model(url: str) -> str:
    """Return the id of the first model that a server lists."""
    client = HttpClient(url, timeout=10)
    response = await client.get("/v1/models")
    client.close()
    name = json.loads(response.body)["data"][0]["id"]
    assert isinstance(name, str)
    return name


def describe(measurement: Measurement) -> str:
    """Return a measurement as a few lines of text."""
    lines = []
    for name, each in measurement.workloads.items():
        beside = each.inter_token_beside_prefill
        figures = [
            f"{each.output_tokens_per_second:8.1f} tokens/s",
            f"TTFT {_latency(each.ttft)}",
            f"inter-token {_latency(each.inter_token)}",
            f"beside prefill {_latency(beside)}" if beside else "",
            f"{each.tokens_per_event:.2f} tokens/event",
        ]
        lines.append(f"{measurement.scenario:6} {name:8} " + "  ".join(f for f in figures if f))
        lines.extend(f"       {count} × {error}" for error, count in each.errors.items())
    cpu = f"CPU s: client {measurement.client_cpu:.2f}"
    if measurement.server_cpu is not None:
        cores = measurement.server_cpu / measurement.seconds
        cpu += f", server {measurement.server_cpu:.1f} ({cores:.1f} cores)"
    if measurement.server_memory is not None:
        cpu += f"; server memory {measurement.server_memory / 2**30:.2f} GiB"
    lines.append(
        f"       {measurement.seconds:.1f} s; {cpu}; load before {measurement.load_average_before}"
    )
    return "\n".join(lines)


def _latency(latency: Latency | None) -> str:
    return f"{latency.p50:.0f}/{latency.p90:.0f}/{latency.p99:.0f} ms" if latency else "–"


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.load", description=__doc__)
    parser.add_argument("--url", default="http://127.0.0.1:8000")
    parser.add_argument("--model", type=Path, required=True, help="the model's directory")
    parser.add_argument("--scenarios", default="S1,S8,S32", help=f"some of {', '.join(SCENARIOS)}")
    parser.add_argument("--repeat", type=int, default=1, help="measurements of each scenario")
    parser.add_argument("--pid", type=int, help="the server's root process, for CPU and memory")
    parser.add_argument("--json", type=Path, help="write the measurements to this file")
    own = parser.add_argument_group("a custom load in place of the scenarios")
    own.add_argument("--rate", type=float, help="open loop: requests per second")
    own.add_argument("--concurrency", type=int, help="closed loop: requests at a time")
    own.add_argument("--prompt", type=int, default=128, help="prompt length in tokens")
    own.add_argument("--output", type=int, default=64, help="output length in tokens")
    own.add_argument("--requests", type=int, default=64, help="number of requests")
    return parser.parse_args()


def _scenarios(arguments: argparse.Namespace) -> list[Scenario]:
    arrivals: OpenLoop | ClosedLoop
    if arguments.rate is not None:
        arrivals = OpenLoop(arguments.rate)
    elif arguments.concurrency is not None:
        arrivals = ClosedLoop(arguments.concurrency)
    else:
        return [SCENARIOS[name] for name in arguments.scenarios.split(",")]
    workload = Workload("own", arrivals, arguments.prompt, arguments.output, arguments.requests)
    return [Scenario("own", "from the command line", (workload,))]


async def _main(arguments: argparse.Namespace) -> None:
    target = Target(arguments.url, await served_model(arguments.url))
    tree = ProcessTree(arguments.pid) if arguments.pid else None
    vocabulary = vocabulary_size(arguments.model)
    measurements = []
    for scenario in _scenarios(arguments):
        await warm_up(target, scenario, Prompts(vocabulary, f"warm {time.time_ns()}"))
        for _ in range(arguments.repeat):
            prompts = Prompts(vocabulary, f"{time.time_ns()}")
            measurements.append(await measure(target, scenario, prompts, tree))
            print(describe(measurements[-1]), flush=True)
    if arguments.json:
        arguments.json.write_text(json.dumps([asdict(m) for m in measurements], indent=1))


if __name__ == "__main__":
    uvloop.run(_main(_arguments()))
