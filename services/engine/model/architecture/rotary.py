"""Rotary position embeddings (RoPE, https://arxiv.org/abs/2104.09864), read from config.json."""

import math
from dataclasses import dataclass, replace

from services.engine.model.architecture.rope_scaling import (
    DividedRope,
    Llama3Rope,
    LongRope,
    PartialRope,
    RopeScaling,
    StretchedRope,
    YarnRope,
)
from services.engine.model.checkpoint.config import CheckpointError, Config
from services.engine.model.checkpoint.family import MultimodalAxes

__all__ = ["RotarySpec"]


@dataclass(frozen=True, slots=True)
class RotarySpec:
    """Rotation of heads, with the checkpoint's RoPE scaling."""

    base: float
    """Radians per position fall from 1 with the powers of this number"""
    width: int
    """Number of dimensions of a head that rotate, in pairs; 0: none does"""
    scaling: RopeScaling | None = None
    """Change of the radians; None: there is none"""
    attention_factor: float = 1.0
    """Factor on cosines and sines; other than 1 for YaRN and LongRoPE only"""
    axes: tuple[int, ...] = ()
    """For each pair, the position that turns it in multimodal RoPE
    (https://arxiv.org/abs/2409.12191): 0 time, 1 row, 2 column; empty: there is one position"""
    query_growth: float = 0.0
    """Queries are multiplied by 1 + query_growth * log(1 + position // query_period)"""
    query_period: int = 1
    query_offset: int = 0
    """Number that is added to the position before it is divided by query_period"""

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
            axes=_axes(rope, axes, spec.width // 2),
            query_growth=growth,
            query_period=period,
        )

    @staticmethod
    def growth_from_config(config: Config) -> "RotarySpec | None":
        """Read the growth of queries in Llama 4's layers without rotation; None: none grow."""
        if not config.flag("attn_temperature_tuning", True):
            return None
        return RotarySpec(
            base=1.0,
            width=0,
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
    scaling: RopeScaling | None = None
    factor = 1.0
    # Older files name the key "type".
    kind = rope.text("rope_type" if rope.has("rope_type") else "type", "default")
    match kind:
        # HunYuan calls its fixed stretching of the base dynamic scaling.
        case "dynamic" if rope.has("alpha"):
            scaling = StretchedRope(rope.positive_number("alpha"))
        # Dynamic scaling applies beyond max_position_embeddings, which no sequence exceeds.
        case "default" | "dynamic":
            pass
        case "mrope":  # its three positions are equal for text
            pass
        case "proportional":
            scaling = PartialRope(width // 2, rope.positive_number("factor", 1.0))
            width = head_dim
        case "ntk" if not rope.has("mixed_b"):  # GTE's, which applies at every length
            stretch = rope.positive_number("factor")
            base, scaling = base * stretch, DividedRope(stretch ** (2 / width))
        case "linear":
            scaling = DividedRope(rope.positive_number("factor"))
        case "llama3":
            scaling = _llama3(rope)
        case "yarn":
            scaling = _yarn(rope, base, width, context_length)
            factor = _yarn_attention(rope, context_length)
        case "longrope" | "su":
            original = _original_length(config, rope)
            scaling = _longrope(rope, width, is_long=context_length > original)
            factor = _longrope_attention(rope, context_length, original)
            mscale = "long_mscale" if context_length > original else "short_mscale"
            factor = rope.number(mscale, factor)  # keys that only PhiMoE has
        case _:
            raise CheckpointError(
                f"{config.file}: rope_type {kind} is not supported. Supported: "
                "default, linear, proportional, dynamic, ntk, llama3, yarn, longrope, mrope."
            )
    return RotarySpec(base, width, scaling, factor)


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
    if layout in (MultimodalAxes.IN_SECTIONS, MultimodalAxes.IN_SECTIONS_OF_A_HALF):
        return tuple(axis for axis, count in enumerate(sections) for _ in range(count))
    axes = [0] * pairs
    for axis in (1, 2):
        for pair in range(axis, min(3 * sections[axis], pairs), 3):
            axes[pair] = axis
    return tuple(axes)


def _llama3(rope: Config) -> Llama3Rope:
    return Llama3Rope(
        factor=rope.positive_number("factor"),
        low=rope.positive_number("low_freq_factor"),
        high=rope.positive_number("high_freq_factor"),
        original=rope.positive_number("original_max_position_embeddings"),
    )


def _yarn(rope: Config, base: float, width: int, context_length: int) -> YarnRope:
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
    return YarnRope(_yarn_factor(rope, context_length), low, high)


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


def _longrope(rope: Config, width: int, *, is_long: bool) -> LongRope:
    """Return the divisors of all sequences.

    The checkpoint has one set of them up to the original length and one beyond. Cached keys keep
    the rotation they were written with, so all sequences use one set, chosen by context length.
    """
    key = "long_factor" if is_long else "short_factor"
    divisors = rope.numbers(key)
    if len(divisors) != width // 2 or min(divisors) <= 0:
        raise CheckpointError(
            f"{rope.file}: {key} must have {width // 2} positive numbers, not {len(divisors)}."
        )
    return LongRope(tuple(divisors))


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
