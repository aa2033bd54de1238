"""Rotations of a step's positions, by the RoPE of each layer."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from services.engine.model.architecture.rope_scaling import (
    DividedRope,
    Llama3Rope,
    LongRope,
    PartialRope,
    StretchedRope,
    YarnRope,
)
from services.engine.model.architecture.rotary import RotarySpec

__all__ = ["Rotaries", "Rotary", "Rotation", "UnrotatedHeads", "frequencies"]


@dataclass(frozen=True, slots=True)
class Rotation:
    """Cosines and sines of one step's positions, float32 [tokens, head_dim / 2], contiguous.

    Dimension i is paired with dimension i + head_dim / 2.
    """

    cosines: Tensor
    sines: Tensor
    query_scales: Tensor | None = None
    """float32 [tokens], factors on the queries; None: there are none"""

    def first(self, tokens: int) -> "Rotation":
        scales = None if self.query_scales is None else self.query_scales[:tokens]
        return Rotation(self.cosines[:tokens], self.sines[:tokens], scales)


@dataclass(frozen=True, slots=True)
class UnrotatedHeads:
    """Queries, keys and values of a step before RoPE: views of one tensor, alike in their gaps."""

    heads: Tensor
    """[tokens, heads + kv_heads, head_dim], queries, then keys; only tokens may have gaps"""
    values: Tensor
    """[tokens, kv_heads, value_dim]"""
    rotation: Rotation
    query_norm: Tensor | None
    """[head_dim], RMSNorm before the rotation; None: there is none, and none of the keys"""
    key_norm: Tensor | None
    epsilon: float
    """Epsilon of both norms"""


class Rotary:
    """Computation of a step's rotation.

    Each step computes it anew: a table would take 0.5 GB at 1M positions.
    """

    def __init__(self, spec: RotarySpec, head_dim: int, device: torch.device) -> None:
        axes = (*spec.axes, *(0 for _ in range(head_dim // 2 - len(spec.axes))))
        self._axes = torch.tensor(axes, dtype=torch.int64, device=device)
        self._frequencies = torch.zeros(head_dim // 2, device=device)
        self._frequencies[: spec.width // 2] = frequencies(spec)
        self._growth, self._period = spec.query_growth, spec.query_period
        self._offset = spec.query_offset
        self._factors: Tensor | None = None
        if spec.attention_factor != 1.0:
            self._factors = torch.ones(head_dim // 2, device=device)
            self._factors[: spec.width // 2] = spec.attention_factor

    def empty(self, tokens: int) -> Rotation:
        """Allocate a rotation for this number of positions."""
        size = (tokens, len(self._frequencies))
        device = self._frequencies.device
        scales = torch.empty(tokens, device=device) if self._growth else None
        return Rotation(torch.empty(size, device=device), torch.empty(size, device=device), scales)

    def compute(self, positions: Tensor, out: Rotation) -> None:
        """Write the rotation of `positions` to `out`.

        positions: int64 [tokens], or [3, tokens] with a time, a row and a column each.
        """
        angles = out.sines
        if out.query_scales is not None:
            places = positions if positions.dim() == 1 else positions[0]
            periods = (places + self._offset) // self._period
            out.query_scales.copy_(periods).log1p_().mul_(self._growth).add_(1)
        if positions.dim() == 2:
            turns = positions.index_select(0, self._axes).T.to(torch.float32)
            torch.mul(turns, self._frequencies, out=angles)
            torch.cos(angles, out=out.cosines)
            angles.sin_()
        elif angles.device.type == "cpu":
            # numpy, because torch would wake OpenMP threads for a few hundred numbers.
            host = angles.numpy()
            np.multiply.outer(positions.numpy(), self._frequencies.numpy(), out=host, dtype="f4")
            np.cos(host, out=out.cosines.numpy())
            np.sin(host, out=host)
        else:
            torch.outer(positions.to(torch.float32), self._frequencies, out=angles)
            torch.cos(angles, out=out.cosines)
            angles.sin_()
        if self._factors is not None:
            out.cosines.mul_(self._factors)
            out.sines.mul_(self._factors)


class Rotaries:
    """Computation of all rotations of a step: one for each distinct RoPE of the layers."""

    def __init__(self, layers: Iterable[tuple[RotarySpec, int]], device: torch.device) -> None:
        """layers: RoPE and head dimension of each layer that has RoPE."""
        self._distinct = list(dict.fromkeys(layers))
        self._rotaries = [Rotary(*each, device) for each in self._distinct]

    def index(self, rotary: RotarySpec, head_dim: int) -> int:
        """Return the place of a layer's rotation among those of a step."""
        return self._distinct.index((rotary, head_dim))

    def allocate(self, tokens: int) -> tuple[Rotation, ...]:
        """Allocate the rotations of this number of positions."""
        return tuple(rotary.empty(tokens) for rotary in self._rotaries)

    def compute(self, positions: Tensor, out: Sequence[Rotation]) -> None:
        """Write all rotations of `positions`, as `Rotary.compute` does."""
        for rotary, rotation in zip(self._rotaries, out, strict=True):
            rotary.compute(positions, rotation)


def frequencies(spec: RotarySpec) -> Tensor:
    """Return the radians per position of each pair of dimensions, float32 [width / 2]."""
    plain = _frequencies(spec.base, spec.width)
    match spec.scaling:
        case None:
            return plain
        case DividedRope(factor):
            return plain / factor
        case StretchedRope(factor):
            shares = torch.arange(0, spec.width, 2) / max(spec.width - 2, 1)
            return plain / factor**shares
        case PartialRope(pairs, factor):
            plain[pairs:] = 0
            return plain / factor
        case Llama3Rope():
            return _llama3(plain, spec.scaling)
        case YarnRope(factor, low, high):
            numbers = torch.arange(spec.width // 2, dtype=torch.float32)
            ramp = ((numbers - low) / (high - low)).clamp(0, 1)
            return plain / factor * ramp + plain * (1 - ramp)
        case LongRope(divisors):
            by = torch.tensor(divisors, dtype=torch.float32)
            return _frequencies(spec.base, spec.width, by)


def _frequencies(base: float, width: int, divisors: Tensor | float = 1.0) -> Tensor:
    exponents = torch.arange(0, width, 2, dtype=torch.int64).to(torch.float32) / width
    return 1.0 / (divisors * base**exponents)


def _llama3(plain: Tensor, scaling: Llama3Rope) -> Tensor:
    """Scale as Llama 3.1 does: stretch long wavelengths, keep short ones, interpolate between."""
    factor, low, high, original = scaling.factor, scaling.low, scaling.high, scaling.original
    wavelengths = 2 * math.pi / plain
    smooth = (original / wavelengths - low) / (high - low)
    between = (1 - smooth) * plain / factor + smooth * plain
    scaled = torch.where(wavelengths > original / low, plain / factor, plain)
    is_between = (wavelengths >= original / high) & (wavelengths <= original / low)
    return torch.where(is_between, between, scaled)
