"""Multi-head latent attention, read from config.json."""

import math
from dataclasses import replace

from services.engine.model.architecture.index_spec import IndexSpec
from services.engine.model.architecture.latent_spec import LatentSpec
from services.engine.model.architecture.rotary import RotarySpec
from services.engine.model.checkpoint.config import CheckpointError, Config
from services.engine.model.checkpoint.family import Family

__all__ = ["read_latent_layers"]

_EPSILON = 1e-6
"""Epsilon of the norms within attention, whatever rms_norm_eps says"""


def read_latent_layers(
    config: Config, family: Family, hidden_size: int, context_length: int, num_layers: int
) -> list[LatentSpec]:
    """Read the latent attention of all layers. Raises CheckpointError."""
    dense = _read_latent(config, family, hidden_size, context_length)
    names = family.names.latent
    if names is None or names.index is None:
        return [dense] * num_layers
    with_indexer = replace(
        dense,
        attended_tokens=config.positive("index_topk"),
        index=_read_index(config, dense),
    )
    reusing = replace(with_indexer, index=None)
    have_indexers = _layers_with_indexers(config, num_layers)
    return [with_indexer if has_indexer else reusing for has_indexer in have_indexers]


def _read_index(config: Config, latent: LatentSpec) -> IndexSpec:
    width = config.positive("index_head_dim")
    if width < latent.shared_width:
        raise CheckpointError(
            f"{config.file}: index_head_dim ({width}) must be at least qk_rope_head_dim "
            f"({latent.shared_width})."
        )
    if not latent.query_width:
        raise CheckpointError(
            f"{config.file}: q_lora_rank is missing, of which indexers make their queries."
        )
    return IndexSpec(
        num_heads=config.positive("index_n_heads"),
        width=width,
        is_interleaved=config.flag("indexer_rope_interleave", False),
    )


def _layers_with_indexers(config: Config, num_layers: int) -> list[bool]:
    """Return for each layer whether it chooses tokens; others use the choice of the last."""
    if config.has("indexer_types"):
        kinds = config.kind_per_layer("indexer_types", num_layers, ("full", "shared"))
        chooses = [kind == "full" for kind in kinds]
    elif config.has("index_topk_pattern"):
        pattern = config.text("index_topk_pattern")
        if len(pattern) < num_layers or set(pattern) - set("FS"):
            raise CheckpointError(
                f"{config.file}: index_topk_pattern must have F or S for each of {num_layers} "
                f"layers, got {pattern}."
            )
        chooses = [letter == "F" for letter in pattern[:num_layers]]
    else:
        every = config.positive("index_topk_freq", 1)
        offset = config.integer("index_skip_topk_offset", 2)
        chooses = [max(layer - offset + 1, 0) % every == 0 for layer in range(num_layers)]
    if not chooses[0]:
        raise CheckpointError(
            f"{config.file}: the first layer has no indexer, and no layer before it to choose "
            "tokens."
        )
    return chooses


def _read_latent(
    config: Config, family: Family, hidden_size: int, context_length: int
) -> LatentSpec:
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
    query_width = config.positive("q_lora_rank") if config.has("q_lora_rank") else 0
    latent_width = config.positive("kv_lora_rank")
    return LatentSpec(
        num_heads=num_heads,
        query_width=query_width,
        latent_width=latent_width,
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
        query_factor=_vector_factor(config, "mla_scale_q_lora", hidden_size, query_width),
        latent_factor=_vector_factor(config, "mla_scale_kv_lora", hidden_size, latent_width),
        has_output_gate=family.names.output_gate is not None,
    )


def _vector_factor(config: Config, key: str, hidden_size: int, width: int) -> float:
    """Return the factor that makes vectors of this width as long as the residual (LongCat)."""
    return (hidden_size / width) ** 0.5 if width and config.flag(key, False) else 1.0


def _yarn_scale(config: Config) -> float:
    """Return DeepSeek's factor on query-key products in contexts stretched by YaRN."""
    rope = config.section("rope_parameters" if config.has("rope_parameters") else "rope_scaling")
    weight = rope.number("mscale_all_dim", 0.0)
    kind = rope.text("rope_type" if rope.has("rope_type") else "type", "default")
    if kind == "default" or not weight:
        return 1.0
    factor = rope.positive_number("factor")
    return (0.1 * weight * math.log(factor) + 1.0) ** 2 if factor > 1 else 1.0
