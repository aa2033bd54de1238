"""Cache groups of a model's layers: layers of a group keep keys and values of the same tokens."""

from collections.abc import Sequence
from dataclasses import dataclass

from services.engine.model.architecture.compressed_spec import CompressedSpec
from services.engine.model.architecture.layers import AttentionSpec
from services.engine.model.architecture.model_layers import ModelLayers

__all__ = ["LayerGroup", "layer_groups"]


@dataclass(frozen=True, slots=True)
class LayerGroup:
    """Layers whose keys and values are kept equally long, so that they share block tables."""

    window: int
    """Tokens that a token sees, itself included; 0 = all"""
    layers: Sequence[int]
    """Numbers of the layers, ascending; empty: no layer of the model has pages"""
    token_width: int
    """Count of numbers that all these layers together keep of one token"""
    entries: Sequence[CompressedSpec] = ()
    """Layers whose compressed entries are in this group; their tokens are in another one"""

    def block_width(self, size: int) -> int:
        """Return how many numbers all layers keep of a block of `size` tokens."""
        entries = sum(layer.entries_in(size) * layer.entry_width for layer in self.entries)
        return self.token_width * size + entries


def layer_groups(spec: ModelLayers) -> tuple[LayerGroup, ...]:
    """Return the groups of the layers that have pages; one that sees all tokens comes first.

    The pages of a group's layers may differ in size: each layer has tensors of its own, and only
    the numbers of the blocks are common. An encoder has one group, whose keys stay for a step. A
    model all of whose layers are recurrent has one without layers: its blocks only name tokens.
    """
    if spec.compressed_layers:
        return _compressed_groups(spec)
    layers: dict[int, list[int]] = {}
    joint = spec.joint_layers
    if not spec.paged_layers and not joint:
        return (LayerGroup(0, (), 0),)
    for index, layer in spec.paged_layers.items():
        layers.setdefault(0 if spec.is_encoder else layer.window, []).append(index)
    for index, each in joint.items():
        layers.setdefault(each.window if isinstance(each, AttentionSpec) else 0, []).append(index)

    def width(index: int) -> int:
        return (joint[index] if index in joint else spec.attention(index)).page_width

    return tuple(
        LayerGroup(window, tuple(sorted(layers[window])), sum(map(width, layers[window])))
        for window in sorted(layers)
    )


def _compressed_groups(spec: ModelLayers) -> tuple[LayerGroup, ...]:
    """Return the group of the entries, if there are any, and that of the last tokens."""
    layers = spec.compressed_layers
    entries = [layer for layer in layers.values() if layer.compression is not None]
    (kept,) = {layer.kept_tokens for layer in layers.values()}
    tokens = LayerGroup(kept, tuple(layers), sum(layer.page_width for layer in layers.values()))
    return (LayerGroup(0, (), 0, entries), tokens) if entries else (tokens,)
