"""Interface of the gated delta rule: a linear attention with one state for each sequence.

https://arxiv.org/abs/2412.06464; with a decay for each channel, https://arxiv.org/abs/2510.26692.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch
from torch import Tensor

from services.engine.batch.step_batch import StateSegments
from services.engine.model.architecture.delta_shape import DeltaShape, OutputGate

__all__ = [
    "L2_EPSILON",
    "DeltaInputs",
    "DeltaRule",
    "DeltaShape",
    "DeltaState",
    "DeltaWeights",
    "OutputGate",
]

L2_EPSILON = 1e-6
"""Addend to the sum of squares of a query and of a key, before the square root"""


@dataclass(frozen=True, slots=True)
class DeltaWeights:
    """One layer's constants, in float32 and contiguous. Make them with `prepare`."""

    convolution: Tensor
    """[conv_width, channels], the newest token's factors last"""
    convolution_bias: Tensor | None
    """[channels]"""
    rates: Tensor
    """[value_heads], factor above 0 of the decay's logarithm"""
    decay_bias: Tensor
    """[decays]"""
    norm: Tensor
    """[value_dim]"""

    @staticmethod
    def prepare(
        convolution: Tensor,
        convolution_bias: Tensor | None,
        a_log: Tensor,
        dt_bias: Tensor,
        norm: Tensor,
    ) -> "DeltaWeights":
        """Convert a checkpoint's tensors of any dtype.

        convolution: [channels, conv_width] or [channels, 1, conv_width]. a_log: `value_heads`
        elements. dt_bias: `decays` elements.
        """
        return DeltaWeights(
            convolution.flatten(1).T.float().contiguous(),
            None if convolution_bias is None else convolution_bias.float().contiguous(),
            a_log.float().exp().flatten(),
            dt_bias.float().flatten().contiguous(),
            norm.float().contiguous(),
        )


@dataclass(frozen=True, slots=True)
class DeltaState:
    """One layer's states, by slot. New slots hold zeros; reused ones hold arbitrary numbers."""

    convolution: Tensor
    """[slots, conv_width - 1, channels] in the model's dtype: the last tokens' inputs, the newest
    last"""
    recurrent: Tensor
    """[slots, value_heads, key_dim, value_dim] float32 or bfloat16"""


@dataclass(frozen=True, slots=True)
class DeltaInputs:
    """One step's operands in the model's dtype. Rows may have gaps between them."""

    mixed: Tensor
    """[tokens, channels], inputs of the convolution: all queries, all keys, then all values"""
    gate: Tensor
    """[tokens, value_heads * value_dim]"""
    beta: Tensor
    """[tokens, value_heads], before the sigmoid"""
    decay: Tensor
    """[tokens, decays], before `decay_bias` and the softplus or sigmoid"""
    out: Tensor
    """[tokens, value_heads * value_dim], the result after the norm and the gate"""


class DeltaRule(ABC):
    """Gated delta rule for one shape, dtype and device. All layers may share one.

    A token's queries, keys and values are SiLU(convolution), in which queries and keys get length
    1. With x = decay + decay_bias, g = exp(-rate * softplus(x)), or exp(least_decay * sigmoid(rate
    * x)) if decays are bounded. With beta = sigmoid, the state S becomes g * S, then S + beta * key
    (value - S^T key)^T; the output is S^T query / sqrt(key_dim).
    """

    def __init__(self, shape: DeltaShape, dtype: torch.dtype, device: torch.device) -> None:
        """dtype: the model's."""
        self._shape = shape
        self._dtype = dtype
        self._device = device

    @abstractmethod
    def allocate(self, slots: int, dtype: torch.dtype = torch.float32) -> DeltaState:
        """Allocate one layer's states. dtype: that of the recurrent states, which a step computes
        in float32 and then rounds."""

    def bytes_per_slot(self, dtype: torch.dtype = torch.float32) -> int:
        """Return the bytes of one layer's slot."""
        shape = self._shape
        recurrent = shape.value_heads * shape.key_dim * shape.value_dim
        convolution = (shape.conv_width - 1) * shape.channels
        return recurrent * dtype.itemsize + convolution * self._dtype.itemsize

    @abstractmethod
    def apply(
        self,
        weights: DeltaWeights,
        inputs: DeltaInputs,
        state: DeltaState,
        segments: StateSegments,
    ) -> None:
        """Fill `inputs.out`, and the slots that the segments name as targets."""
