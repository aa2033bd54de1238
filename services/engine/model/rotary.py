"""Rotary position embeddings (RoPE, https://arxiv.org/abs/2104.09864) and their scalings."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from services.engine.model.config import Config
from services.engine.model.errors import CheckpointError

__all__ = ["Rotary", "RotarySpec", "Rotation"]


@dataclass(frozen=True, slots=True)
class RotarySpec:
    """The rotation's frequencies, already scaled as the checkpoint asks."""

    frequencies: tuple[float, ...]
    """[head_dim / 2] radians per position"""
    attention_factor: float
    """What cosines and sines are multiplied by (YaRN); 1 otherwise"""

    @staticmethod
    def from_config(config: Config, head_dim: int, context_length: int) -> "RotarySpec":
        """Reads rope_parameters (transformers 5), or rope_theta and rope_scaling before it."""
        rope = config.section(
            "rope_parameters" if config.has("rope_parameters") else "rope_scaling"
        )
        base = rope.number("rope_theta", config.number("rope_theta", 10000.0))
        if rope.number("partial_rotary_factor", 1.0) != 1.0:
            raise CheckpointError(f"{config.file}: a partial_rotary_factor is not supported.")
        frequencies = _frequencies(base, head_dim)
        # Before "rope_type", the key was "type".
        kind = rope.text("rope_type" if rope.has("rope_type") else "type", "default")
        match kind:
            # Dynamic scaling changes nothing until a sequence is longer than
            # max_position_embeddings, and none ever is.
            case "default" | "dynamic":
                return RotarySpec(tuple(frequencies.tolist()), 1.0)
            case "linear":
                return RotarySpec(tuple((frequencies / rope.number("factor")).tolist()), 1.0)
            case "llama3":
                return RotarySpec(tuple(_llama3(frequencies, rope).tolist()), 1.0)
            case "yarn":
                scaled = _yarn(frequencies, rope, base, head_dim, context_length)
                return RotarySpec(tuple(scaled.tolist()), _yarn_attention(rope, context_length))
        raise CheckpointError(
            f"{config.file}: rope_type {kind} is not supported; these are: "
            "default, linear, dynamic, llama3, yarn."
        )


@dataclass(frozen=True, slots=True)
class Rotation:
    """Cosines and sines of one step's positions, float32 [tokens, head_dim / 2], contiguous."""

    cosines: Tensor
    sines: Tensor


class Rotary:
    """Makes a step's rotation. Computed each step: a table would weigh 0.5 GB at 1M positions."""

    def __init__(self, spec: RotarySpec, device: torch.device) -> None:
        self._frequencies = torch.tensor(spec.frequencies, dtype=torch.float32, device=device)
        self._factor = spec.attention_factor

    def at(self, positions: Tensor) -> Rotation:
        """`positions`: int64 [tokens]."""
        angles = torch.outer(positions.to(torch.float32), self._frequencies)
        if self._factor == 1.0:
            return Rotation(angles.cos(), angles.sin())
        return Rotation(angles.cos() * self._factor, angles.sin() * self._factor)


def _frequencies(base: float, head_dim: int) -> Tensor:
    exponents = torch.arange(0, head_dim, 2, dtype=torch.int64).to(torch.float32) / head_dim
    return 1.0 / (base**exponents)


def _llama3(frequencies: Tensor, rope: Config) -> Tensor:
    """Llama 3.1: long wavelengths are stretched, short ones kept, those between interpolated."""
    factor = rope.number("factor")
    low, high = rope.number("low_freq_factor"), rope.number("high_freq_factor")
    original = rope.number("original_max_position_embeddings")
    wavelengths = 2 * math.pi / frequencies
    smooth = (original / wavelengths - low) / (high - low)
    between = (1 - smooth) * frequencies / factor + smooth * frequencies
    scaled = torch.where(wavelengths > original / low, frequencies / factor, frequencies)
    is_between = (wavelengths >= original / high) & (wavelengths <= original / low)
    return torch.where(is_between, between, scaled)


def _yarn(
    frequencies: Tensor, rope: Config, base: float, head_dim: int, context_length: int
) -> Tensor:
    """YaRN (https://arxiv.org/abs/2309.00071): NTK-by-parts interpolation."""
    original = rope.number("original_max_position_embeddings", context_length)

    def dimension(rotations: float) -> float:
        return head_dim * math.log(original / (rotations * 2 * math.pi)) / (2 * math.log(base))

    low, high = dimension(rope.number("beta_fast", 32.0)), dimension(rope.number("beta_slow", 1.0))
    if rope.flag("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    if low == high:
        high += 0.001  # a step instead of a ramp would divide by zero
    ramp = ((torch.arange(head_dim // 2, dtype=torch.float32) - low) / (high - low)).clamp(0, 1)
    return frequencies / _yarn_factor(rope, context_length) * ramp + frequencies * (1 - ramp)


def _yarn_factor(rope: Config, context_length: int) -> float:
    if rope.has("factor"):
        return rope.number("factor")
    return context_length / rope.number("original_max_position_embeddings")


def _yarn_attention(rope: Config, context_length: int) -> float:
    if rope.has("attention_factor"):
        return rope.number("attention_factor")
    factor = _yarn_factor(rope, context_length)

    def scale(weight: float) -> float:
        return 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0

    mscale, over_all = rope.number("mscale", 0.0), rope.number("mscale_all_dim", 0.0)
    return scale(mscale) / scale(over_all) if mscale and over_all else scale(1.0)
