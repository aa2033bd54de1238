"""Random weights and steps of recurrent layers."""

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from services.engine.batch.step_batch import StateSegments
from services.engine.model.mixers.delta_rule import (
    DeltaInputs,
    DeltaRule,
    DeltaShape,
    DeltaState,
    DeltaWeights,
    OutputGate,
)

__all__ = [
    "SHAPES",
    "Run",
    "apply",
    "assert_equal_in_any_steps",
    "make_operands",
    "make_segments",
    "make_weights",
    "split_operands",
]

_PLAIN = DeltaShape(2, 4, 16, 32, 4, 1e-5)
SHAPES = {
    "plain": _PLAIN,
    "one key head": dataclasses.replace(_PLAIN, key_heads=1, value_dim=16),
    "doubled beta": dataclasses.replace(_PLAIN, value_heads=2, doubles_beta=True),
    "channels decay": dataclasses.replace(
        _PLAIN, key_heads=4, gate=OutputGate.SIGMOID, decays_channels=True
    ),
    "decays are bounded": dataclasses.replace(
        _PLAIN, key_heads=4, decays_channels=True, least_decay=-5.0
    ),
    "odd sizes": DeltaShape(1, 3, 12, 20, 3, 1e-6),
}


@dataclass(frozen=True, slots=True)
class Run:
    """Tokens between two states."""

    length: int
    source: int
    target: int


def make_weights(shape: DeltaShape, *, biased: bool = False) -> DeltaWeights:
    return DeltaWeights.prepare(
        torch.randn(shape.channels, 1, shape.conv_width) / 2,
        torch.randn(shape.channels) / 2 if biased else None,
        torch.empty(shape.value_heads).uniform_(0.01, 16).log(),
        torch.randn(shape.decays) - 2,
        1 + torch.randn(shape.value_dim) / 4,
    )


def make_operands(shape: DeltaShape, tokens: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Make random operands side by side, as a joined projection writes them."""
    return torch.randn(tokens, sum(_widths(shape)), dtype=dtype)


def split_operands(shape: DeltaShape, operands: Tensor) -> DeltaInputs:
    """Return views of operands, with outputs to be filled."""
    mixed, gate, beta, decay = torch.split(operands, _widths(shape), -1)
    return DeltaInputs(mixed, gate, beta, decay, torch.full(gate.shape, torch.nan).to(gate.dtype))


def _widths(shape: DeltaShape) -> list[int]:
    values = shape.value_heads * shape.value_dim
    return [shape.channels, values, shape.value_heads, shape.decays]


def make_segments(runs: Sequence[Run]) -> StateSegments:
    lengths = tuple(run.length for run in runs)
    return StateSegments(
        torch.tensor([0, *lengths]).cumsum(0).int(),
        torch.tensor([run.source for run in runs], dtype=torch.int32),
        torch.tensor([run.target for run in runs], dtype=torch.int32),
        lengths,
    )


def apply(
    rule: DeltaRule,
    weights: DeltaWeights,
    inputs: DeltaInputs,
    state: DeltaState,
    runs: Sequence[Run],
) -> Tensor:
    """Run a step, and return its outputs."""
    rule.apply(weights, inputs, state, make_segments(runs))
    return inputs.out


def assert_equal_in_any_steps(
    step: Callable[[Tensor, Sequence[Run]], Tensor], operands: Tensor, expected: Tensor, chunk: int
) -> None:
    """Run a prompt at once, in chunks behind snapshots, by token, and beside another sequence.

    step: runs operands [tokens, width] over 9 slots; expected: [tokens, outputs]; chunk: tokens of
    the first chunks.
    """

    def check(outputs: Tensor, wanted: Tensor) -> None:
        torch.testing.assert_close(outputs, wanted, atol=1e-4, rtol=1e-4)

    check(step(operands, [Run(len(operands), -1, 0)]), expected)
    end = chunk + 31
    runs = [Run(chunk, -1, 1), Run(30, 1, 2), Run(1, 2, 3)]
    check(step(operands[:end], runs), expected[:end])
    some = (slice(end - 1, end + 2), slice(40), slice(end, end + 1))
    runs = [Run(3, 2, 4), Run(40, -1, 5), Run(1, 3, 6)]
    beside = torch.cat([operands[rows] for rows in some])
    check(step(beside, runs), torch.cat([expected[rows] for rows in some]))
    last = 4
    for token in range(end + 2, end + 19):
        slot = 7 + token % 2
        one = slice(token, token + 1)
        check(step(operands[one], [Run(1, last, slot)]), expected[one])
        last = slot
