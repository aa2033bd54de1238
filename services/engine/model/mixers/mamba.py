"""Mamba-2 as a mixer: projections around a convolution and a state space scan."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from services.engine.batch.step_batch import StateSegments
from services.engine.model.architecture.mamba_shape import MambaShape
from services.engine.model.mixers.mamba_scan import (
    MambaConstants,
    MambaInputs,
    MambaScan,
    MambaState,
)
from services.engine.model.mixers.recurrent import RecurrentMixer, RecurrentScratch
from services.engine.model.operators.interface import Operators, Projection
from services.engine.model.operators.rotation import Rotation

__all__ = ["MambaMixer", "MambaScratch", "MambaWeights"]


@dataclass(frozen=True, slots=True)
class MambaWeights:
    """Weights of one Mamba-2 layer."""

    inputs: Projection
    """Product that computes the gate and the convolution's input"""
    steps: Projection
    """Product that computes the time steps"""
    constants: MambaConstants
    output: Projection


@dataclass(frozen=True, slots=True)
class MambaScratch(RecurrentScratch):
    """Outputs of the input projections, and space for the scan."""

    inputs: Tensor
    """[tokens, outputs + channels]"""
    gate: Tensor
    """[tokens, outputs], a view of `inputs`"""
    mixed: Tensor
    """[tokens, channels], inputs of the convolution, a view of `inputs`"""
    steps: Tensor
    """[tokens, heads]"""
    convolved: Tensor
    """float32 [tokens, channels]"""
    scanned: Tensor
    """float32 [tokens, outputs]"""
    out: Tensor
    arranged: Tensor

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        joined = (self.inputs, self.steps, self.convolved)
        return *joined, self.scanned, self.out, self.arranged


class MambaMixer(RecurrentMixer[MambaScratch]):
    """The Mamba-2 layer `layer`."""

    def __init__(
        self,
        layer: int,
        shape: MambaShape,
        weights: MambaWeights,
        operators: Operators,
        scan: MambaScan,
    ) -> None:
        super().__init__(layer, weights.output, operators)
        self.scratch_key = shape
        self._shape = shape
        self._weights = weights
        self._scan = scan

    def allocate(self, tokens: int) -> MambaScratch:
        shape, empty = self._shape, self._operators.empty
        device = self._weights.constants.rates.device
        out, arranged = (empty(tokens, shape.outputs) for _ in range(2))
        inputs = empty(tokens, shape.outputs + shape.channels)
        gate, mixed = inputs.split_with_sizes((shape.outputs, shape.channels), dim=1)
        return MambaScratch(
            inputs=inputs,
            gate=gate,
            mixed=mixed,
            steps=empty(tokens, shape.heads),
            convolved=torch.empty((tokens, shape.channels), device=device),
            scanned=torch.empty((tokens, shape.outputs), device=device),
            out=out,
            arranged=arranged,
        )

    def allocate_states(self, slots: int, dtype: torch.dtype) -> tuple[Tensor, ...]:
        state = self._scan.allocate(slots, dtype)
        return state.last, state.states

    def project(self, rows: Tensor, scratch: MambaScratch, rotations: Sequence[Rotation]) -> None:
        self._weights.inputs.into(rows, scratch.inputs)
        self._weights.steps.into(rows, scratch.steps)

    def advance(
        self, scratch: MambaScratch, state: tuple[Tensor, ...], segments: StateSegments
    ) -> None:
        inputs = MambaInputs(
            scratch.gate,
            scratch.mixed,
            scratch.steps,
            scratch.out,
            scratch.convolved,
            scratch.scanned,
        )
        self._scan.apply(self._weights.constants, inputs, MambaState(*state), segments)
