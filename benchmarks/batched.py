"""The engine beside `llama-batched-bench`, in turn, on one GGUF file that llama.cpp made.

    python -m benchmarks.batched --model ~/.cache/tokenwire-bench/models/bench-350m --type Q4_K_M

Measures decode steps of some streams behind a context, and prompts that run alone, without a
server. The engine's figures are those of `benchmarks.steps`; they include greedy sampling, which
llama.cpp's lack.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks import CACHE
from benchmarks.peers import LlamaCpp, Tokenwire
from benchmarks.results import RESULTS, Machine, now, save
from benchmarks.tables import markdown, number

OUTPUT = 32
"""Tokens that each stream decodes in llama.cpp"""

Figures = Mapping[str, float]
"""Tokens/s of each case"""


@dataclass(frozen=True, slots=True)
class Cases:
    streams: Sequence[int]
    context: int
    """Tokens in front of what each stream decodes"""
    prompts: Sequence[int]


@dataclass(frozen=True, slots=True)
class BatchedReport:
    date: str
    machine: Machine
    model: str
    weights: str
    dtype: str
    file_bytes: int
    context: int
    versions: Mapping[str, str]
    rounds: int
    tokenwire: Figures
    """Tokens/s, medians of all rounds"""
    llama_cpp: Figures
    ratios: Figures
    """Medians of the rounds' ratios: above 1, the engine is faster"""
    failures: Mapping[str, str]
    """Cases that llama.cpp could not run, and the last line that it printed"""


def gguf_file(home: Path, python: Path, model: Path, weights: str) -> Path:
    """Return the checkpoint as a GGUF file of a type that llama-quantize knows."""
    if weights.lower() == LlamaCpp.weights:
        return LlamaCpp().converted(home, python, model)
    file = home / "models" / f"{model.name}-{weights}.gguf"
    if not file.exists():
        full, fresh = LlamaCpp().converted(home, python, model), file.with_suffix(".new")
        command = [str(home / "build" / "bin" / "llama-quantize"), str(full), str(fresh), weights]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        fresh.rename(file)
    return file


def measure_engine(file: Path, cases: Cases, dtype: str) -> dict[str, float]:
    """Measure the engine in a process of its own."""
    with tempfile.TemporaryDirectory() as results:
        command = [sys.executable, "-m", "benchmarks.steps", "--model", str(file)]
        command += ["--contexts", str(cases.context), "--batches", _list(cases.streams)]
        command += ["--prompts", _list(cases.prompts), "--dtype", dtype, "--results", results]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        report = json.loads(next(Path(results).iterdir()).read_text())
    speeds = {_prompt(each["prompt"]): each["tokens_per_second"] for each in report["prefills"]}
    return speeds | {
        _decode(each["batch"]): each["tokens_per_second"] for each in report["decodes"]
    }


class BatchedBench:
    """llama.cpp's tool. Each case is a process of its own, because some shapes end it by a fault.

    A case runs with weights repacked for the processor's instructions or as they are: as was faster
    the first time, which is not measured.
    """

    def __init__(self, home: Path, file: Path) -> None:
        self._command = [str(home / "build" / "bin" / "llama-batched-bench"), "--model", str(file)]
        self._command += ["--output-format", "jsonl", "--threads", f"{_processors()}"]
        self._variants: dict[str, str] = {}
        self.failures: dict[str, str] = {}

    def measure(self, cases: Cases) -> dict[str, float]:
        """Return the speeds of the cases that end well."""
        speeds: dict[str, float] = {}
        asked = [(_prompt(length), "speed_pp", length, 1, 1) for length in cases.prompts]
        asked += [
            (_decode(count), "speed_tg", cases.context, OUTPUT, count) for count in cases.streams
        ]
        for case, figure, prompt, output, streams in asked:
            arguments = ["-npp", f"{prompt}", "-ntg", f"{output}", "-npl", f"{streams}"]
            context = streams * 256 * math.ceil((prompt + output) / 256)
            arguments += ["--ctx-size", f"{context}"]
            if case not in self._variants and case not in self.failures:
                self._choose(case, arguments, figure)
            if case in self._variants:
                speed = self._run(case, [*arguments, self._variants[case]], figure)
                if speed is not None:
                    speeds[case] = speed
        return speeds

    def _choose(self, case: str, arguments: Sequence[str], figure: str) -> None:
        found = {
            variant: self._run(case, [*arguments, variant], figure)
            for variant in ("--repack", "--no-repack")
        }
        speeds = {variant: speed for variant, speed in found.items() if speed is not None}
        if speeds:
            self._variants[case] = max(speeds, key=speeds.__getitem__)
            self.failures.pop(case, None)

    def _run(self, case: str, arguments: Sequence[str], figure: str) -> float | None:
        """Return tokens/s; None if it failed, and keep what it printed last."""
        command = [*self._command, *arguments]
        run = subprocess.run(command, capture_output=True, text=True, check=False)
        rows = [json.loads(line) for line in run.stdout.splitlines() if line.startswith("{")]
        if run.returncode == 0 and rows:
            return float(rows[-1][figure])
        last = [line for line in run.stderr.splitlines() if line.strip()][-1:]
        self.failures[case] = f"exit code {run.returncode}: {''.join(last)}"
        return None


def _processors() -> int:
    """Return how many processors this process may use."""
    return len(os.sched_getaffinity(0))


def _decode(streams: int) -> str:
    return f"decode, {streams} streams"


def _prompt(tokens: int) -> str:
    return f"prompt of {tokens}"


def _list(numbers: Iterable[int]) -> str:
    return ",".join(map(str, numbers))


def medians(rounds: Iterable[Figures]) -> dict[str, float]:
    found: defaultdict[str, list[float]] = defaultdict(list)
    for figures in rounds:
        for case, figure in figures.items():
            found[case].append(figure)
    return {case: round(statistics.median(figures), 3) for case, figures in found.items()}


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.batched",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--model", type=Path, required=True, help="a Hugging Face directory")
    parser.add_argument("--type", default="bf16", help="bf16, Q4_K_M, Q8_0, …")
    parser.add_argument("--dtype", default="auto", help="of the engine's activations")
    parser.add_argument("--streams", type=_numbers, default=(1, 8, 32), metavar="1,8,…")
    parser.add_argument("--context", type=int, default=128, help="tokens before each decode")
    parser.add_argument("--prompts", type=_numbers, default=(512, 2048), metavar="512,…")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--cache", type=Path, default=CACHE)
    parser.add_argument("--results", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    peer = LlamaCpp()
    python = peer.install(arguments.cache)
    home = peer.home(arguments.cache)
    file = gguf_file(home, python, arguments.model, arguments.type)
    cases = Cases(arguments.streams, arguments.context, arguments.prompts)
    tool = BatchedBench(home, file)
    ours, theirs = [], []
    for _ in range(arguments.rounds):
        ours.append(measure_engine(file, cases, arguments.dtype))
        theirs.append(tool.measure(cases))
    pairs = zip(ours, theirs, strict=True)
    ratios = medians({case: a[case] / b[case] for case in a if case in b} for a, b in pairs)
    date = now()
    report = BatchedReport(
        date=date,
        machine=Machine.this(),
        model=arguments.model.name,
        weights=arguments.type,
        dtype=arguments.dtype,
        file_bytes=file.stat().st_size,
        context=arguments.context,
        versions=Tokenwire().versions(Path(sys.executable)) | peer.versions(python),
        rounds=arguments.rounds,
        tokenwire=medians(ours),
        llama_cpp=medians(theirs),
        ratios=ratios,
        failures=tool.failures,
    )
    rows = [["tokens/s", "Tokenwire", "llama.cpp", "ratio"]]
    for case, ours_median in report.tokenwire.items():
        theirs_median = report.llama_cpp.get(case)
        rows.append([case, number(ours_median), number(theirs_median), number(ratios.get(case))])
    print(markdown(rows))
    for case, failure in tool.failures.items():
        print(f"llama.cpp, {case}: {failure}")
    name = f"{date}-batched-{arguments.model.name}-{arguments.type}"
    print(f"written to {save(report, arguments.results, name)}")


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(int(number) for number in text.split(","))


if __name__ == "__main__":
    main()
