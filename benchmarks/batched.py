"""The engine beside `llama-batched-bench`, in turn, on one GGUF file that llama.cpp made.

    python -m benchmarks.batched --model ~/.cache/tokenwire-bench/models/bench-350m --type Q4_K_M

No server, no sampling of either is measured: decode steps of some streams at a short context, and
prompts that run alone. The engine's figures are those of `benchmarks.steps`.
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
from benchmarks.peers import LlamaCpp
from benchmarks.results import RESULTS, Machine, now, save
from benchmarks.tables import markdown, number

CONTEXT = 128
OUTPUT = 32
"""Tokens that each stream decodes in llama.cpp"""

Figures = Mapping[str, float]
"""Tokens/s of each case"""


@dataclass(frozen=True, slots=True)
class Cases:
    streams: Sequence[int]
    prompts: Sequence[int]


@dataclass(frozen=True, slots=True)
class BatchedReport:
    date: str
    machine: Machine
    model: str
    weights: str
    file_bytes: int
    tokenwire: Figures
    """Tokens/s, medians of all rounds"""
    llama_cpp: Figures
    ratios: Figures
    """Medians of the rounds' ratios: above 1, the engine is faster"""


def gguf_file(home: Path, python: Path, model: Path, weights: str) -> Path:
    """Return the checkpoint as a GGUF file of a type that llama-quantize knows."""
    full = LlamaCpp().converted(home, python, model)
    if weights.lower() == LlamaCpp.weights:
        return full
    file = full.with_name(f"{model.name}-{weights}.gguf")
    if not file.exists():
        fresh = file.with_suffix(".new")
        command = [str(home / "build" / "bin" / "llama-quantize"), str(full), str(fresh), weights]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        fresh.rename(file)
    return file


def of_the_engine(file: Path, cases: Cases) -> dict[str, float]:
    """Measure the engine in a process of its own."""
    with tempfile.TemporaryDirectory() as results:
        command = [sys.executable, "-m", "benchmarks.steps", "--model", str(file)]
        command += ["--contexts", str(CONTEXT), "--batches", _list(cases.streams)]
        command += ["--prompts", _list(cases.prompts), "--results", results]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        report = json.loads(next(Path(results).iterdir()).read_text())
    speeds = {_prompt(each["prompt"]): each["tokens_per_second"] for each in report["prefills"]}
    return speeds | {
        _decode(each["batch"]): each["tokens_per_second"] for each in report["decodes"]
    }


def of_llama_cpp(home: Path, file: Path, cases: Cases) -> dict[str, float]:
    """Return the better figure of each case: with weights repacked, for AMX say, or as they are.

    A case is a process of its own: repacked, some shapes end in a segmentation fault.
    """
    common = [str(home / "build" / "bin" / "llama-batched-bench"), "--model", str(file)]
    common += ["--output-format", "jsonl", "--threads", f"{os.cpu_count()}"]
    asked = [(_prompt(length), "speed_pp", length, 1, 1) for length in cases.prompts]
    asked += [(_decode(streams), "speed_tg", CONTEXT, OUTPUT, streams) for streams in cases.streams]
    speeds: dict[str, float] = {}
    for name, figure, prompt, output, streams in asked:
        command = [*common, "-npp", f"{prompt}", "-ntg", f"{output}", "-npl", f"{streams}"]
        command += ["--ctx-size", f"{streams * (256 * math.ceil((prompt + output) / 256))}"]
        for variant in ("--repack", "--no-repack"):
            run = subprocess.run([*command, variant], capture_output=True, text=True, check=False)
            lines = [line for line in run.stdout.splitlines() if line.startswith("{")]
            if run.returncode == 0:
                speeds[name] = max(speeds.get(name, 0.0), json.loads(lines[-1])[figure])
    return speeds


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
    parser.add_argument("--streams", type=_numbers, default=(1, 8, 32), metavar="1,8,…")
    parser.add_argument("--prompts", type=_numbers, default=(512, 2048), metavar="512,…")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--cache", type=Path, default=CACHE)
    parser.add_argument("--results", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    peer = LlamaCpp()
    python = peer.install(arguments.cache)
    home = peer.home(arguments.cache)
    file = gguf_file(home, python, arguments.model, arguments.type)
    cases = Cases(arguments.streams, arguments.prompts)
    ours, theirs = [], []
    for _ in range(arguments.rounds):
        ours.append(of_the_engine(file, cases))
        theirs.append(of_llama_cpp(home, file, cases))
    pairs = zip(ours, theirs, strict=True)
    ratios = medians({case: a[case] / b[case] for case in a} for a, b in pairs)
    date = now()
    report = BatchedReport(
        date=date,
        machine=Machine.this(),
        model=arguments.model.name,
        weights=arguments.type,
        file_bytes=file.stat().st_size,
        tokenwire=medians(ours),
        llama_cpp=medians(theirs),
        ratios=ratios,
    )
    rows = [["tokens/s", "Tokenwire", "llama.cpp", "ratio"]]
    for case, ratio in ratios.items():
        figures = (report.tokenwire[case], report.llama_cpp[case])
        rows.append([case, *map(number, figures), f"{ratio:.2f}"])
    print(markdown(rows))
    name = f"{date}-batched-{arguments.model.name}-{arguments.type}"
    print(f"written to {save(report, arguments.results, name)}")


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(int(number) for number in text.split(","))


if __name__ == "__main__":
    main()
