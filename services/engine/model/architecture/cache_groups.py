"""Cache groups of a model's layers: layers of a group keep keys and values of the same tokens."""

from collections.abc import Sequence
from dataclasses import dataclass

from services.engine.model.architecture.spec import ModelSpec

__all__ = ["LayerGroup", "layer_groups"]


@dataclass(frozen=True, slots=True)
class LayerGroup:
    """Layers whose keys and values are kept equally long, so that they share block tables."""

    window: int
    """Tokens that a token sees, itself included; 0 = all"""
    layers: Sequence[int]
    """Numbers of the layers, rising; empty: no layer of the model has pages"""
    token_width: int
    """Numbers that all these layers keep of one token"""


def layer_groups(spec: ModelSpec) -> tuple[LayerGroup, ...]:
    """Return the groups of the layers that have pages; one that sees all tokens comes first.

    The pages of a group's layers may differ in size: each layer has tensors of its own, and only
    the numbers of the blocks are common. An encoder has one group, whose keys stay for a step. A
    model all of whose layers are recurrent has one without layers: its blocks only name tokens.
    """
    layers: dict[int, list[int]] = {}
    if not spec.paged_layers and not spec.latent_layers:
        return (LayerGroup(0, (), 0),)
    latents = spec.latent_layers
    for index, layer in spec.paged_layers.items():
        layers.setdefault(0 if spec.is_encoder else layer.window, []).append(index)
    if latents:
        layers[0] = sorted([*layers.get(0, ()), *latents])

    def width(index: int) -> int:
        if index in latents:
            return latents[index].page_width
        layer = spec.attention(index)
        return 2 * layer.num_kv_heads * layer.head_dim

    return tuple(
        LayerGroup(window, tuple(layers[window]), sum(map(width, layers[window])))
        for window in sorted(layers)
    )
