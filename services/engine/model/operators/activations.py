"""Activation functions and gates, computed by torch."""

import torch
from torch import Tensor
from torch.nn.functional import gelu, relu, silu, softplus

from services.engine.model.architecture.activation import Activation, GateFunction, Nonlinearity

__all__ = ["activated", "gate_factors"]


def gate_factors(function: GateFunction, gates: Tensor) -> Tensor:
    """Return the factors that gates make."""
    return gates.sigmoid() if function is GateFunction.SIGMOID else softplus(gates)


def activated(activation: Activation, product: Tensor) -> Tensor:
    """Return [n, width] for a product [n, width], or [n, 2 * width] (gates first) if gated."""
    if not activation.gated:
        return _nonlinear(activation, product)
    gate, up = product.chunk(2, dim=1)
    if activation.cutoff is not None:
        deviation, mean = torch.std_mean(gate, dim=1, correction=0, keepdim=True)
        gate = relu(gate - (mean + activation.cutoff * deviation))
    if activation.nonlinearity not in (Nonlinearity.CLAMPED_SWIGLU, Nonlinearity.CLAMPED_SILU):
        return _nonlinear(activation, gate) * up
    limit = activation.limit
    gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    if activation.nonlinearity is Nonlinearity.CLAMPED_SILU:
        return silu(gate) * up
    return gate * torch.sigmoid(activation.alpha * gate) * (up + 1)


def _nonlinear(activation: Activation, rows: Tensor) -> Tensor:
    match activation.nonlinearity:
        case Nonlinearity.SILU:
            return silu(rows)
        case Nonlinearity.XIELU:
            return _xielu(activation, rows.float()).to(rows.dtype)
        case Nonlinearity.RELU:
            return relu(rows)
        case Nonlinearity.RELU_SQUARED:
            return relu(rows).square()
    exact = activation.nonlinearity is Nonlinearity.GELU
    return gelu(rows, approximate="none" if exact else "tanh")


def _xielu(activation: Activation, rows: Tensor) -> Tensor:
    positive = activation.alpha * rows.square()
    exponentials = torch.expm1(rows.clamp(max=activation.limit))
    negative = activation.negative_alpha * (exponentials - rows)
    return torch.where(rows > 0, positive, negative) + activation.beta * rows
