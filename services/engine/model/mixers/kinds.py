"""Kinds of mixers: the weights of each, and the mixer that is made of them."""

from typing import Any, TypeAlias

from services.engine.model.architecture.rotary import Rotaries
from services.engine.model.architecture.spec import ModelSpec
from services.engine.model.attention import AttentionBackend
from services.engine.model.mixers.attention import AttentionMixer, AttentionWeights
from services.engine.model.mixers.interface import Mixer
from services.engine.model.operators.interface import Operators

__all__ = ["MixerWeights", "make_mixers"]

MixerWeights: TypeAlias = AttentionWeights


def make_mixers(
    spec: ModelSpec,
    weights: tuple[MixerWeights, ...],
    rotaries: Rotaries,
    operators: Operators,
    backend: AttentionBackend,
) -> list[Mixer[Any]]:
    """Make the mixer of each layer from its weights."""
    mixers: list[Mixer[Any]] = []
    for index, (layer, mine) in enumerate(zip(spec.layers, weights, strict=True)):
        shape, rotation = layer.mixer, None
        if shape.rotary is not None:
            rotation = rotaries.index(shape.rotary, shape.head_dim)
        mixers.append(
            AttentionMixer(index, shape, mine, spec.norm_epsilon, rotation, operators, backend)
        )
    return mixers
