"""Rotary position embeddings (RoPE, https://arxiv.org/abs/2104.09864) and their scalings."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from services.engine.model.checkpoint.config import CheckpointError, Config
from services.engine.model.checkpoint.family import MultimodalAxes

__all__ = ["Rotaries", "Rotary", "RotarySpec", "Rotation"]


@dataclass(frozen=True, slots=True)
class RotarySpec:
    """Rotation frequencies after the checkpoint's RoPE scaling."""

    frequencies: tuple[float, ...]
    """Radians per position, one per pair of dimensions; the remaining pairs do not rotate, and none
    does if there are no radians"""
    attention_factor: float
    """Factor on cosines and sines; other than 1 for YaRN and LongRoPE only"""
    axes: tuple[int, ...] = ()
    """For each pair, the position that turns it in multimodal RoPE
    (https://arxiv.org/abs/2409.12191): 0 time, 1 row, 2 column; empty: there is one position"""
    query_growth: float = 0.0
    """Queries are multiplied by 1 + query_growth * log(1 + position // query_period)"""
    query_period: int = 1
    query_offset: int = 0
    """Number that is added to the position before it is divided by query_period"""

    @property
    def width(self) -> int:
        """Number of dimensions of a head that rotate."""
        return 2 * len(self.frequencies)

    @staticmethod
    def from_config(
        config: Config,
        head_dim: int,
        context_length: int,
        axes: MultimodalAxes = MultimodalAxes.NONE,
        *,
        is_whole: bool = False,
    ) -> "RotarySpec":
        """Read rope_parameters (transformers 5), or the older rope_theta and rope_scaling.

        is_whole: all of head_dim rotates, whatever partial_rotary_factor says.
        """
        rope = config.section(
            "rope_parameters" if config.has("rope_parameters") else "rope_scaling"
        )
        if rope.has("full_attention"):
            rope = rope.section("full_attention")
        base = rope.positive_number("rope_theta", config.positive_number("rope_theta", 10000.0))
        spec = _read(config, rope, base, head_dim, context_length, is_whole=is_whole)
        growth, period = rope.number("llama_4_scaling_beta", 0.0), 1
        if growth:
            period = rope.positive("original_max_position_embeddings")
        return replace(
            spec,
            axes=_axes(rope, axes, len(spec.frequencies)),
            query_growth=growth,
            query_period=period,
        )

    @staticmethod
    def growth_from_config(config: Config) -> "RotarySpec | None":
        """Read the growth of queries in Llama 4's layers without rotation; None: none grow."""
        if not config.flag("attn_temperature_tuning", True):
            return None
        return RotarySpec(
            (),
            attention_factor=1.0,
            query_growth=config.number("attn_scale"),
            query_period=config.positive("floor_scale"),
            query_offset=1,
        )

    @staticmethod
    def local_from_config(config: Config, head_dim: int, context_length: int) -> "RotarySpec":
        """Read the separate frequencies of Gemma 3's sliding-window layers."""
        rope = config.section("rope_parameters").section("sliding_attention")
        base = rope.positive_number(
            "rope_theta", config.positive_number("rope_local_base_freq", 10000.0)
        )
        return _read(config, rope, base, head_dim, context_length)


def _read(
    config: Config,
    rope: Config,
    base: float,
    head_dim: int,
    context_length: int,
    *,
    is_whole: bool = False,
) -> RotarySpec:
    whole = config.positive("rotary_dim", head_dim) / head_dim
    share = rope.positive_number(
        "partial_rotary_factor", config.positive_number("partial_rotary_factor", whole)
    )
    width = head_dim if is_whole else int(head_dim * share)
    if not 0 < width <= head_dim or width % 2:
        raise CheckpointError(
            f"{config.file}: a partial_rotary_factor of {share} rotates {width} of {head_dim} "
            "dimensions, which is not supported."
        )
    frequencies = _frequencies(base, width)
    factor = 1.0
    # Older files name the key "type".
    kind = rope.text("rope_type" if rope.has("rope_type") else "type", "default")
    match kind:
        # HunYuan calls its fixed stretching of the base dynamic scaling.
        case "dynamic" if rope.has("alpha"):
            shares = torch.arange(0, width, 2) / max(width - 2, 1)
            frequencies = frequencies / rope.positive_number("alpha") ** shares
        # Dynamic scaling applies beyond max_position_embeddings, which no sequence exceeds.
        case "default" | "dynamic":
            pass
        case "mrope":  # its three positions are equal for text
            pass
        case "proportional":
            frequencies = _proportional(base, head_dim, width) / rope.positive_number("factor", 1.0)
        case "ntk" if not rope.has("mixed_b"):  # GTE's, which applies at every length
            stretch = rope.positive_number("factor")
            frequencies = _frequencies(base * stretch, width) / stretch ** (2 / width)
        case "linear":
            frequencies = frequencies / rope.positive_number("factor")
        case "llama3":
            frequencies = _llama3(frequencies, rope)
        case "yarn":
            frequencies = _yarn(frequencies, rope, base, width, context_length)
            factor = _yarn_attention(rope, context_length)
        case "longrope" | "su":
            original = _original_length(config, rope)
            frequencies = _longrope(rope, base, width, is_long=context_length > original)
            factor = _longrope_attention(rope, context_length, original)
            mscale = "long_mscale" if context_length > original else "short_mscale"
            factor = rope.number(mscale, factor)  # keys that only PhiMoE has
        case _:
            raise CheckpointError(
                f"{config.file}: rope_type {kind} is not supported. Supported: "
                "default, linear, proportional, dynamic, ntk, llama3, yarn, longrope, mrope."
            )
    return RotarySpec(tuple(frequencies.tolist()), factor)


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


class Rotary:
    """Computation of a step's rotation.

    Each step computes it anew: a table would take 0.5 GB at 1M positions.
    """

    def __init__(self, spec: RotarySpec, head_dim: int, device: torch.device) -> None:
        axes = (*spec.axes, *(0 for _ in range(head_dim // 2 - len(spec.axes))))
        self._axes = torch.tensor(axes, dtype=torch.int64, device=device)
        self._frequencies = torch.zeros(head_dim // 2, device=device)
        self._frequencies[: len(spec.frequencies)] = torch.tensor(spec.frequencies)
        self._growth, self._period = spec.query_growth, spec.query_period
        self._offset = spec.query_offset
        self._factors: Tensor | None = None
        if spec.attention_factor != 1.0:
            self._factors = torch.ones(head_dim // 2, device=device)
            self._factors[: len(spec.frequencies)] = spec.attention_factor

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


def _axes(rope: Config, layout: MultimodalAxes, pairs: int) -> tuple[int, ...]:
    """Return the axis of each pair, from the numbers of pairs of each axis."""
    if layout is MultimodalAxes.NONE:
        return ()
    sections = rope.ids("mrope_section") or layout.value
    if len(sections) != 3 or sum(sections) != pairs or min(sections) < 0:
        raise CheckpointError(
            f"{rope.file}: mrope_section must be three numbers with the sum {pairs}, "
            f"not {list(sections)}."
        )
    if layout is MultimodalAxes.IN_SECTIONS:
        return tuple(axis for axis, count in enumerate(sections) for _ in range(count))
    axes = [0] * pairs
    for axis in (1, 2):
        for pair in range(axis, min(3 * sections[axis], pairs), 3):
            axes[pair] = axis
    return tuple(axes)


def _frequencies(base: float, width: int, divisors: Tensor | float = 1.0) -> Tensor:
    exponents = torch.arange(0, width, 2, dtype=torch.int64).to(torch.float32) / width
    return 1.0 / (divisors * base**exponents)


def _proportional(base: float, head_dim: int, width: int) -> Tensor:
    """Return a whole head's frequencies; the pairs beyond `width` don't rotate."""
    frequencies = _frequencies(base, head_dim)
    frequencies[width // 2 :] = 0
    return frequencies


def _llama3(frequencies: Tensor, rope: Config) -> Tensor:
    """Scale as Llama 3.1 does: stretch long wavelengths, keep short ones, interpolate between."""
    factor = rope.positive_number("factor")
    low, high = rope.positive_number("low_freq_factor"), rope.positive_number("high_freq_factor")
    original = rope.positive_number("original_max_position_embeddings")
    wavelengths = 2 * math.pi / frequencies
    smooth = (original / wavelengths - low) / (high - low)
    between = (1 - smooth) * frequencies / factor + smooth * frequencies
    scaled = torch.where(wavelengths > original / low, frequencies / factor, frequencies)
    is_between = (wavelengths >= original / high) & (wavelengths <= original / low)
    return torch.where(is_between, between, scaled)


def _yarn(
    frequencies: Tensor, rope: Config, base: float, width: int, context_length: int
) -> Tensor:
    """Scale by YaRN's NTK-by-parts interpolation (https://arxiv.org/abs/2309.00071)."""
    original = rope.positive_number("original_max_position_embeddings", context_length)
    if base == 1:
        raise CheckpointError(f"{rope.file}: rope_theta must not be 1 with rope_type yarn.")

    def dimension(rotations: float) -> float:
        return width * math.log(original / (rotations * 2 * math.pi)) / (2 * math.log(base))

    low, high = (
        dimension(rope.positive_number("beta_fast", 32.0)),
        dimension(rope.positive_number("beta_slow", 1.0)),
    )
    if rope.flag("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, width - 1)
    if low == high:
        high += 0.001  # a ramp of zero width would divide by zero
    ramp = ((torch.arange(width // 2, dtype=torch.float32) - low) / (high - low)).clamp(0, 1)
    return frequencies / _yarn_factor(rope, context_length) * ramp + frequencies * (1 - ramp)


def _yarn_factor(rope: Config, context_length: int) -> float:
    if rope.has("factor"):
        return rope.positive_number("factor")
    return context_length / rope.positive_number("original_max_position_embeddings")


def _yarn_attention(rope: Config, context_length: int) -> float:
    if rope.has("attention_factor"):
        return rope.number("attention_factor")
    factor = _yarn_factor(rope, context_length)

    def scale(weight: float) -> float:
        return 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0

    mscale, over_all = rope.number("mscale", 0.0), rope.number("mscale_all_dim", 0.0)
    return scale(mscale) / scale(over_all) if mscale and over_all else scale(1.0)


def _longrope(rope: Config, base: float, width: int, *, is_long: bool) -> Tensor:
    """Divide each frequency by LongRoPE's factor for it (https://arxiv.org/abs/2402.13753).

    The checkpoint has one set of factors up to the original length and one beyond. Cached keys keep
    the rotation they were written with, so all sequences use one set, chosen by context length.
    """
    key = "long_factor" if is_long else "short_factor"
    divisors = rope.numbers(key)
    if len(divisors) != width // 2 or min(divisors) <= 0:
        raise CheckpointError(
            f"{rope.file}: {key} must have {width // 2} positive numbers, not {len(divisors)}."
        )
    return _frequencies(base, width, torch.tensor(divisors, dtype=torch.float32))


def _longrope_attention(rope: Config, context_length: int, original: float) -> float:
    if rope.has("attention_factor"):
        return rope.number("attention_factor")
    factor = rope.positive_number("factor", context_length / original)
    if factor > 1 and original <= 1:
        raise CheckpointError(
            f"{rope.file}: original_max_position_embeddings must be above 1, not {original}."
        )
    return math.sqrt(1 + math.log(factor) / math.log(original)) if factor > 1 else 1.0


def _original_length(config: Config, rope: Config) -> float:
    key = "original_max_position_embeddings"
    return rope.positive_number(key) if rope.has(key) else config.positive_number(key)
