"""Layers of Gemma 4, where they differ from one another."""

from collections.abc import Sequence
from dataclasses import replace

from services.engine.model.architecture.layers import (
    AttentionSpec,
    BesideSpec,
    DenseSpec,
    ExpertsSpec,
    LayerSpec,
)
from services.engine.model.architecture.rotary import RotarySpec
from services.engine.model.architecture.routing import Routing
from services.engine.model.architecture.shared_keys import layers_read
from services.engine.model.checkpoint.config import CheckpointError, Config

__all__ = ["gemma4_layers"]


def gemma4_layers(
    config: Config, layers: Sequence[LayerSpec], context_length: int
) -> tuple[LayerSpec, ...]:
    """Return Gemma 4's layers. layers: the same, all with the heads of layers with a window.

    Raises CheckpointError for a missing or mistyped value, and for values that contradict one
    another.
    """
    if config.text("use_bidirectional_attention", "none") == "all":
        raise CheckpointError(
            f"{config.file}: use_bidirectional_attention is all, which is not supported."
        )
    # transformers reads the last layer so whatever layer_types says
    last = replace(layers[-1], mixer=replace(_attention(layers[-1]), window=0))
    layers = [*layers[:-1], last]
    has_window = [_attention(layer).window > 0 for layer in layers]
    read = layers_read(config, has_window)
    return tuple(
        LayerSpec(
            mixer=replace(
                _heads(config, index, layer, context_length),
                norms_values=True,
                reads_layer=read[index],
            ),
            feed_forward=_feed_forward(config, layer, is_shared=read[index] is not None),
            input_width=config.integer("hidden_size_per_layer_input"),
            has_scalar=True,
        )
        for index, layer in enumerate(layers)
    )


def _attention(layer: LayerSpec) -> AttentionSpec:
    assert isinstance(layer.mixer, AttentionSpec)
    return layer.mixer


def _heads(config: Config, index: int, layer: LayerSpec, context_length: int) -> AttentionSpec:
    """Return the attention of a layer with its own heads, and their RoPE."""
    attention = _attention(layer)
    if attention.window:
        return attention
    own = config.section("per_layer_config").section(str(index))
    keys_are_values = config.flag("attention_k_eq_v", False)
    kv_heads = attention.num_kv_heads
    if keys_are_values:
        kv_heads = config.positive("num_global_key_value_heads", kv_heads)
    head_dim = own.positive("head_dim", config.positive("global_head_dim", attention.head_dim))
    kv_heads = own.positive("num_key_value_heads", kv_heads)
    if head_dim % 2 or attention.num_heads % kv_heads:
        raise CheckpointError(
            f"{config.file}: layer {index} has {attention.num_heads} heads of {head_dim} and "
            f"{kv_heads} key heads, which is not supported."
        )
    return replace(
        attention,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        rotary=RotarySpec.from_config(config, head_dim, context_length),
        keys_are_values=keys_are_values,
    )


def _feed_forward(config: Config, layer: LayerSpec, *, is_shared: bool) -> DenseSpec | BesideSpec:
    dense = layer.feed_forward
    assert isinstance(dense, DenseSpec)
    if is_shared and config.flag("use_double_wide_mlp", False):
        dense = replace(dense, width=2 * dense.width)
    if not config.flag("enable_moe_block", False):
        return dense
    count, per_token = config.positive("num_experts"), config.positive("top_k_experts")
    if per_token > count:
        raise CheckpointError(
            f"{config.file}: top_k_experts ({per_token}) exceeds the {count} experts."
        )
    experts = ExpertsSpec(
        count=count,
        routing=Routing(per_token, normalized=True),
        width=config.positive("moe_intermediate_size"),
        activation=dense.activation,
        has_bias=False,
        is_mxfp4=False,
        shared=None,
    )
    return BesideSpec(dense, experts)
