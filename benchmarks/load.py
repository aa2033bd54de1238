"""Load generator: throughput and latencies of a server under a scenario's requests.

python -m benchmarks.load --url http://127.0.0.1:8000 --model models/embedded --scenarios S1,S8
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import os
import random
import time
from collections import Counter
from collections.abc import Coroutine, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import islice, pairwise
from pathlib import Path
from typing import Self, TypeAlias, TypedDict

import uvloop

from benchmarks.client import Client, Response
from benchmarks.processes import ProcessTree
from benchmarks.prompts import Prompts, vocabulary_size
from benchmarks.scenarios import SCENARIOS, ClosedLoop, Figure, OpenLoop, Scenario, Workload

__all__ = [
    "OPENAI_FIELDS",
    "Json",
    "Latency",
    "Measurement",
    "Target",
    "WorkloadReport",
    "measure",
    "served_model",
    "warm_up",
]

Json: TypeAlias = "bool | int | float | str | list[Json] | dict[str, Json] | None"

OPENAI_FIELDS: Mapping[str, Json] = {
    "ignore_eos": True,
    "stream_options": {"include_usage": True},
}


@dataclass(frozen=True, slots=True)
class Target:
    """A running server, and the further fields of its completion requests."""

    url: str
    model: str
    fields: Mapping[str, Json] = field(default_factory=lambda: OPENAI_FIELDS)
    text_prompts: bool = False


@dataclass(frozen=True, slots=True)
class Latency:
    """Percentiles in milliseconds."""

    p50: float
    p90: float
    p99: float
    max: float

    @classmethod
    def of(cls, seconds: Sequence[float]) -> Self | None:
        if not seconds:
            return None
        ordered = sorted(seconds)

        def percentile(share: float) -> float:
            return round(1000 * ordered[math.ceil(share * len(ordered)) - 1], 2)

        return cls(percentile(0.5), percentile(0.9), percentile(0.99), percentile(1.0))


@dataclass(frozen=True, slots=True)
class WorkloadReport:
    """Counts and latencies of one workload's requests.

    `inter_token` is the time between events that carry tokens, and `tokens_per_event` the mean
    number of tokens in one. `inter_token_beside_prefill` is limited to the times in which a
    request of another workload waits for its first token.
    """

    requests: int
    errors: Mapping[str, int]
    prompt_tokens: int
    output_tokens: int
    output_tokens_per_second: float
    tokens_per_event: float
    ttft: Latency | None
    inter_token: Latency | None
    inter_token_beside_prefill: Latency | None


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
        return sum(sum(report.errors.values()) for report in self.workloads.values())


@dataclass(frozen=True, slots=True)
class _Exchange:
    """One request. Times are of `time.perf_counter`; `events` are the times of tokens."""

    sent: float
    ended: float
    events: Sequence[float] = ()
    prompt_tokens: int = 0
    output_tokens: int = 0
    error: str | None = None


async def measure(
    target: Target, scenario: Scenario, prompts: Prompts, tree: ProcessTree | None = None
) -> Measurement:
    """Run a scenario. `tree` gives the server's CPU time and memory."""
    client = Client(target.url)
    load_average = os.getloadavg()[0]
    server_before = tree.cpu_seconds() if tree else 0.0
    client_before = time.process_time()
    started = time.perf_counter()
    raw = await _run(client, target, scenario.workloads, prompts)
    client_cpu = time.process_time() - client_before
    server_cpu = tree.cpu_seconds() - server_before if tree else None
    client.close()

    exchanges = {
        workload.name: [_read(outcome, workload) for outcome in outcomes]
        for workload, outcomes in zip(scenario.workloads, raw, strict=True)
    }
    seconds = max(one.ended for several in exchanges.values() for one in several) - started
    reports = {}
    for name, several in exchanges.items():
        others = [one for other, those in exchanges.items() if other != name for one in those]
        reports[name] = _report(several, others)
    return Measurement(
        scenario=scenario.name,
        seconds=round(seconds, 3),
        output_tokens_per_second=round(
            sum(report.output_tokens for report in reports.values()) / seconds, 2
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
    client = Client(target.url)
    await _run(client, target, short, prompts)
    client.close()


def _at_a_time(workload: Workload) -> int:
    return workload.arrivals.concurrency if isinstance(workload.arrivals, ClosedLoop) else 1


# Sending. Responses are not parsed here.


@dataclass(frozen=True, slots=True)
class _Outcome:
    sent: float
    ended: float
    response: Response | OSError


async def _run(
    client: Client, target: Target, workloads: Sequence[Workload], prompts: Prompts
) -> list[list[_Outcome]]:
    """Run workloads concurrently. Workloads without a number of requests end with the others."""
    done = asyncio.Event()
    outcomes: list[list[_Outcome]] = [[] for _ in workloads]
    bounded: list[Coroutine[None, None, None]] = []
    unbounded: list[Coroutine[None, None, None]] = []
    for workload, results in zip(workloads, outcomes, strict=True):
        bodies = _bodies(target, workload, prompts)
        if workload.requests is not None:
            bodies = islice(bodies, workload.requests)
        if isinstance(workload.arrivals, ClosedLoop):
            running = _closed_loop(client, bodies, workload.arrivals.concurrency, results)
        else:
            running = _open_loop(client, bodies, workload.arrivals.rate, results, done)
        (unbounded if workload.requests is None else bounded).append(running)

    async with asyncio.TaskGroup() as group:
        for running in unbounded:
            group.create_task(running)
        await asyncio.gather(*bounded)
        done.set()
    return outcomes


async def _closed_loop(
    client: Client, bodies: Iterator[bytes], concurrency: int, results: list[_Outcome]
) -> None:
    async def worker() -> None:
        results.extend([await _complete(client, body, time.perf_counter()) for body in bodies])

    await asyncio.gather(*(worker() for _ in range(concurrency)))


async def _open_loop(
    client: Client,
    bodies: Iterator[bytes],
    rate: float,
    results: list[_Outcome],
    done: asyncio.Event,
) -> None:
    async def arrive(body: bytes, due: float) -> None:
        results.append(await _complete(client, body, due))

    gaps = random.Random(rate)
    due = time.perf_counter()
    async with asyncio.TaskGroup() as group:
        for body in bodies:
            due += gaps.expovariate(rate)
            try:
                async with asyncio.timeout(due - time.perf_counter()):
                    await done.wait()
                return
            except TimeoutError:
                group.create_task(arrive(body, due))


async def _complete(client: Client, body: bytes, sent: float) -> _Outcome:
    try:
        response: Response | OSError = await client.post("/v1/completions", body)
    except OSError as error:  # includes TimeoutError
        response = error
    return _Outcome(sent, time.perf_counter(), response)


def _bodies(target: Target, workload: Workload, prompts: Prompts) -> Iterator[bytes]:
    fields = dict(target.fields)
    if workload.json_schema is not None:
        schema: dict[str, Json] = {"name": "bench", "schema": json.loads(workload.json_schema)}
        fields["response_format"] = {"type": "json_schema", "json_schema": schema}
        fields.pop("ignore_eos", None)  # The schema decides where the output may end.
    for prompt in prompts.of(workload):
        body = {
            "model": target.model,
            "prompt": prompt,
            "max_tokens": workload.output,
            "temperature": workload.temperature,
            "top_p": workload.top_p,
            "stream": True,
            **fields,
        }
        yield json.dumps(body, separators=(",", ":")).encode()


# Parsing, after the measurement.


class _Choice(TypedDict, total=False):
    text: str
    token_ids: list[int] | None
    finish_reason: str | None


class _Usage(TypedDict):
    prompt_tokens: int
    completion_tokens: int


class _Chunk(TypedDict, total=False):
    choices: list[_Choice]
    usage: _Usage | None
    error: Json


def _read(outcome: _Outcome, workload: Workload) -> _Exchange:
    failed = _Exchange(outcome.sent, outcome.ended)
    response = outcome.response
    if isinstance(response, OSError):
        return replace(failed, error=f"{type(response).__name__}: {response}")
    if response.status != 200:
        body = response.body.decode(errors="replace")
        return replace(failed, error=f"HTTP {response.status}: {body[:200]}")

    times: list[float] = []
    usage: _Usage | None = None
    for arrived, chunk in _chunks(response.pieces):
        if chunk.get("error"):
            return replace(failed, error=f"in the stream: {chunk['error']}")
        usage = chunk.get("usage") or usage
        if any(_has_tokens(choice) for choice in chunk.get("choices", ())):
            times.append(arrived)
    # The finish reason may come in an event of its own, after the last token's.
    output_tokens = usage["completion_tokens"] if usage else len(times)
    if len(times) > output_tokens:
        times = times[:output_tokens]
    wrong = output_tokens != workload.output
    return _Exchange(
        outcome.sent,
        outcome.ended,
        events=times,
        prompt_tokens=usage["prompt_tokens"] if usage else workload.prompt,
        output_tokens=output_tokens,
        error=f"{output_tokens} tokens instead of {workload.output}" if wrong else None,
    )


def _chunks(pieces: Sequence[tuple[float, bytes]]) -> Iterator[tuple[float, _Chunk]]:
    """Yield the stream's data events, each with the arrival time of its last byte."""
    rest = b""
    for arrived, piece in pieces:
        *lines, rest = (rest + piece).split(b"\n")
        for line in lines:
            data = line.strip().removeprefix(b"data:").lstrip()
            if data.startswith(b"{"):
                yield arrived, json.loads(data)


def _has_tokens(choice: _Choice) -> bool:
    return bool(choice.get("text") or choice.get("token_ids") or choice.get("finish_reason"))


def _report(exchanges: Sequence[_Exchange], others: Sequence[_Exchange]) -> WorkloadReport:
    served = [exchange for exchange in exchanges if exchange.events]
    prefills = [(other.sent, other.events[0]) for other in others if other.events]
    gaps = [gap for exchange in served for gap in pairwise(exchange.events)]
    beside = [
        (start, end)
        for start, end in gaps
        if any(start < first and sent < end for sent, first in prefills)
    ]
    tokens = sum(exchange.output_tokens for exchange in exchanges)
    span = max(e.ended for e in exchanges) - min(e.sent for e in exchanges) if exchanges else 0.0
    events = sum(len(exchange.events) for exchange in exchanges)
    return WorkloadReport(
        requests=len(exchanges),
        errors=dict(Counter(e.error for e in exchanges if e.error is not None)),
        prompt_tokens=sum(exchange.prompt_tokens for exchange in exchanges),
        output_tokens=tokens,
        output_tokens_per_second=round(tokens / span, 2) if span else 0.0,
        tokens_per_event=round(tokens / events, 3) if events else 0.0,
        ttft=Latency.of([exchange.events[0] - exchange.sent for exchange in served]),
        inter_token=Latency.of([end - start for start, end in gaps]),
        inter_token_beside_prefill=Latency.of([end - start for start, end in beside]),
    )


async def served_model(url: str) -> str:
    """Return the id of the first model that a server lists."""
    client = Client(url, timeout=10)
    response = await client.get("/v1/models")
    client.close()
    name = json.loads(response.body)["data"][0]["id"]
    assert isinstance(name, str)
    return name


def describe(measurement: Measurement) -> str:
    """Return a measurement as a few lines of text."""
    lines = []
    for name, report in measurement.workloads.items():
        beside = report.inter_token_beside_prefill
        figures = [
            f"{report.output_tokens_per_second:8.1f} tokens/s",
            f"TTFT {_latency(report.ttft)}",
            f"inter-token {_latency(report.inter_token)}",
            f"beside prefill {_latency(beside)}" if beside else "",
            f"{report.tokens_per_event:.2f} tokens/event",
        ]
        lines.append(f"{measurement.scenario:6} {name:8} " + "  ".join(f for f in figures if f))
        lines.extend(f"       {count} × {error}" for error, count in report.errors.items())
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
