"""Layers that are a mixer or a feed-forward layer alone, as in Nemotron-H."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

from services.engine.model.architecture.layers import (
    FeedForwardSpec,
    LayerSpec,
    MixerSpec,
    NoFeedForward,
    NoMixer,
)
from services.engine.model.checkpoint.config import CheckpointError, Config

__all__ = ["single_parts", "with_parts"]

_LETTERS: Mapping[str, str] = {
    "M": "linear_attention",
    "*": "full_attention",
    "-": "mlp",
    "E": "moe",
}
_PUBLISHED = {"mamba": "linear_attention", "attention": "full_attention"}
"""Transformers' names of kinds, by the names in published files"""
_KINDS = (*_LETTERS.values(), *_PUBLISHED)
_FEED_FORWARD = ("mlp", "moe")


def with_parts(config: Config) -> Config:
    """Return a config with the keys that other families have: kinds of mixers, and layers with
    experts. Raises CheckpointError for a kind that is unknown."""
    kinds = _kinds(config)
    return replace(
        config,
        values={
            **config.values,
            "num_hidden_layers": len(kinds),
            "layers_block_type": [*kinds],
            "layer_types": ["full_attention" if kind in _FEED_FORWARD else kind for kind in kinds],
            "mlp_layer_types": ["sparse" if kind == "moe" else "dense" for kind in kinds],
        },
    )


def single_parts(
    config: Config, mixers: Sequence[MixerSpec], feed_forwards: Sequence[FeedForwardSpec]
) -> tuple[LayerSpec, ...]:
    """Return the layers, each with one of its two parts. config: result of `with_parts`."""
    return tuple(
        LayerSpec(NoMixer(), feed_forward)
        if kind in _FEED_FORWARD
        else LayerSpec(mixer, NoFeedForward())
        for kind, mixer, feed_forward in zip(_kinds(config), mixers, feed_forwards, strict=True)
    )


def _kinds(config: Config) -> tuple[str, ...]:
    if config.has("layers_block_type"):
        count = len(config.texts("layers_block_type"))
        kinds = config.kind_per_layer("layers_block_type", count, _KINDS)
    else:
        key = "hybrid_override_pattern"
        pattern = config.text(key)
        if unknown := sorted({*pattern} - {*_LETTERS}):
            raise CheckpointError(
                f"{config.file}: {key} has the letter {unknown[0]}, which is not supported here. "
                f"Supported: {', '.join(_LETTERS)}."
            )
        kinds = tuple(_LETTERS[letter] for letter in pattern)
    if not kinds:
        raise CheckpointError(f"{config.file}: layers_block_type names no layer.")
    return tuple(_PUBLISHED.get(kind, kind) for kind in kinds)
