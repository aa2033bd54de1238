"""Real-gated linear recurrent unit as a mixer (RG-LRU, https://arxiv.org/abs/2402.19427)."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import gelu

from services.engine.batch.step_batch import StateSegments
from services.engine.model.architecture.gated_unit_shape import GatedUnitShape
from services.engine.model.mixers.recurrent import ProjectedScratch, RecurrentMixer
from services.engine.model.mixers.runs import RunGroups, Runs, convolve
from services.engine.model.operators.interface import Operators, Projection
from services.engine.model.operators.rotation import Rotation

__all__ = ["GatedUnitMixer", "GatedUnitWeights"]


@dataclass(frozen=True, slots=True)
class GatedUnitWeights:
    """Weights of one layer's gated unit."""

    inputs: Projection
    """Product that computes the convolution's input, and the output gate"""
    convolution: Tensor
    """float32 [conv_width, channels], the newest token's factors last"""
    bias: Tensor
    """float32 [channels]"""
    gates: Tensor
    """float32 [heads, head_width, 2 * head_width], product that makes input gates, then decays"""
    gate_bias: Tensor
    """float32 [heads, 1, 2 * head_width]"""
    decay: Tensor
    """float32 [channels], logarithm of the strongest decay, negative"""
    output: Projection


class GatedUnitMixer(RecurrentMixer[ProjectedScratch]):
    """The gated unit of layer `layer`: GELU of the output gate * recurrence(convolution(inputs)).

    A channel's state decays by a number that depends on the token. Then the token's input is added,
    scaled so that the state's variance stays.
    """

    def __init__(
        self,
        layer: int,
        shape: GatedUnitShape,
        weights: GatedUnitWeights,
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
        channels = self._shape.channels
        widths = (2 * channels, channels, channels)
        return ProjectedScratch(*(self._operators.empty(tokens, width) for width in widths))

    def allocate_states(self, slots: int, dtype: torch.dtype) -> tuple[Tensor, ...]:
        """Allocate the inputs of the last tokens, and the state of each channel.

        They are [slots, conv_width - 1, channels] and [slots, channels].
        """
        shape, made = self._shape, self._weights.decay
        last = made.new_zeros(slots, shape.conv_width - 1, shape.channels, dtype=self._dtype)
        return last, made.new_zeros(slots, shape.channels, dtype=dtype)

    def project(
        self, rows: Tensor, scratch: ProjectedScratch, rotations: Sequence[Rotation]
    ) -> None:
        self._weights.inputs.into(rows, scratch.inputs)

    def advance(
        self, scratch: ProjectedScratch, state: tuple[Tensor, ...], segments: StateSegments
    ) -> None:
        (last, states), weights = state, self._weights
        for runs in self._groups.of(segments):
            inputs, gate = scratch.inputs[runs.rows].chunk(2, dim=-1)
            inputs = convolve(inputs, last, runs, weights.convolution, weights.bias)
            mixed = self._recur(inputs, states, runs)
            scratch.out[runs.rows] = mixed.to(gate.dtype) * gelu(gate, approximate="tanh")

    def _recur(self, inputs: Tensor, states: Tensor, runs: Runs) -> Tensor:
        """Return the states after each token, and store the last ones.

        inputs: float32 [runs, length, channels]; states: [slots, channels]. Returns float32 [runs,
        length, channels].
        """
        decays, added = self._gated(inputs, runs)
        current = runs.before(states).float()
        behind = []
        for decay, addend in zip(decays.unbind(1), added.unbind(1), strict=True):
            current = current * decay + addend
            behind.append(current)
        states[runs.targets] = current.to(states.dtype)
        return torch.stack(behind, dim=1)

    def _gated(self, inputs: Tensor, runs: Runs) -> tuple[Tensor, Tensor]:
        """Return each token's decays and its addend to the state, both in the shape of `inputs`."""
        weights, shape = self._weights, self._shape
        heads = inputs.reshape(-1, shape.heads, shape.head_width).transpose(0, 1)
        gates = torch.baddbmm(weights.gate_bias, heads, weights.gates).sigmoid_().transpose(0, 1)
        opened, decaying = (gate.reshape(inputs.shape) for gate in gates.chunk(2, dim=2))
        logarithms = decaying * weights.decay
        scales = torch.expm1(2 * logarithms).neg_().sqrt_()
        if runs.begins is not None:  # a text's first token has no state before it
            scales[:, 0].masked_fill_(runs.begins[:, None], 1.0)
        return logarithms.exp(), inputs * opened * scales
