"""Cost of the services in front of the engine: the same load along each path, in one run.

    python -m benchmarks.overhead --model ~/.cache/tokenwire-bench/models/bench-350m

The first path is the step loop alone in one process, without client or service. The others are
token ids over gRPC (the engine), text over gRPC (the tokenizer), and JSON over HTTP (the shim).
"""

from __future__ import annotations

import argparse
import asyncio
import os
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from itertools import count, islice
from multiprocessing import get_context
from pathlib import Path

import uvloop

from benchmarks import CACHE
from benchmarks.load import measure, warm_up
from benchmarks.peers import Tokenwire
from benchmarks.processes import ProcessTree, ServiceUse, free_port, running
from benchmarks.prompts import Prompts, vocabulary_size
from benchmarks.results import RESULTS, Machine, now, save
from benchmarks.scenarios import SCENARIOS, Scenario
from benchmarks.tables import markdown
from services.engine.frontend.child_process import limit_thread_spinning
from tokenwire.client import AnswerStream, Client, EngineClient, GenerationStream
from tokenwire.load.load_run import Target
from tokenwire.load.workloads import ClosedLoop, Workload

PATHS = ("in process", "gRPC, tokens", "gRPC, text", "HTTP")


@dataclass(frozen=True, slots=True)
class Passage:
    """One run of the load along one path."""

    path: str
    tokens_per_second: float
    cpu_seconds: Mapping[str, float]
    """CPU seconds by process; empty for the path in process"""


@dataclass(frozen=True, slots=True)
class OverheadReport:
    date: str
    machine: Machine
    model: str
    scenario: str
    load_average: float
    passages: Sequence[Passage]

    def median(self, path: str) -> float:
        """Return the median tokens/s of a path."""
        return statistics.median(p.tokens_per_second for p in self.passages if p.path == path)


def run_in_process(model: Path, workload: Workload, seed: str, repeat: int) -> list[Passage]:
    """Run the load on the step loop alone, in a process of its own that then ends."""
    limit_thread_spinning()
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        runs = pool.submit(_serve, model, workload, seed, repeat).result()
    for tokens, _ in runs:
        _require(tokens, workload)
    return [Passage(PATHS[0], round(tokens / seconds, 1), {}) for tokens, seconds in runs]


def _serve(model: Path, workload: Workload, seed: str, repeat: int) -> list[tuple[int, float]]:
    from benchmarks.engine import MeasuredEngine  # torch, which reads the environment once

    at_once, vocabulary = _at_once(workload), vocabulary_size(model)
    engine = MeasuredEngine(model, "auto", 2 * at_once * (workload.prompt + workload.output + 64))
    warm = replace(workload, output=4, requests=at_once)
    engine.serve(warm, Prompts(vocabulary, f"{seed} warm-up"))
    return [
        engine.serve(workload, Prompts(vocabulary, f"{seed} {number}")) for number in range(repeat)
    ]


async def run_over_grpc(
    path: str,
    stream: Callable[[list[int], int], AnswerStream | GenerationStream],
    workload: Workload,
    prompts: Prompts,
    tree: ProcessTree,
) -> Passage:
    """Run the load through one of tokenwire.client's clients."""
    bodies = islice(prompts.of(workload), workload.requests)
    tokens = 0

    async def worker() -> None:
        nonlocal tokens
        for prompt in bodies:
            assert isinstance(prompt, list)
            async with stream(prompt, workload.output) as running:
                async for _ in running:
                    pass
                assert running.usage is not None
                tokens += running.usage.completion_tokens

    before, client_before, began = tree.by_service(), time.process_time(), time.perf_counter()
    await asyncio.gather(*(worker() for _ in range(_at_once(workload))))
    seconds = time.perf_counter() - began
    cpu = _spent(before, tree, time.process_time() - client_before)
    _require(tokens, workload)
    return Passage(path, round(tokens / seconds, 1), cpu)


async def run_over_http(
    target: Target, scenario: Scenario, prompts: Prompts, tree: ProcessTree
) -> Passage:
    before = tree.by_service()
    measurement = await measure(target, scenario, prompts, tree)
    cpu = _spent(before, tree, measurement.client_cpu)
    (report,) = measurement.workloads.values()
    if report.errors:
        raise SystemExit(f"over HTTP: {dict(report.errors)}")
    return Passage("HTTP", measurement.output_tokens_per_second, cpu)


async def run_on_stack(
    server: Tokenwire,
    target: Target,
    tree: ProcessTree,
    scenario: Scenario,
    prompts: Iterator[Prompts],
    repeat: int,
) -> list[Passage]:
    """Run the load along the three paths through the services, in turn."""
    (workload,) = scenario.workloads
    await warm_up(target, scenario, next(prompts))
    passages = []
    async with (
        EngineClient(f"127.0.0.1:{server.engine_port}") as engine,
        Client(f"127.0.0.1:{server.tokenizer_port}") as tokenizer,
    ):

        def tokens(prompt: list[int], output: int) -> GenerationStream:
            return engine.stream(prompt, max_tokens=output, temperature=0, ignore_eos=True)

        def text(prompt: list[int], output: int) -> AnswerStream:
            return tokenizer.stream(prompt, max_tokens=output, temperature=0, ignore_eos=True)

        for _ in range(repeat):
            passages += [
                await run_over_grpc("gRPC, tokens", tokens, workload, next(prompts), tree),
                await run_over_grpc("gRPC, text", text, workload, next(prompts), tree),
                await run_over_http(target, scenario, next(prompts), tree),
            ]
    return passages


def describe(report: OverheadReport) -> str:
    names = list(dict.fromkeys(name for p in report.passages for name in p.cpu_seconds))
    rows = [["path", "tokens/s", "of in process", *(f"{name}, CPU s" for name in names)]]
    for path in PATHS:
        passages = [passage for passage in report.passages if passage.path == path]
        median = report.median(path)
        cpu = [
            f"{statistics.median(p.cpu_seconds[name] for p in passages):.2f}"
            if all(name in p.cpu_seconds for p in passages)
            else "-"
            for name in names
        ]
        rows.append([path, f"{median:.0f}", f"{median / report.median(PATHS[0]):.1%}", *cpu])
    about = f"{report.model}, {report.scenario}, load average {report.load_average:.1f}"
    return f"{about}\n\n{markdown(rows)}"


def _spent(before: Mapping[str, ServiceUse], tree: ProcessTree, client: float) -> dict[str, float]:
    """Return the CPU seconds since `before`, by process."""
    spent = {"client": round(client, 2)}
    for name, use in tree.by_service().items():
        earlier = before[name].cpu_seconds if name in before else 0.0
        spent[name] = round(use.cpu_seconds - earlier, 2)
    return spent


def _at_once(workload: Workload) -> int:
    assert isinstance(workload.arrivals, ClosedLoop)
    return workload.arrivals.concurrency


def _require(tokens: int, workload: Workload) -> None:
    wanted = workload.output * (workload.requests or 0)
    if tokens != wanted:
        raise SystemExit(f"the server generated {tokens} tokens, but {wanted} were requested")


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.overhead",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--model", type=Path, required=True, help="a Hugging Face directory")
    parser.add_argument("--scenario", default="S32", help="a closed loop of one workload")
    parser.add_argument("--repeat", type=int, default=2, help="runs of each path in a round")
    parser.add_argument("--rounds", type=int, default=1, help="rounds, each with new processes")
    parser.add_argument("--tokenwire-args", default="", help="further flags of the engine")
    parser.add_argument("--cache", type=Path, default=CACHE)
    parser.add_argument("--results", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    model, scenario = arguments.model.resolve(), SCENARIOS[arguments.scenario]
    (workload,) = scenario.workloads
    vocabulary = vocabulary_size(model)
    load_average = os.getloadavg()[0]
    server = Tokenwire(arguments.tokenwire_args)
    passages: list[Passage] = []
    for round_number in range(arguments.rounds):
        seed = f"{time.time_ns()} {round_number}"
        passages += run_in_process(model, workload, seed, arguments.repeat)
        launch = server.launch(server.install(arguments.cache), model, free_port())
        with running(launch, arguments.cache / "logs" / "overhead.log") as tree:
            target = Target(launch.url, server.served_name(model))
            prompts = (Prompts(vocabulary, f"{seed} {number}") for number in count())
            passages += uvloop.run(
                run_on_stack(server, target, tree, scenario, prompts, arguments.repeat)
            )
    report = OverheadReport(
        date=now(),
        machine=Machine.this(),
        model=model.name,
        scenario=scenario.name,
        load_average=round(load_average, 2),
        passages=passages,
    )
    path = save(report, arguments.results, f"{report.date}-overhead-{report.model}")
    print(f"{describe(report)}\n\nwritten to {path}")


if __name__ == "__main__":
    main()
