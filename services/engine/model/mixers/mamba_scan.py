"""Interface of the state space scan of Mamba-2 (https://arxiv.org/abs/2405.21060)."""

from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch
from torch import Tensor

from services.engine.batch.step_batch import StateSegments
from services.engine.model.architecture.mamba_shape import MambaShape
from services.engine.model.mixers.gated_norm import GatedNorm

__all__ = ["MambaConstants", "MambaInputs", "MambaScan", "MambaState"]


@dataclass(frozen=True, slots=True)
class MambaConstants:
    """One layer's constants, in float32 and contiguous."""

    convolution: Tensor
    """[conv_width, channels], the newest token's factors last"""
    convolution_bias: Tensor | None
    """[channels]"""
    rates: Tensor
    """[heads], negative logarithm of the decay for a time step of 1; above 0"""
    step_bias: Tensor
    """[heads]"""
    skip: Tensor
    """[heads], factor of the input that is added to the output"""
    norm: GatedNorm


@dataclass(frozen=True, slots=True)
class MambaState:
    """One layer's states, by slot. New slots hold zeros; reused ones hold arbitrary numbers."""

    last: Tensor
    """[slots, conv_width - 1, channels] in the model's dtype: the last tokens' inputs, the newest
    last"""
    states: Tensor
    """[slots, heads, state_width, head_dim]"""


@dataclass(frozen=True, slots=True)
class MambaInputs:
    """One step's operands in the model's dtype. Rows may have gaps between them."""

    gate: Tensor
    """[tokens, outputs]"""
    mixed: Tensor
    """[tokens, channels], read by the convolution: inputs of all heads, then the factors (B) of
    the inputs of all groups, then those of outputs (C)"""
    steps: Tensor
    """[tokens, heads], before `step_bias` and the softplus"""
    out: Tensor
    """[tokens, outputs], the result after the gate and the norm"""
    convolved: Tensor
    """float32 [tokens, channels], space for the convolution's output; contiguous"""
    scanned: Tensor
    """float32 [tokens, outputs], space for outputs before the gate; contiguous"""


class MambaScan(ABC):
    """State space scan for one shape, dtype and device. All layers may share one.

    A token's x, B and C are SiLU(convolution). With t = softplus(step + step_bias) within bounds,
    the state S of a head becomes exp(-rate * t) * S + t * B x^T; the output is S^T C + skip * x.
    """

    def __init__(self, shape: MambaShape, dtype: torch.dtype, device: torch.device) -> None:
        """dtype: the model's."""
        self._shape = shape
        self._dtype = dtype
        self._device = device

    @abstractmethod
    def allocate(self, slots: int, dtype: torch.dtype = torch.float32) -> MambaState:
        """Allocate one layer's states. dtype: that of states that a step computes in float32 and
        then rounds."""

    def _sizes(self, slots: int) -> tuple[tuple[int, int, int], tuple[int, int, int, int]]:
        """Return the sizes of the two parts of the states."""
        shape = self._shape
        last = (slots, shape.conv_width - 1, shape.channels)
        return last, (slots, shape.heads, shape.state_width, shape.head_dim)

    @abstractmethod
    def apply(
        self,
        constants: MambaConstants,
        inputs: MambaInputs,
        state: MambaState,
        segments: StateSegments,
    ) -> None:
        """Fill `inputs.out`, and the slots that the segments name as targets."""
