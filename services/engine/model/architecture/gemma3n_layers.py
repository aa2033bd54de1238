"""Layers of Gemma 3n, with streams, shared keys, and mostly zero activations."""

from collections.abc import Sequence
from dataclasses import replace
from statistics import NormalDist

from services.engine.model.architecture.layers import (
    AltUpSpec,
    AttentionSpec,
    DenseSpec,
    LayerSpec,
)
from services.engine.model.architecture.shared_keys import layers_read
from services.engine.model.checkpoint.config import CheckpointError, Config

__all__ = ["gemma3n_layers"]

_SPARSE_LAYERS = 10
"""Number of sparse layers if config.json does not say and the model has more layers"""


def gemma3n_layers(config: Config, layers: Sequence[LayerSpec]) -> tuple[LayerSpec, ...]:
    """Return Gemma 3n's layers. layers: the same without the parts that only Gemma 3n has.

    Raises CheckpointError for a missing or mistyped value, and for values that contradict one
    another.
    """
    mixers = [_attention(layer) for layer in layers]
    read = layers_read(config, [mixer.window > 0 for mixer in mixers])
    altup = _altup(config)
    return tuple(
        LayerSpec(
            mixer=replace(mixer, scale=1.0, norms_values=True, reads_layer=read[index]),
            feed_forward=_sparse(layer, cutoff),
            input_width=config.positive("hidden_size_per_layer_input"),
            altup=altup,
        )
        for index, (layer, mixer, cutoff) in enumerate(
            zip(layers, mixers, _cutoffs(config, len(layers)), strict=True)
        )
    )


def _attention(layer: LayerSpec) -> AttentionSpec:
    assert isinstance(layer.mixer, AttentionSpec)
    return layer.mixer


def _sparse(layer: LayerSpec, cutoff: float | None) -> DenseSpec:
    dense = layer.feed_forward
    assert isinstance(dense, DenseSpec)
    return replace(dense, activation=replace(dense.activation, cutoff=cutoff))


def _altup(config: Config) -> AltUpSpec:
    streams, active = config.positive("altup_num_inputs"), config.integer("altup_active_idx")
    if streams < 2:
        raise CheckpointError(f"{config.file}: altup_num_inputs must be at least 2, got {streams}.")
    if not 0 <= active < streams:
        raise CheckpointError(
            f"{config.file}: altup_active_idx ({active}) must be below altup_num_inputs "
            f"({streams}), and not negative."
        )
    return AltUpSpec(
        streams,
        active,
        has_scale=config.flag("altup_correct_scale", True),
        laurel_rank=config.positive("laurel_rank"),
    )


def _cutoffs(config: Config, num_layers: int) -> list[float | None]:
    """Return the activation cutoff of each layer."""
    key = "activation_sparsity_pattern"
    if config.has(key):
        shares = config.numbers(key)
    else:
        count = _SPARSE_LAYERS if num_layers > _SPARSE_LAYERS else 0
        shares = (0.95,) * count + (0.0,) * (num_layers - count)
    if len(shares) != num_layers or not all(0 <= share < 1 for share in shares):
        raise CheckpointError(
            f"{config.file}: {key} must have a number from 0 to below 1 for each of the "
            f"{num_layers} layers."
        )
    return [NormalDist().inv_cdf(share) if share else None for share in shares]
