"""Mixture of experts as a loop in Python."""

from collections.abc import Iterable
from contextlib import nullcontext
from typing import NamedTuple

import torch
from torch import Tensor

from services.engine.model.architecture.activation import Activation
from services.engine.model.checkpoint.quantized import QuantizedWeight, decoded
from services.engine.model.operators.composed_projections import AdaptedProjection
from services.engine.model.operators.deltas import ExpertDeltas
from services.engine.model.operators.interface import (
    ExpertWeights,
    Gate,
    Mixture,
    Operators,
    Projection,
)

__all__ = ["Expert", "LoopedMixture"]


class Expert(NamedTuple):
    """An expert: two linear layers with an activation between them."""

    gate: Gate
    down: Projection
    width: int
    """Number of outputs of the gate"""


class LoopedMixture(Mixture):
    """Mixture computed by a loop over the chosen experts, whose numbers the host reads."""

    def __init__(
        self, experts: Iterable[ExpertWeights], activation: Activation, operators: Operators
    ) -> None:
        self.experts = [
            Expert(
                _gate_of(each, activation, operators),
                _down_of(each, operators),
                each.down.shape[1],
            )
            for each in experts
        ]
        self._operators = operators
        self.weight_bytes = sum(
            gate.weight_bytes + down.weight_bytes for gate, down, _ in self.experts
        )
        self._deltas: ExpertDeltas | None = None

    @property
    def is_adapted(self) -> bool:
        """True if adapters add to the products of the present step."""
        return self._deltas is not None and self._deltas.is_active

    def adapt(self, deltas: ExpertDeltas) -> None:
        self._deltas = deltas
        for number, (gate, down, width) in enumerate(self.experts):
            gate.adapt(deltas.gates[number])
            adapted = AdaptedProjection(down, deltas.downs[number])
            self.experts[number] = Expert(gate, adapted, width)

    def add_to(self, rows: Tensor, chosen: Tensor, factors: Tensor, out: Tensor) -> None:
        deltas = self._deltas if self.is_adapted else None
        total = torch.zeros(out.shape, device=out.device)
        # In the order of the experts' numbers, a row's sum is independent of the batch.
        for number in sorted(set(chosen.flatten().tolist())):
            if number >= len(self.experts):  # all experts from here on have no weights
                returning = factors.masked_fill(chosen < len(self.experts), 0).sum(1, keepdim=True)
                total += self._operators.plain(rows) * returning
                break
            index, choice = torch.where(chosen == number)
            gate, down, width = self.experts[number]
            hidden = self._operators.temporary(len(index), width)
            output = self._operators.temporary(len(index), out.shape[1])
            has_all = len(index) == len(rows)
            some = rows if has_all else self._operators.gather(rows, index)
            with nullcontext() if deltas is None else deltas.routed(index):
                gate.into(some, hidden)
                down.into(hidden, output)
            total[index] += output * factors[index, choice, None]
        out += total


def _gate_of(expert: ExpertWeights, activation: Activation, operators: Operators) -> Gate:
    gate, up, biases = expert.gate, expert.up, (expert.gate_bias, expert.up_bias)
    if isinstance(gate, QuantizedWeight) and isinstance(up, QuantizedWeight | None):
        return operators.grouped_gate(gate, up, *biases, activation)
    factor = None if up is None else decoded(up)
    return operators.gate(decoded(gate), factor, *biases, activation)


def _down_of(expert: ExpertWeights, operators: Operators) -> Projection:
    if isinstance(expert.down, QuantizedWeight):
        return operators.grouped_projection([expert.down], expert.down_bias)
    return operators.projection(decoded(expert.down), expert.down_bias)
