"""Mamba as a mixer: projections around and between a convolution and a selective scan."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from services.engine.batch.step_batch import StateSegments
from services.engine.model.architecture.selective_shape import SelectiveShape
from services.engine.model.mixers.recurrent import RecurrentMixer, RecurrentScratch
from services.engine.model.mixers.selective_scan import (
    SelectiveConstants,
    SelectiveInputs,
    SelectiveScan,
    SelectiveState,
)
from services.engine.model.operators.interface import Operators, Projection
from services.engine.model.operators.rotation import Rotation

__all__ = ["SelectiveMixer", "SelectiveScratch", "SelectiveWeights"]


@dataclass(frozen=True, slots=True)
class SelectiveWeights:
    """Weights of one Mamba layer."""

    inputs: Projection
    """Product that computes the convolution's input, and the gate"""
    factors: Projection
    """Product of the convolution's outputs that computes time steps, input and output factors"""
    steps: Projection
    """Product that widens the time steps to all channels"""
    norms: tuple[Tensor, ...]
    """Weights of the norms of time steps, input and output factors, in float32; empty: there are no
    norms with weights"""
    constants: SelectiveConstants
    output: Projection


@dataclass(frozen=True, slots=True)
class SelectiveScratch(RecurrentScratch):
    """Outputs of the projections, and space for the scan."""

    inputs: Tensor
    """[tokens, 2 * channels]"""
    mixed: Tensor
    """[tokens, channels], inputs of the convolution, a view of `inputs`"""
    gate: Tensor
    """[tokens, channels], a view of `inputs`"""
    convolved: Tensor
    """[tokens, channels], row by row"""
    factors: Tensor
    """[tokens, step_rank + 2 * state_width]"""
    narrow: Tensor
    """[tokens, step_rank], in the layout that products read"""
    steps: Tensor
    """[tokens, channels]"""
    out: Tensor
    arranged: Tensor

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        joined = (self.inputs, self.convolved, self.factors, self.narrow)
        return *joined, self.steps, self.out, self.arranged


class SelectiveMixer(RecurrentMixer[SelectiveScratch]):
    """The Mamba layer `layer`."""

    def __init__(
        self,
        layer: int,
        shape: SelectiveShape,
        weights: SelectiveWeights,
        operators: Operators,
        scan: SelectiveScan,
    ) -> None:
        super().__init__(layer, weights.output, operators)
        self.scratch_key = shape
        self._shape = shape
        self._weights = weights
        self._scan = scan

    def allocate(self, tokens: int) -> SelectiveScratch:
        shape, empty = self._shape, self._operators.empty
        inputs = empty(tokens, 2 * shape.channels)
        mixed, gate = inputs.chunk(2, dim=1)
        convolved, steps, out, arranged = (empty(tokens, shape.channels) for _ in range(4))
        return SelectiveScratch(
            inputs=inputs,
            mixed=mixed,
            gate=gate,
            convolved=convolved,
            factors=empty(tokens, sum(shape.factors)),
            narrow=empty(tokens, shape.step_rank),
            steps=steps,
            out=out,
            arranged=arranged,
        )

    def allocate_states(self, slots: int, dtype: torch.dtype) -> tuple[Tensor, ...]:
        state = self._scan.allocate(slots, dtype)
        return state.last, state.states

    def project(
        self, rows: Tensor, scratch: SelectiveScratch, rotations: Sequence[Rotation]
    ) -> None:
        self._weights.inputs.into(rows, scratch.inputs)

    def advance(
        self, scratch: SelectiveScratch, state: tuple[Tensor, ...], segments: StateSegments
    ) -> None:
        weights, own = self._weights, SelectiveState(*state)
        constants = weights.constants
        self._scan.convolve(constants, scratch.mixed, own, segments, scratch.convolved)
        self._operators.arrange(scratch.convolved, scratch.arranged)
        weights.factors.into(scratch.arranged, scratch.factors)
        steps, opened, closed = self._factors(scratch.factors)
        self._operators.arrange(steps.to(scratch.factors.dtype), scratch.narrow)
        weights.steps.into(scratch.narrow, scratch.steps)
        inputs = SelectiveInputs(
            scratch.convolved, scratch.gate, scratch.steps, opened, closed, scratch.out
        )
        self._scan.apply(constants, inputs, own, segments)

    def _factors(self, factors: Tensor) -> Sequence[Tensor]:
        """Return the normed time steps, input and output factors, float32 and contiguous."""
        parts = factors.float().split_with_sizes(self._shape.factors, dim=1)
        if not self._weights.norms:
            return [part.contiguous() for part in parts]
        epsilon = self._shape.norm_epsilon
        return [
            functional.rms_norm(part, part.shape[1:], weight, epsilon)
            for part, weight in zip(parts, self._weights.norms, strict=True)
        ]
