"""Layers of LongCat-Flash: two sublayers each, and a mixture of experts around the second.

The experts read the input of the first sublayer's dense layer. Their output joins the residual
after the second sublayer (ScMoE, https://arxiv.org/abs/2404.05019).
"""

from collections.abc import Sequence

from services.engine.model.architecture.layers import (
    BesideSpec,
    DenseSpec,
    ExpertsSpec,
    FeedForwardSpec,
    LayerSpec,
    MixerSpec,
)
from services.engine.model.checkpoint.config import CheckpointError, Config

__all__ = ["shortcut_layers"]


def shortcut_layers(
    config: Config, mixers: Sequence[MixerSpec], feed_forwards: Sequence[FeedForwardSpec]
) -> tuple[LayerSpec, ...]:
    """Return two layers for each stored one. feed_forwards: the experts of each stored layer.

    Raises CheckpointError if there are none.
    """
    width = config.positive("intermediate_size")
    layers: list[LayerSpec] = []
    for number, (mixer, experts) in enumerate(zip(mixers, feed_forwards, strict=True)):
        if not isinstance(experts, ExpertsSpec):
            raise CheckpointError(f"{config.file}: n_routed_experts must be positive, got 0.")
        dense = DenseSpec(width, experts.activation, has_bias=False)
        both = BesideSpec(dense, experts, is_shortcut=True)
        place = f"{number}"
        layers += [
            LayerSpec(mixer, both, place=place, sublayer=0),
            LayerSpec(mixer, dense, place=place, sublayer=1, follows_shortcut=True),
        ]
    return tuple(layers)
