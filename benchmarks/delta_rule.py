"""Speed of the gated delta rule on the CPU, for a layer of Qwen3-Next 80B or Qwen 3.5 35B-A3B.

    python -m benchmarks.delta_rule

A decode reads and writes each sequence's state once. Its bytes per second are compared with the
read bandwidth of the same run (`benchmarks.roofline`), prompts with torch's chunked form.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from benchmarks.results import RESULTS, Machine, now, save
from benchmarks.roofline import measure_bandwidth
from benchmarks.tables import markdown
from services.engine.batch.step_batch import StateSegments
from services.engine.kernels.library import native
from services.engine.model.mixers.delta_rule import (
    DeltaInputs,
    DeltaRule,
    DeltaShape,
    DeltaState,
    DeltaWeights,
)
from services.engine.model.mixers.delta_rule_choice import choose_delta_rule
from services.engine.model.mixers.torch_delta_rule import TorchDeltaRule

CPU = torch.device("cpu")
SHAPE = DeltaShape(16, 32, 128, 128, 4, 1e-6)
BATCHES = (1, 8, 32)
PROMPTS = (512, 2048)
_STATE_BYTES = 1 << 30
"""Memory of all slots: more than the capacity of any cache"""


def make_weights() -> DeltaWeights:
    return DeltaWeights.prepare(
        torch.randn(SHAPE.channels, SHAPE.conv_width) / 2,
        None,
        torch.empty(SHAPE.value_heads).uniform_(0.01, 16).log(),
        torch.ones(SHAPE.value_heads),
        torch.ones(SHAPE.value_dim),
    )


def make_inputs(tokens: int) -> DeltaInputs:
    values = SHAPE.value_heads * SHAPE.value_dim

    def rows(width: int) -> Tensor:
        return torch.randn(tokens, width).bfloat16()

    out = torch.empty(tokens, values, dtype=torch.bfloat16)
    return DeltaInputs(
        rows(SHAPE.channels), rows(values), rows(SHAPE.value_heads), rows(SHAPE.decays), out
    )


def make_segments(
    lengths: Sequence[int], sources: Sequence[int], targets: Sequence[int]
) -> StateSegments:
    return StateSegments(
        torch.tensor([0, *lengths]).cumsum(0).int(),
        torch.tensor(sources, dtype=torch.int32),
        torch.tensor(targets, dtype=torch.int32),
        tuple(lengths),
    )


def median_seconds(step: Callable[[], None], seconds: float) -> float:
    """Return the median time of a step, of those that run in `seconds`, at least three."""
    times: list[float] = []
    step()
    while len(times) < 3 or sum(times) < seconds:
        began = time.perf_counter()
        step()
        times.append(time.perf_counter() - began)
    return statistics.median(times)


def decode_rate(rule: DeltaRule, stored: torch.dtype, batch: int, seconds: float) -> float:
    """Return the bytes per second that decodes of `batch` sequences read and write."""
    slots = _STATE_BYTES // rule.bytes_per_slot(stored) // (2 * batch) * 2 * batch
    state = rule.allocate(slots, stored)
    state.recurrent.normal_(std=0.1)
    weights, inputs = make_weights(), make_inputs(batch)
    steps = [
        make_segments(
            [1] * batch, range(first, first + batch), range(first + batch, first + 2 * batch)
        )
        for first in range(0, slots, 2 * batch)
    ]
    turn = 0

    def step() -> None:
        nonlocal turn
        rule.apply(weights, inputs, state, steps[turn])
        turn = (turn + 1) % len(steps)

    return 2 * batch * rule.bytes_per_slot(stored) / median_seconds(step, seconds)


def prompt_rate(rule: DeltaRule, tokens: int, seconds: float) -> float:
    """Return tokens per second of one prompt."""
    state: DeltaState = rule.allocate(1)
    weights, inputs = make_weights(), make_inputs(tokens)
    segments = make_segments([tokens], [-1], [0])
    return tokens / median_seconds(lambda: rule.apply(weights, inputs, state, segments), seconds)


@dataclass(frozen=True, slots=True)
class Decodes:
    """Decodes of `sequences`, whose states are stored in a dtype."""

    sequences: int
    states: str
    bytes_per_second: float
    share_of_bandwidth: float


@dataclass(frozen=True, slots=True)
class Prompt:
    """Tokens per second of a prompt of `tokens`."""

    tokens: int
    ours: float
    torch: float


@dataclass(frozen=True, slots=True)
class DeltaReport:
    date: str
    machine: Machine
    bandwidth: float
    """Bytes per second"""
    decodes: Sequence[Decodes]
    prompts: Sequence[Prompt]


def measure(seconds: float) -> DeltaReport:
    """Measure each figure for about `seconds`."""
    rule = choose_delta_rule(SHAPE, torch.bfloat16, CPU)
    bandwidth = measure_bandwidth(seconds=seconds)[-1].median
    decodes = []
    for stored in (torch.float32, torch.bfloat16):
        for batch in BATCHES:
            rate = decode_rate(rule, stored, batch, seconds)
            name = str(stored).removeprefix("torch.")
            decodes.append(Decodes(batch, name, round(rate), round(rate / bandwidth, 3)))
    prompts = []
    reference = TorchDeltaRule(SHAPE, torch.bfloat16, CPU)
    for tokens in PROMPTS:
        ours, theirs = (prompt_rate(each, tokens, seconds) for each in (rule, reference))
        prompts.append(Prompt(tokens, round(ours, 1), round(theirs, 1)))
    return DeltaReport(now(), Machine.this(), round(bandwidth), decodes, prompts)


def describe(report: DeltaReport) -> str:
    """Return the report as tables."""
    decodes = [["sequences", "states", "GB/s", "of the read bandwidth"]]
    decodes += [
        [
            f"{case.sequences}",
            case.states,
            f"{case.bytes_per_second / 1e9:.1f}",
            f"{case.share_of_bandwidth:.0%}",
        ]
        for case in report.decodes
    ]
    prompts = [["prompt", "tokens/s", "torch, tokens/s", "ratio"]]
    prompts += [
        [f"{case.tokens}", f"{case.ours:.0f}", f"{case.torch:.0f}", f"{case.ours / case.torch:.1f}"]
        for case in report.prompts
    ]
    bandwidth = f"Read bandwidth: {report.bandwidth / 1e9:.1f} GB/s"
    return f"{bandwidth}\n\n{markdown(decodes)}\n\n{markdown(prompts)}"


@torch.inference_mode()
def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.delta_rule",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--seconds", type=float, default=2.0, help="for each figure")
    parser.add_argument("--results", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    if native is not None:
        native.use_pool(len(os.sched_getaffinity(0)))  # as the engine with a bfloat16 model
    report = measure(arguments.seconds)
    path = save(report, arguments.results, f"{report.date}-delta-rule")
    print(f"{describe(report)}\n\nwritten to {path}")


if __name__ == "__main__":
    main()
