"""Times of the engine's steps in this process, with their parts and their share of the byte floor.

    python -m benchmarks.steps --model ~/.cache/tokenwire-bench/models/bench-350m

The byte floor of a decode step is the time to read all weights (as stored), all KV and all states
once, at the bandwidth that a plain C reader reaches in the same run (`benchmarks.roofline`).

`--instructions avx2 --dtype float32 --kv-dtype float16` measures what a machine without AVX-512 is
served by default.
"""

from __future__ import annotations

import argparse
import os
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import psutil

from benchmarks.results import RESULTS, Machine, now, save
from benchmarks.roofline import Bandwidth, ByteFloor, RooflineError, measure_bandwidth
from benchmarks.tables import markdown
from services.common.model_files.checkpoint import opened_checkpoint
from services.engine.frontend.child_process import limit_thread_spinning

if TYPE_CHECKING:
    from benchmarks.engine import MeasuredEngine

BATCHES = (1, 2, 4, 8, 16, 32, 64, 128)
CONTEXTS = (128, 1024)
PROMPTS = (32, 128, 512, 2048)
MOST_STEPS = 60
INSTRUCTIONS = {
    "avx2": {
        "ATEN_CPU_CAPABILITY": "avx2",
        "ONEDNN_MAX_CPU_ISA": "AVX2",
        "MKL_ENABLE_INSTRUCTIONS": "AVX2",
    },
    "avx512": {"ONEDNN_MAX_CPU_ISA": "AVX512_CORE", "MKL_ENABLE_INSTRUCTIONS": "AVX512"},
}
"""Environment variables that keep torch from later instructions; it reads them once"""


@dataclass(frozen=True, slots=True)
class DecodeSteps:
    """Steps in which `batch` sequences of about `context` tokens decode."""

    batch: int
    context: int
    step_ms: float
    """Median"""
    step_ms_p90: float
    tokens_per_second: float
    share_of_floor: float
    """Byte floor / median step time; 1 is the memory's speed"""
    disk_mb: float
    """Mean megabytes that a step reads from the disk"""
    parts_ms: Mapping[str, float]
    """Mean milliseconds per step, from separate steps, because timing the parts slows a step"""


@dataclass(frozen=True, slots=True)
class Prefill:
    """Time of a prompt that runs alone, from its arrival to its first token."""

    prompt: int
    ms: float
    tokens_per_second: float


@dataclass(frozen=True, slots=True)
class StepReport:
    date: str
    machine: Machine
    model: str
    instructions: str | None
    """Latest instructions that were used; None = all of the machine"""
    load_average: float
    bandwidth: Sequence[Bandwidth]
    weight_bytes: int
    kv_bytes_per_token: int
    state_bytes: int
    """States of one sequence"""
    decodes: Sequence[DecodeSteps]
    prefills: Sequence[Prefill]
    resident_bytes: int
    """Memory of this process at the end"""
    file_bytes: int
    """Part of it that is pages of files, such as those of mapped weights"""


def measure_decode(
    engine: MeasuredEngine, floor: ByteFloor, batch: int, context: int, seconds: float
) -> DecodeSteps:
    """Measure decode steps for about `seconds`, half of that with their parts timed."""
    from benchmarks.engine import Stopwatch

    watch, process = Stopwatch(), psutil.Process()
    with engine.decoding(batch, context, 2 * MOST_STEPS) as step:
        step()
        before = process.io_counters().read_bytes
        times = _repeat(step, seconds / 2)
        read = process.io_counters().read_bytes - before
        with watch.watching():
            watched = _repeat(step, seconds / 2)
    median = statistics.median(times)
    parts = {part: 1000 * spent / len(watched) for part, spent in watch.seconds.items()}
    parts["python"] = 1000 * statistics.fmean(watched) - sum(parts.values())
    return DecodeSteps(
        batch=batch,
        context=context,
        step_ms=round(1000 * median, 3),
        step_ms_p90=round(1000 * statistics.quantiles(times, n=10)[-1], 3),
        tokens_per_second=round(batch / median, 1),
        share_of_floor=round(floor.seconds(batch, context + len(times) / 2) / median, 3),
        disk_mb=round(read / len(times) / 1e6, 1),
        parts_ms={part: round(spent, 3) for part, spent in parts.items()},
    )


def measure_prefill(engine: MeasuredEngine, length: int, repeat: int = 3) -> Prefill:
    median = statistics.median(engine.prefill(length) for _ in range(repeat))
    return Prefill(length, round(1000 * median, 2), round(length / median, 1))


def _repeat(step: Callable[[], float], seconds: float) -> list[float]:
    times: list[float] = []
    while len(times) < 4 or (len(times) < MOST_STEPS and sum(times) < seconds):
        times.append(step())
    return times


def describe(report: StepReport) -> str:
    """Return the report as tables."""
    parts = list(dict.fromkeys(part for case in report.decodes for part in case.parts_ms))
    header = ["batch", "context", "ms/step", "p90", "tokens/s", "of the floor", "disk, MB"]
    rows = [header + [f"{part}, %" for part in parts]]
    for case in report.decodes:
        whole = sum(case.parts_ms.values())
        rows.append(
            [
                f"{case.batch}",
                f"{case.context}",
                f"{case.step_ms:.2f}",
                f"{case.step_ms_p90:.2f}",
                f"{case.tokens_per_second:.0f}",
                f"{case.share_of_floor:.0%}",
                f"{case.disk_mb:.0f}",
                *(f"{100 * case.parts_ms.get(part, 0.0) / whole:.0f}" for part in parts),
            ]
        )
    prefills = [["prompt", "ms to the first token", "tokens/s"]]
    prefills += [
        [f"{case.prompt}", f"{case.ms:.1f}", f"{case.tokens_per_second:.0f}"]
        for case in report.prefills
    ]
    bandwidths = ", ".join(f"{b.best / 1e9:.1f} GB/s ({b.threads})" for b in report.bandwidth)
    about = (
        f"{report.model}: {report.weight_bytes / 1e6:.0f} MB of weights, "
        f"{report.kv_bytes_per_token / 1e3:.1f} kB of KV a token, "
        f"{report.state_bytes / 1e6:.1f} MB of states a sequence. "
        f"Resident: {report.resident_bytes / 1e9:.2f} GB, {report.file_bytes / 1e9:.2f} of it in "
        f"files. Read bandwidth (threads): {bandwidths}. Load average {report.load_average:.1f}."
    )
    return f"{about}\n\n{markdown(rows)}\n\n{markdown(prefills)}"


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.steps",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--model", type=Path, required=True, help="a Hugging Face directory, or a GGUF file"
    )
    parser.add_argument("--dtype", default="auto", help="of the engine's activations")
    parser.add_argument(
        "--weights", default="full", choices=("full", "mapped", "decoded", "int4", "int8", "w8a8")
    )
    parser.add_argument("--model-code", default="auto", choices=("auto", "native", "transformers"))
    parser.add_argument(
        "--kv-dtype", default="auto", choices=("auto", "float32", "bfloat16", "float16", "int8")
    )
    parser.add_argument(
        "--instructions", choices=INSTRUCTIONS, help="use none that are later, as an older machine"
    )
    parser.add_argument("--batches", type=_numbers, default=BATCHES, metavar="1,2,…")
    parser.add_argument("--contexts", type=_numbers, default=CONTEXTS, metavar="128,…")
    parser.add_argument("--prompts", type=_numbers, default=PROMPTS, metavar="32,…")
    parser.add_argument("--seconds", type=float, default=2.0, help="duration of each decode case")
    parser.add_argument("--results", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    with opened_checkpoint(arguments.model) as directory:
        _measure(arguments, directory)


def _measure(arguments: argparse.Namespace, directory: Path) -> None:
    limit_thread_spinning()
    if arguments.instructions is not None:
        os.environ.update(INSTRUCTIONS[arguments.instructions])
    from benchmarks.engine import MeasuredEngine
    from services.engine.kernels.library import InstructionSet, native

    if arguments.instructions is not None and native is not None:
        native.limit_instruction_set(InstructionSet[arguments.instructions.upper()])

    load_average = os.getloadavg()[0]
    # Each sequence needs a spare block, and blocks for the tokens that it generates.
    longest = max(arguments.contexts) + 2 * MOST_STEPS + max(arguments.batches) + 64
    tokens = max(max(arguments.batches) * longest, 2 * max(arguments.prompts))
    engine = MeasuredEngine(
        directory,
        arguments.dtype,
        tokens,
        weights=arguments.weights,
        streams=max(arguments.batches),
        model_code=arguments.model_code,
        kv_dtype=arguments.kv_dtype,
    )
    try:
        bandwidth = measure_bandwidth()
    except RooflineError as error:
        raise SystemExit(f"the byte floor cannot be measured: {error}") from None
    prefills = [measure_prefill(engine, length) for length in arguments.prompts]
    best = max(found.best for found in bandwidth)
    floor = ByteFloor(engine.weight_bytes, engine.kv_bytes_per_token, engine.state_bytes, best)
    decodes = [
        measure_decode(engine, floor, batch, context, arguments.seconds)
        for context in arguments.contexts
        for batch in arguments.batches
    ]
    memory = psutil.Process().memory_info()
    report = StepReport(
        date=now(),
        machine=Machine.this(),
        model=arguments.model.resolve().name,
        instructions=arguments.instructions,
        load_average=round(load_average, 2),
        bandwidth=bandwidth,
        weight_bytes=engine.weight_bytes,
        kv_bytes_per_token=engine.kv_bytes_per_token,
        state_bytes=engine.state_bytes,
        decodes=decodes,
        prefills=prefills,
        resident_bytes=memory.rss,
        file_bytes=memory.shared,
    )
    path = save(report, arguments.results, f"{report.date}-steps-{report.model}")
    print(f"{describe(report)}\n\nwritten to {path}")


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(int(number) for number in text.split(","))


if __name__ == "__main__":
    main()
