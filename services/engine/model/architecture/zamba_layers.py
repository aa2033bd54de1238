"""Layers of Zamba, read from config.json: a hybrid depth is a shared block, then a Mamba layer."""

import math
from collections.abc import Sequence
from dataclasses import replace

from services.common.json_values import Json
from services.engine.model.architecture.layers import (
    AttentionSpec,
    FeedForwardSpec,
    LayerSpec,
    MixerSpec,
    NoFeedForward,
    SharedBlockSpec,
)
from services.engine.model.checkpoint.config import CheckpointError, Config
from services.engine.model.checkpoint.family import SharedBlockNames

__all__ = ["with_zamba_keys", "zamba_layers"]

_HYBRID = "hybrid"
_KINDS = ("linear_attention", "mamba", _HYBRID)
"""Kinds of depths: Mamba alone by two names, and Mamba behind a shared block"""
_LONG_CONTEXT = 16_384
_USUAL_DEPTHS = 54
_USUAL_HYBRIDS = (6, 12, 18, 24, 30, 36, 42, 47, 51)
"""Hybrid depths of a Zamba2 file that does not list them, which then has `_USUAL_DEPTHS`"""


def with_zamba_keys(config: Config) -> Config:
    """Return a config with the keys that other families have. Raises CheckpointError."""
    hidden_size, heads = config.positive("hidden_size"), config.positive("num_attention_heads")
    width = config.positive("attention_hidden_size", 2 * hidden_size)
    if width != 2 * hidden_size:
        raise CheckpointError(
            f"{config.file}: attention_hidden_size must be twice hidden_size, got {width}."
        )
    head_dim = config.positive("attention_head_dim", width // heads)
    values: dict[str, Json] = {
        "head_dim": head_dim,
        "query_pre_attn_scalar": head_dim / 2,
        "layer_types": ["linear_attention"] * config.positive("num_hidden_layers"),
    }
    if config.has("time_step_min"):
        values["time_step_limit"] = [config.positive_number("time_step_min"), math.inf]
    if config.flag("use_mem_rope", False):
        values["position_embedding_type"] = "rope"
    if config.flag("use_long_context", False):
        values["max_position_embeddings"] = _LONG_CONTEXT
    return replace(config, values={**config.values, **values})


def zamba_layers(
    config: Config,
    names: SharedBlockNames,
    attention: Sequence[MixerSpec],
    mamba: Sequence[MixerSpec],
    feed_forwards: Sequence[FeedForwardSpec],
) -> tuple[LayerSpec, ...]:
    """Return the layers: those of a hybrid depth are a shared block and a Mamba layer.

    attention, mamba, feed_forwards: a part for each depth, whether it has this part or not.
    """
    hidden_size = config.positive("hidden_size")
    hybrids = _hybrids(config, len(mamba))
    count = config.positive("num_mem_blocks", 1)
    if not config.flag("tie_word_embeddings", True):
        count = len(hybrids)  # transformers ties no blocks then
    ranks = _ranks(config, names)
    layers: list[LayerSpec] = []
    for depth, mixer in enumerate(mamba):
        if depth not in hybrids:
            layers.append(LayerSpec(mixer, NoFeedForward(), place=f"{depth}"))
            continue
        number = hybrids.index(depth)
        shared = attention[depth]
        assert isinstance(shared, AttentionSpec)
        layers += [
            LayerSpec(
                replace(shared, input_width=2 * hidden_size),
                feed_forwards[depth],
                place=f"{hybrids[number % count]}.{names.block}",
                shared_block=SharedBlockSpec(number, depth, *ranks),
            ),
            LayerSpec(mixer, NoFeedForward(), place=f"{depth}.{names.mamba}", follows_block=True),
        ]
    return tuple(layers)


def _hybrids(config: Config, depths: int) -> list[int]:
    """Return the numbers of the depths that have a shared block."""
    if config.has("layers_block_type"):
        kinds = config.kind_per_layer("layers_block_type", depths, _KINDS)
        return [depth for depth, kind in enumerate(kinds) if kind == _HYBRID]
    if not config.has("attn_layer_period"):
        if depths != _USUAL_DEPTHS:
            raise CheckpointError(
                f"{config.file} lacks layers_block_type, without which num_hidden_layers must be "
                f"{_USUAL_DEPTHS}, got {depths}."
            )
        return [*_USUAL_HYBRIDS]
    period, offset = config.positive("attn_layer_period"), config.integer("attn_layer_offset")
    later = [depth for depth in range(3, depths) if (depth - 3) % period == offset]
    return [2, *later]


def _ranks(config: Config, names: SharedBlockNames) -> tuple[int, int]:
    """Return the ranks of the products that a depth adds to attention and to the gate; 0: none."""
    if not names.has_adapters:
        return 0, 0
    rank = config.positive("adapter_rank")
    return rank if config.flag("use_shared_attention_adapter", False) else 0, rank
