"""Activation functions of feed-forward layers."""

import math
from dataclasses import dataclass, replace
from enum import Enum

__all__ = ["SWIGLU", "Activation", "GateFunction", "Nonlinearity"]


class Nonlinearity(Enum):
    """Nonlinearities; most values are the names that config.json uses."""

    SILU = "silu"
    GELU = "gelu"
    GELU_TANH = "gelu_pytorch_tanh"
    RELU = "relu"
    RELU_SQUARED = "relu2"
    """relu(x)² (https://arxiv.org/abs/2109.08668)"""
    XIELU = "xielu"
    """alpha * x² + beta * x for x > 0, else negative_alpha * (expm1(min(x, limit)) - x) + beta * x
    (https://arxiv.org/abs/2411.13010)"""
    CLAMPED_SWIGLU = "clamped_swiglu"
    """gpt-oss: clamp(gate) * sigmoid(alpha * clamp(gate)) * (clamp(up) + 1)"""
    CLAMPED_SILU = "clamped_silu"
    """DeepSeek V4: silu(clamp(gate)) * clamp(up)"""


class GateFunction(Enum):
    """Functions of the gates that multiply the output of attention."""

    SIGMOID = "sigmoid"
    SOFTPLUS = "softplus"


@dataclass(frozen=True, slots=True)
class Activation:
    """A nonlinearity, alone or as the gate of a second product.

    Gated linear units: https://arxiv.org/abs/2002.05202.
    """

    nonlinearity: Nonlinearity
    gated: bool = True
    alpha: float = 1.0
    """Factor inside the sigmoid of CLAMPED_SWIGLU, or of XIELU's square"""
    limit: float = 0.0
    """Bound of the factors of CLAMPED_SWIGLU and CLAMPED_SILU, or of XIELU's exponent"""
    negative_alpha: float = 0.0
    beta: float = 0.0
    cutoff: float | None = None
    """Threshold of a row's gates (Gemma 3n), in standard deviations above their mean: gates become
    relu(gate - threshold). None: gates stay as they are"""

    def with_constants(
        self, positive: float, negative: float, beta: float, least: float
    ) -> "Activation":
        """Return XIELU with the alpha_p, alpha_n, beta and eps of a checkpoint."""
        return replace(
            self,
            alpha=_softplus(positive),
            negative_alpha=beta + _softplus(negative),
            beta=beta,
            limit=least,
        )


def _softplus(number: float) -> float:
    return max(number, 0.0) + math.log1p(math.exp(-abs(number)))


SWIGLU = Activation(Nonlinearity.SILU)
