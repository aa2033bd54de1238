"""What a feed-forward layer applies between its two products."""

from dataclasses import dataclass
from enum import Enum

import torch
from torch import Tensor
from torch.nn.functional import gelu, silu

__all__ = ["SWIGLU", "Activation", "Nonlinearity"]


class Nonlinearity(Enum):
    """By the names that config.json knows them by."""

    SILU = "silu"
    GELU = "gelu"
    GELU_TANH = "gelu_pytorch_tanh"
    CLAMPED_SWIGLU = "clamped_swiglu"
    """gpt-oss: both factors clamped, the gate's sigmoid steeper, the other factor one more"""


@dataclass(frozen=True, slots=True)
class Activation:
    """A nonlinearity, and whether it gates a second product (https://arxiv.org/abs/2002.05202)."""

    nonlinearity: Nonlinearity
    gated: bool = True
    alpha: float = 1.0
    """Gain of the clamped sigmoid"""
    limit: float = 0.0
    """What the clamped factors are clamped to"""

    @property
    def is_swiglu(self) -> bool:
        """Whether it is the one that the kernels know."""
        return self == SWIGLU

    def of(self, product: Tensor) -> Tensor:
        """[n, width] of a product [n, width], or where it gates of [n, 2 * width]: gates first."""
        if not self.gated:
            return self._bend(product)
        gate, up = product.chunk(2, dim=1)
        if self.nonlinearity is not Nonlinearity.CLAMPED_SWIGLU:
            return self._bend(gate) * up
        gate, up = gate.clamp(max=self.limit), up.clamp(-self.limit, self.limit)
        return gate * torch.sigmoid(self.alpha * gate) * (up + 1)

    def _bend(self, rows: Tensor) -> Tensor:
        if self.nonlinearity is Nonlinearity.SILU:
            return silu(rows)
        exact = self.nonlinearity is Nonlinearity.GELU
        return gelu(rows, approximate="none" if exact else "tanh")


SWIGLU = Activation(Nonlinearity.SILU)
