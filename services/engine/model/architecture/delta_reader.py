"""Gated delta nets of a decoder, read from config.json."""

import math
from collections.abc import Mapping

from services.engine.model.architecture.delta_shape import DeltaShape, OutputGate
from services.engine.model.checkpoint.config import CheckpointError, Config
from services.engine.model.checkpoint.family import Family, WindowRule

__all__ = ["read_delta_layers"]

_KINDS = ("linear_attention", "full_attention")


def read_delta_layers(config: Config, family: Family, num_layers: int) -> Mapping[int, DeltaShape]:
    """Read the layers that are gated delta nets, by number. Raises CheckpointError."""
    assert family.names.delta_net is not None
    try:
        if family.names.delta_net.decays_channels:
            shape = _channel_shape(config, has_pairs=family.names.delta_net.decay is not None)
        else:
            shape = _head_shape(config)
    except ValueError as error:
        raise CheckpointError(f"{config.file}: {error}.") from None
    has_windows = family.windows is not WindowRule.NONE
    kinds = enumerate(_kinds(config, num_layers, has_windows=has_windows))
    return {layer: shape for layer, kind in kinds if kind == "linear_attention"}


def _head_shape(config: Config) -> DeltaShape:
    """Read a shape in which each head decays as a whole."""
    key_heads = config.positive("linear_num_key_heads")
    value_heads = config.positive("linear_num_value_heads")
    if value_heads % key_heads:
        raise CheckpointError(
            f"{config.file}: linear_num_value_heads ({value_heads}) is not a multiple of "
            f"linear_num_key_heads ({key_heads})."
        )
    return DeltaShape(
        key_heads=key_heads,
        value_heads=value_heads,
        key_dim=config.positive("linear_key_head_dim"),
        value_dim=config.positive("linear_value_head_dim"),
        conv_width=config.positive("linear_conv_kernel_dim"),
        norm_epsilon=config.positive_number(
            "linear_norm_eps", config.positive_number("rms_norm_eps", 1e-6)
        ),
        doubles_beta=config.flag("linear_allow_neg_eigval", False),
    )


def _channel_shape(config: Config, *, has_pairs: bool) -> DeltaShape:
    """Read the shape of Kimi's delta attention, in which each channel of a key decays.

    has_pairs: two products in a row make the output gate, and two the decay.
    """
    published = config.section("linear_attn_config")
    heads, size, width = (
        config.positive(key if config.has(key) else other)
        for key, other in (
            ("linear_num_heads", "num_attention_heads"),
            ("linear_head_dim", "head_dim"),
            ("linear_conv_kernel_dim", "short_conv_kernel_size"),
        )
    )
    heads = published.positive("num_heads", heads)
    size = published.positive("head_dim", size)
    return DeltaShape(
        key_heads=heads,
        value_heads=heads,
        key_dim=size,
        value_dim=size,
        conv_width=published.positive("short_conv_kernel_size", width),
        norm_epsilon=config.positive_number("rms_norm_eps", 1e-6),
        gate=OutputGate.SIGMOID,
        decays_channels=True,
        least_decay=_least_decay(config),
        rank=size if has_pairs else 0,
    )


def _least_decay(config: Config) -> float:
    """Return the lower bound of the decays' logarithms; 0: there is none."""
    if not config.flag("kda_safe_gate", False):
        return 0.0
    bound = config.number("kda_lower_bound")
    if not -math.inf < bound < 0:
        raise CheckpointError(f"{config.file}: kda_lower_bound must be below 0, got {bound}.")
    return bound


def _kinds(config: Config, num_layers: int, *, has_windows: bool) -> tuple[str, ...]:
    """Return the kind of each layer."""
    if config.has("layer_types"):
        known = (*_KINDS, *("sliding_attention",) * has_windows)
        return config.kind_per_layer("layer_types", num_layers, known)
    published = config.section("linear_attn_config")
    if published.has("kda_layers"):
        return _published_kinds(published, num_layers)
    interval = config.positive("full_attention_interval")
    return tuple(_KINDS[(layer + 1) % interval == 0] for layer in range(num_layers))


def _published_kinds(published: Config, num_layers: int) -> tuple[str, ...]:
    """Return the kinds by Kimi's own lists, which number the layers from 1."""
    linear, numbers = published.integers("kda_layers"), range(1, num_layers + 1)
    others = full = [layer for layer in numbers if layer not in linear]
    if published.has("full_attn_layers"):
        full = sorted(published.integers("full_attn_layers"))
    if full != others or not set(linear) <= set(numbers):
        raise CheckpointError(
            f"{published.file}: kda_layers and full_attn_layers of linear_attn_config must name "
            f"each layer from 1 to {num_layers} once."
        )
    return tuple(_KINDS[layer in others] for layer in numbers)
