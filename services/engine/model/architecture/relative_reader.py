"""Layers of Inkling, read from config.json: attention with addends by distance, convolutions."""

from collections.abc import Sequence
from dataclasses import replace

from services.common.json_values import Json
from services.engine.model.architecture.layers import (
    AttentionSpec,
    ConvolvedFeedForward,
    DenseSpec,
    ExpertsSpec,
    FeedForwardSpec,
    LayerSpec,
    MixerSpec,
    NoFeedForward,
)
from services.engine.model.architecture.relative_shape import RelativeShape
from services.engine.model.checkpoint.config import CheckpointError, Config
from services.engine.model.checkpoint.family import QkNorm

__all__ = ["read_relative_layers", "with_convolved_parts", "with_inkling_keys"]

_WINDOW, _WHOLE = "hybrid_sliding", "hybrid"
_PERIOD = 6
"""Period of the layers that see all tokens, if a file does not list the layers"""
_CONTEXT = 131_072


def with_inkling_keys(config: Config) -> Config:
    """Return a config with the keys that other families have. Raises CheckpointError.

    Published files name layers by number and call the width of dense layers
    dense_intermediate_size; files of transformers list the kinds of all layers.
    """
    num_layers = config.positive("num_hidden_layers")
    local: Sequence[int] = [layer for layer in range(num_layers) if (layer + 1) % _PERIOD]
    if config.has("local_layer_ids"):
        local = config.integers("local_layer_ids")
    num_dense = config.integer("dense_mlp_idx", 0)
    values: dict[str, Json] = {
        "layer_types": [_WINDOW if layer in local else _WHOLE for layer in range(num_layers)],
        "mlp_layer_types": ["dense" if n < num_dense else "sparse" for n in range(num_layers)],
        "max_position_embeddings": config.positive("max_position_embeddings", _CONTEXT),
    }
    values |= {key: value for key in values if (value := config.values.get(key)) is not None}
    if config.has("dense_intermediate_size"):
        values["moe_intermediate_size"] = config.positive("intermediate_size")
        values["intermediate_size"] = config.positive("dense_intermediate_size")
    values["logit_scale"] = 1 / config.positive_number("logits_mup_width_multiplier", 24.0)
    values["tie_word_embeddings"] = False  # transformers ties nothing, whatever the file says
    vocab_size = config.positive("vocab_size")
    unpadded = config.positive("unpadded_vocab_size", vocab_size)
    values["vocab_size"] = min(unpadded, vocab_size)
    values["stored_vocab_size"] = vocab_size
    return replace(config, values={**config.values, **values})


def read_relative_layers(config: Config, num_layers: int) -> list[AttentionSpec]:
    """Read the attention of all layers. config: result of `with_inkling_keys`.

    Raises CheckpointError for a missing or mistyped value, and for values that contradict one
    another.
    """
    kinds = config.kind_per_layer("layer_types", num_layers, (_WINDOW, _WHOLE))
    if (conv_width := _conv_width(config)) == 1:
        raise CheckpointError(f"{config.file}: conv_kernel_size must be at least 2, got 1.")
    growth, period = 0.0, 1
    if config.has("log_scaling_n_floor"):
        growth = config.number("log_scaling_alpha", 0.1)
        period = config.positive("log_scaling_n_floor")
    rank, window = config.positive("d_rel", 16), config.positive("sliding_window", 512)
    whole = RelativeShape(
        rank, config.positive("rel_extent", 1024), conv_width, growth=growth, period=period
    )
    near = RelativeShape(rank, window, conv_width)
    layers = {
        _WHOLE: _attention(config, "", 0, whole),
        _WINDOW: _attention(config, "swa_", window, near),
    }
    return [layers[kind] for kind in kinds]


def with_convolved_parts(
    config: Config, attention: Sequence[MixerSpec], feed_forwards: Sequence[FeedForwardSpec]
) -> tuple[LayerSpec, ...]:
    """Return two layers for each stored one: attention, and the feed-forward layer with its
    convolution."""
    conv_width = _conv_width(config)
    layers: list[LayerSpec] = []
    for place, (mixer, content) in enumerate(zip(attention, feed_forwards, strict=True)):
        assert isinstance(content, DenseSpec | ExpertsSpec)
        layers += [
            LayerSpec(mixer, NoFeedForward(), place=f"{place}"),
            LayerSpec(ConvolvedFeedForward(content, conv_width), NoFeedForward(), place=f"{place}"),
        ]
    return tuple(layers)


def _conv_width(config: Config) -> int:
    return config.positive("conv_kernel_size", 4)


def _attention(config: Config, prefix: str, window: int, relative: RelativeShape) -> AttentionSpec:
    """Read the heads of one kind of layers. prefix: that of the keys that describe them."""
    keys = [f"{prefix}{name}" for name in ("num_attention_heads", "num_key_value_heads")]
    num_heads, num_kv_heads = config.positive(keys[0], 64), config.positive(keys[1])
    if num_heads % num_kv_heads:
        raise CheckpointError(
            f"{config.file}: {keys[0]} ({num_heads}) is not a multiple of {keys[1]} "
            f"({num_kv_heads})."
        )
    head_dim = config.positive(f"{prefix}head_dim", 128)
    return AttentionSpec(
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        scale=1 / head_dim,
        cap=0.0,
        window=window,
        rotary=None,
        qkv_bias=False,
        output_bias=False,
        has_sinks=False,
        qk_norm=QkNorm.HEAD,
        gate=None,
        relative=relative,
    )
