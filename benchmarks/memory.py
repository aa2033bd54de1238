"""Resident memory of the four services, at the start and over thousands of short requests.

    python -m benchmarks.memory --model ~/.cache/tokenwire-bench/models/bench-350m

Resident memory is the proportional set size: a page that several processes share counts once. The
KV cache is small, so that all of it is in use before growth is measured.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import uvloop

from benchmarks import CACHE
from benchmarks.load import measure
from benchmarks.peers import Tokenwire
from benchmarks.processes import ProcessTree, free_port, running
from benchmarks.prompts import Prompts, vocabulary_size
from benchmarks.results import RESULTS, Machine, now, save
from benchmarks.scenarios import Scenario
from benchmarks.tables import markdown
from tokenwire.load.load_run import Target
from tokenwire.load.workloads import ClosedLoop, Workload

SHORT = Workload("short", ClosedLoop(32), prompt=32, output=4, requests=None)
SAMPLES = 4
FLAT = 4 << 20
"""Growth in bytes over the second half that counts as none: allocators fluctuate"""


@dataclass(frozen=True, slots=True)
class Sample:
    """Resident bytes by process after a number of requests."""

    requests: int
    resident: Mapping[str, int]

    @property
    def total(self) -> int:
        return sum(self.resident.values())


@dataclass(frozen=True, slots=True)
class MemoryReport:
    """Memory of the services, in bytes."""

    date: str
    machine: Machine
    model: str
    weights: int
    kv_cache: int
    samples: Sequence[Sample]

    @property
    def rest(self) -> int:
        """Bytes at the end that are neither weights nor KV cache."""
        return self.samples[-1].total - self.weights - self.kv_cache

    @property
    def growth(self) -> int:
        """Bytes added over the second half of the requests."""
        return self.samples[-1].total - self.samples[len(self.samples) // 2].total


async def watch(target: Target, tree: ProcessTree, vocabulary: int, requests: int) -> list[Sample]:
    """Return the memory at the start and after each `1 / SAMPLES` of the requests."""
    samples = [_sample(tree, 0)]
    part = requests // SAMPLES
    scenario = Scenario("memory", "short requests", (replace(SHORT, requests=part),))
    for number in range(1, SAMPLES + 1):
        measurement = await measure(target, scenario, Prompts(vocabulary, f"{number}"), tree)
        if measurement.errors:
            raise SystemExit(f"requests failed: {measurement.workloads['short'].errors}")
        samples.append(_sample(tree, number * part))
    return samples


def describe(report: MemoryReport) -> str:
    names = list(report.samples[-1].resident)
    rows = [["requests", *names, "all, MiB"]]
    rows += [
        [
            f"{sample.requests}",
            *(_mebibytes(sample.resident.get(name, 0)) for name in names),
            _mebibytes(sample.total),
        ]
        for sample in report.samples
    ]
    verdict = "flat" if report.growth < FLAT else "GROWING"
    return (
        f"{markdown(rows)}\n\nweights {_mebibytes(report.weights)} MiB + KV "
        f"{_mebibytes(report.kv_cache)} MiB + the rest {_mebibytes(report.rest)} MiB; over the "
        f"second half {_mebibytes(report.growth)} MiB more: {verdict}"
    )


def _sample(tree: ProcessTree, requests: int) -> Sample:
    return Sample(requests, {name: use.resident_bytes for name, use in tree.by_service().items()})


def _mebibytes(size: int) -> str:
    return f"{size / 2**20:.1f}"


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.memory",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--model", type=Path, required=True, help="a Hugging Face directory")
    parser.add_argument("--requests", type=int, default=2000)
    parser.add_argument("--kv-memory", type=int, default=256, help="KV cache in MiB")
    parser.add_argument("--cache", type=Path, default=CACHE)
    parser.add_argument("--results", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    model = arguments.model.resolve()
    server = Tokenwire(f"--kv-memory {arguments.kv_memory}MiB")
    launch = server.launch(server.install(arguments.cache), model, free_port())
    with running(launch, arguments.cache / "logs" / "memory.log") as tree:
        target = Target(launch.url, server.served_name(model))
        vocabulary = vocabulary_size(model)
        samples = uvloop.run(watch(target, tree, vocabulary, arguments.requests))
    report = MemoryReport(
        date=now(),
        machine=Machine.this(),
        model=model.name,
        weights=sum(file.stat().st_size for file in model.glob("*.safetensors")),
        kv_cache=arguments.kv_memory << 20,
        samples=samples,
    )
    path = save(report, arguments.results, f"{report.date}-memory-{report.model}")
    print(f"{describe(report)}\n\nwritten to {path}")


if __name__ == "__main__":
    main()
