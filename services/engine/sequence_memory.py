"""Memory of a sequence's keys, values and states, by config.json alone. Free of torch."""

from collections.abc import Sequence
from dataclasses import dataclass

from services.engine.model.architecture.cache_groups import LayerGroup, layer_groups
from services.engine.model.architecture.layer_states import StateSize, state_size
from services.engine.model.architecture.model_layers import read_model_layers
from services.engine.model.checkpoint.config import Config

__all__ = ["SequenceMemory", "sequence_memory"]

_RECURRENT_BYTES = 4
"""Bytes of a recurrent state's number unless --state-dtype says otherwise"""


@dataclass(frozen=True, slots=True)
class SequenceMemory:
    """Memory of a sequence in all layers of a decoder."""

    groups: Sequence[LayerGroup]
    """Layers that keep numbers of equally many tokens"""
    states: StateSize
    """Numbers of recurrent layers and of convolutions"""

    def cached_numbers(self, tokens: int) -> int:
        """Return the numbers of keys, values, latents and entries of so many tokens."""
        return sum(_numbers(group, tokens) for group in self.groups)

    def state_bytes(self, number_bytes: int) -> int:
        """Return the bytes of states, which do not grow. number_bytes: of the model's dtype."""
        return self.states.inputs * number_bytes + self.states.recurrent * _RECURRENT_BYTES


def sequence_memory(config: Config) -> SequenceMemory | None:
    """Return what a decoder keeps of a sequence; None for an encoder, which keeps nothing.

    Raises CheckpointError for a checkpoint that is not served.
    """
    spec = read_model_layers(config.values, config.file)
    if spec.is_encoder:
        return None
    states = (state_size(layer.mixer, spec.hidden_size) for layer in spec.layers)
    return SequenceMemory(layer_groups(spec), sum(states, StateSize()))


def _numbers(group: LayerGroup, tokens: int) -> int:
    near = min(tokens, group.window) if group.window else tokens
    entries = sum(
        tokens // layer.compression.rate * layer.entry_width
        for layer in group.entries
        if layer.compression is not None
    )
    return group.token_width * near + entries
