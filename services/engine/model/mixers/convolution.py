"""Gated short convolution as a mixer: https://arxiv.org/abs/2511.23404."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from services.engine.batch.step_batch import StateSegments
from services.engine.model.architecture.convolution_shape import ConvolutionShape
from services.engine.model.mixers.recurrent import ProjectedScratch, RecurrentMixer
from services.engine.model.mixers.runs import RunGroups, convolve
from services.engine.model.operators.interface import Operators, Projection
from services.engine.model.operators.rotation import Rotation

__all__ = ["ConvolutionMixer", "ConvolutionWeights"]


@dataclass(frozen=True, slots=True)
class ConvolutionWeights:
    """Weights of one layer's short convolution."""

    inputs: Projection
    """Product that computes the input gate, the output gate, and the convolution's input"""
    convolution: Tensor
    """float32 [conv_width, channels], the newest token's factors last"""
    bias: Tensor | None
    """float32 [channels]"""
    output: Projection


class ConvolutionMixer(RecurrentMixer[ProjectedScratch]):
    """The short convolution of layer `layer`: output gate * convolution(input gate * value)."""

    def __init__(
        self,
        layer: int,
        shape: ConvolutionShape,
        weights: ConvolutionWeights,
        operators: Operators,
        groups: RunGroups,
        dtype: torch.dtype,
    ) -> None:
        """groups: runs' groups, which all layers share; dtype: the model's."""
        super().__init__(layer, weights.output, operators)
        self.scratch_key = shape
        self._shape = shape
        self._weights = weights
        self._groups = groups
        self._dtype = dtype

    def allocate(self, tokens: int) -> ProjectedScratch:
        widths = (3 * self._shape.channels, self._shape.channels, self._shape.channels)
        return ProjectedScratch(*(self._operators.empty(tokens, width) for width in widths))

    def allocate_states(self, slots: int, dtype: torch.dtype) -> tuple[Tensor, ...]:
        """Allocate the inputs of the last tokens: [slots, conv_width - 1, channels]."""
        convolution, shape = self._weights.convolution, self._shape
        sizes = (slots, shape.conv_width - 1, shape.channels)
        return (convolution.new_zeros(sizes, dtype=self._dtype),)

    def project(
        self, rows: Tensor, scratch: ProjectedScratch, rotations: Sequence[Rotation]
    ) -> None:
        self._weights.inputs.into(rows, scratch.inputs)

    def advance(
        self, scratch: ProjectedScratch, state: tuple[Tensor, ...], segments: StateSegments
    ) -> None:
        (last,), weights = state, self._weights
        for runs in self._groups.of(segments):
            opened, closed, values = scratch.inputs[runs.rows].chunk(3, dim=-1)
            mixed = convolve(opened * values, last, runs, weights.convolution, weights.bias)
            scratch.out[runs.rows] = closed * mixed.to(closed.dtype)
