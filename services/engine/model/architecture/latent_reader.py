"""Multi-head latent attention, read from config.json."""

import math

from services.engine.model.architecture.latent_spec import LatentSpec
from services.engine.model.architecture.rotary import RotarySpec
from services.engine.model.checkpoint.config import CheckpointError, Config
from services.engine.model.checkpoint.family import Family

__all__ = ["read_latent"]

_EPSILON = 1e-6
"""Epsilon of the norms within attention, whatever rms_norm_eps says"""


def read_latent(
    config: Config, family: Family, hidden_size: int, context_length: int
) -> LatentSpec:
    """Read the shape that all layers of latent attention have. Raises CheckpointError."""
    num_heads = config.positive("num_attention_heads")
    if config.positive("num_key_value_heads", num_heads) != num_heads:
        raise CheckpointError(
            f"{config.file}: num_key_value_heads must equal num_attention_heads ({num_heads})."
        )
    key_width = config.positive("qk_nope_head_dim")
    shared_width = config.positive("qk_rope_head_dim")
    if shared_width % 2:
        raise CheckpointError(
            f"{config.file}: qk_rope_head_dim ({shared_width}) is odd, so RoPE cannot apply."
        )
    rotates = family.rotates_latents
    if not (rotates or config.flag("mla_use_nope", True)):
        raise CheckpointError(f"{config.file}: mla_use_nope is false, which is not supported.")
    scale = (key_width + shared_width) ** -0.5
    return LatentSpec(
        num_heads=num_heads,
        query_width=config.positive("q_lora_rank") if config.has("q_lora_rank") else 0,
        latent_width=config.positive("kv_lora_rank"),
        key_width=key_width,
        shared_width=shared_width,
        value_width=config.positive("v_head_dim", hidden_size // num_heads),
        scale=scale * _yarn_scale(config) if rotates else scale,
        rotary=RotarySpec.from_config(config, shared_width, context_length, is_whole=True)
        if rotates
        else None,
        is_interleaved=rotates and config.flag("rope_interleave", family.interleaved_rotary),
        has_bias=config.flag("attention_bias", False),
        norm_epsilon=_EPSILON,
    )


def _yarn_scale(config: Config) -> float:
    """Return DeepSeek's factor on query-key products in contexts stretched by YaRN."""
    rope = config.section("rope_parameters" if config.has("rope_parameters") else "rope_scaling")
    weight = rope.number("mscale_all_dim", 0.0)
    kind = rope.text("rope_type" if rope.has("rope_type") else "type", "default")
    if kind == "default" or not weight:
        return 1.0
    factor = rope.positive_number("factor")
    return (0.1 * weight * math.log(factor) + 1.0) ** 2 if factor > 1 else 1.0
