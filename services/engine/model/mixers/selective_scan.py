"""Interface of the selective scan of Mamba (https://arxiv.org/abs/2312.00752)."""

from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch
from torch import Tensor

from services.engine.batch.step_batch import StateSegments
from services.engine.model.architecture.selective_shape import SelectiveShape

__all__ = ["SelectiveConstants", "SelectiveInputs", "SelectiveScan", "SelectiveState"]


@dataclass(frozen=True, slots=True)
class SelectiveConstants:
    """One layer's constants, in float32 and contiguous."""

    convolution: Tensor
    """[conv_width, channels], the newest token's factors last"""
    convolution_bias: Tensor | None
    """[channels]"""
    rates: Tensor
    """[state_width, channels], negative logarithm of the decay for a time step of 1; above 0"""
    step_bias: Tensor
    """[channels]"""
    skip: Tensor
    """[channels], factor of the input that is added to the output"""


@dataclass(frozen=True, slots=True)
class SelectiveState:
    """One layer's states, by slot. New slots hold zeros; reused ones hold arbitrary numbers."""

    last: Tensor
    """[slots, conv_width - 1, channels] in the model's dtype: the last tokens' inputs, the newest
    last"""
    states: Tensor
    """[slots, state_width, channels]"""


@dataclass(frozen=True, slots=True)
class SelectiveInputs:
    """One step's operands in the model's dtype. Only rows of `gate` may have gaps between them."""

    convolved: Tensor
    """[tokens, channels], after the convolution and its SiLU"""
    gate: Tensor
    """[tokens, channels]"""
    steps: Tensor
    """[tokens, channels], before `step_bias` and the softplus"""
    opened: Tensor
    """float32 [tokens, state_width], factors of the inputs (B)"""
    closed: Tensor
    """float32 [tokens, state_width], factors of the outputs (C)"""
    out: Tensor
    """[tokens, channels], the result after the gate"""


class SelectiveScan(ABC):
    """Selective scan for one shape, dtype and device. All layers may share one.

    With t = softplus(step + step_bias), the state S of a channel becomes exp(-rates * t) * S +
    t * x * B; the output is (S C + skip * x) * SiLU(gate).
    """

    def __init__(self, shape: SelectiveShape, dtype: torch.dtype, device: torch.device) -> None:
        """dtype: the model's."""
        self._shape = shape
        self._dtype = dtype
        self._device = device

    @abstractmethod
    def allocate(self, slots: int, dtype: torch.dtype = torch.float32) -> SelectiveState:
        """Allocate one layer's states. dtype: that of states that a step computes in float32 and
        then rounds."""

    def _sizes(self, slots: int) -> tuple[tuple[int, int, int], tuple[int, int, int]]:
        """Return the sizes of the two parts of the states."""
        shape = self._shape
        last = (slots, shape.conv_width - 1, shape.channels)
        return last, (slots, shape.state_width, shape.channels)

    @abstractmethod
    def convolve(
        self,
        constants: SelectiveConstants,
        mixed: Tensor,
        state: SelectiveState,
        segments: StateSegments,
        out: Tensor,
    ) -> None:
        """Fill `out` with SiLU(convolution of `mixed`), and `last` of the segments' targets.

        mixed, out: [tokens, channels]; the rows of `mixed` may have gaps between them.
        """

    @abstractmethod
    def apply(
        self,
        constants: SelectiveConstants,
        inputs: SelectiveInputs,
        state: SelectiveState,
        segments: StateSegments,
    ) -> None:
        """Fill `inputs.out`, and `states` of the slots that the segments name as targets."""
