"""Gated delta net as a mixer: projections around the gated delta rule."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from services.engine.batch.step_batch import StateSegments
from services.engine.model.architecture.delta_shape import DeltaShape
from services.engine.model.mixers.delta_rule import (
    DeltaInputs,
    DeltaRule,
    DeltaState,
    DeltaWeights,
)
from services.engine.model.mixers.recurrent import RecurrentMixer, RecurrentScratch
from services.engine.model.operators.interface import Operators, Projection
from services.engine.model.operators.rotation import Rotation

__all__ = ["DeltaNetMixer", "DeltaNetScratch", "DeltaNetWeights"]


@dataclass(frozen=True, slots=True)
class DeltaNetWeights:
    """Weights of one layer's gated delta net."""

    inputs: Projection
    """Product that computes the inputs of the convolution, and the output gate if `gate` is None"""
    rates: Projection
    """Product that computes beta, and the decay if `decay` is None"""
    gate: Projection | None
    decay: Projection | None
    rule: DeltaWeights
    output: Projection


@dataclass(frozen=True, slots=True)
class DeltaNetScratch(RecurrentScratch):
    """Outputs of the input projections, and the output of the rule."""

    inputs: Tensor
    mixed: Tensor
    """[tokens, channels]"""
    gate: Tensor
    """[tokens, outputs]"""
    rates: Tensor
    beta: Tensor
    """[tokens, value_heads]"""
    decay: Tensor
    """[tokens, decays]"""
    out: Tensor
    """[tokens, outputs], row by row"""
    arranged: Tensor
    """[tokens, outputs], in the layout that products read"""
    has_pairs: bool
    """True if gate and decay have products of their own"""

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        joined = (self.inputs, self.rates, self.out, self.arranged)
        return (*joined, self.gate, self.decay) if self.has_pairs else joined


class DeltaNetMixer(RecurrentMixer[DeltaNetScratch]):
    """The gated delta net of layer `layer`."""

    def __init__(
        self,
        layer: int,
        shape: DeltaShape,
        weights: DeltaNetWeights,
        operators: Operators,
        rule: DeltaRule,
    ) -> None:
        super().__init__(layer, weights.output, operators)
        self.scratch_key = shape
        self._shape = shape
        self._weights = weights
        self._rule = rule

    def allocate(self, tokens: int) -> DeltaNetScratch:
        shape, empty = self._shape, self._operators.empty
        out, arranged = (empty(tokens, shape.outputs) for _ in range(2))
        if shape.rank:
            mixed, gate = empty(tokens, shape.channels), empty(tokens, shape.outputs)
            beta, decay = empty(tokens, shape.value_heads), empty(tokens, shape.decays)
            joined = (mixed, mixed, gate, beta, beta, decay)
            return DeltaNetScratch(*joined, out, arranged, has_pairs=True)
        inputs = empty(tokens, shape.channels + shape.outputs)
        mixed, gate = inputs.split_with_sizes((shape.channels, shape.outputs), dim=1)
        rates = empty(tokens, shape.value_heads + shape.decays)
        beta, decay = rates.split_with_sizes((shape.value_heads, shape.decays), dim=1)
        joined = (inputs, mixed, gate, rates, beta, decay)
        return DeltaNetScratch(*joined, out, arranged, has_pairs=False)

    def allocate_states(self, slots: int, dtype: torch.dtype) -> tuple[Tensor, ...]:
        state = self._rule.allocate(slots, dtype)
        return state.convolution, state.recurrent

    def project(
        self, rows: Tensor, scratch: DeltaNetScratch, rotations: Sequence[Rotation]
    ) -> None:
        self._weights.inputs.into(rows, scratch.inputs)
        self._weights.rates.into(rows, scratch.rates)
        if self._weights.gate is not None and self._weights.decay is not None:
            self._weights.gate.into(rows, scratch.gate)
            self._weights.decay.into(rows, scratch.decay)

    def advance(
        self, scratch: DeltaNetScratch, state: tuple[Tensor, ...], segments: StateSegments
    ) -> None:
        inputs = DeltaInputs(scratch.mixed, scratch.gate, scratch.beta, scratch.decay, scratch.out)
        self._rule.apply(self._weights.rule, inputs, DeltaState(*state), segments)
