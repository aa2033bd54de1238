"""Activation functions of feed-forward layers."""

from dataclasses import dataclass
from enum import Enum

import torch
from torch import Tensor
from torch.nn.functional import gelu, relu, silu

__all__ = ["SWIGLU", "Activation", "Nonlinearity"]


class Nonlinearity(Enum):
    """Nonlinearities; most values are the names that config.json uses."""

    SILU = "silu"
    GELU = "gelu"
    GELU_TANH = "gelu_pytorch_tanh"
    RELU_SQUARED = "relu2"
    """relu(x)² (https://arxiv.org/abs/2109.08668)"""
    CLAMPED_SWIGLU = "clamped_swiglu"
    """gpt-oss: clamp(gate) * sigmoid(alpha * clamp(gate)) * (clamp(up) + 1)"""


@dataclass(frozen=True, slots=True)
class Activation:
    """A nonlinearity, alone or as the gate of a second product.

    Gated linear units: https://arxiv.org/abs/2002.05202.
    """

    nonlinearity: Nonlinearity
    gated: bool = True
    alpha: float = 1.0
    """Factor inside the sigmoid of CLAMPED_SWIGLU"""
    limit: float = 0.0
    """Bound of CLAMPED_SWIGLU's factors"""

    def apply(self, product: Tensor) -> Tensor:
        """Return [n, width] for a product [n, width], or [n, 2 * width] (gates first) if gated."""
        if not self.gated:
            return self._nonlinear(product)
        gate, up = product.chunk(2, dim=1)
        if self.nonlinearity is not Nonlinearity.CLAMPED_SWIGLU:
            return self._nonlinear(gate) * up
        gate, up = gate.clamp(max=self.limit), up.clamp(-self.limit, self.limit)
        return gate * torch.sigmoid(self.alpha * gate) * (up + 1)

    def _nonlinear(self, rows: Tensor) -> Tensor:
        if self.nonlinearity is Nonlinearity.SILU:
            return silu(rows)
        if self.nonlinearity is Nonlinearity.RELU_SQUARED:
            return relu(rows).square()
        exact = self.nonlinearity is Nonlinearity.GELU
        return gelu(rows, approximate="none" if exact else "tanh")


SWIGLU = Activation(Nonlinearity.SILU)
"""The only activation that the CPU kernels implement"""
