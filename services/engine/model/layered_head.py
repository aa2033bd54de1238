"""Heads with a layer of their own for each draft token.

DeepSeek-AI, "DeepSeek-V3 Technical Report" (2024), section 2.2. Row i of layer k reads hidden
states of token i and the embedding of token i + k. It predicts token i + k + 1.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from services.engine.batch.step_batch import StepBatch
from services.engine.model.architecture.spec import ModelSpec
from services.engine.model.attention import AttentionBackend, KVCache
from services.engine.model.decoder import DecoderWeights
from services.engine.model.draft_head import DraftHead, HeadInputs
from services.engine.model.embedding import Embedding
from services.engine.model.layer_stack import Activations
from services.engine.model.operators.interface import Operators, Projection

__all__ = ["HeadLayer", "LayeredHead"]


@dataclass(frozen=True, slots=True)
class HeadLayer:
    """Inputs, final norm and tables around one layer of a head."""

    inputs: HeadInputs
    final_norm: Tensor
    """Weight [hidden_size] of the norm in front of the logits"""
    embedding: Embedding
    output: Projection
    """hidden_size → vocab_size"""


class LayeredHead(DraftHead):
    """A decoder whose layers run alone, one after another. Not thread-safe: passes share buffers.

    A pass runs the layer that was chosen last, and the logits are those of this layer.
    """

    def __init__(
        self,
        spec: ModelSpec,
        dtype: torch.dtype,
        weights: DecoderWeights,
        operators: Operators,
        attention: AttentionBackend,
        layers: Sequence[HeadLayer],
        *,
        is_chained: bool,
    ) -> None:
        """is_chained: each layer but the first reads the output of the one before; else all read
        hidden states of the engine's model."""
        super().__init__(spec, dtype, weights, operators, attention, layers[0].inputs)
        self._recordings = [
            operators.recording(only_decodes=bool(spec.latent_layers)) for _ in layers
        ]
        self._is_chained = is_chained
        self._number = 0
        """Number of the chosen layer"""
        self.layers = layers
        """Inputs, final norm and tables around each layer"""
        self._weights_of = [
            replace(
                weights,
                final_norm=each.final_norm,
                embedding=each.embedding,
                output=each.output,
            )
            for each in layers
        ]

    @property
    def draft_layers(self) -> int:
        return self.spec.num_layers

    def run_layer(
        self, number: int, batch: StepBatch, cache: KVCache, states: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Choose and compute a layer, as `run` does.

        states: hidden states of the engine's model for the first layer; for others, the second
        value that the layer before has returned. Returns the hidden states of the batch's output
        rows, and the hidden states that the next layer reads.
        """
        self._number = number
        self._inputs, self._weights = self.layers[number].inputs, self._weights_of[number]
        self._recording = self._recordings[number]
        is_own = self._is_chained and number > 0
        if not self._is_chained or number == self.spec.num_layers - 1:
            return self.run(batch, cache, states, is_own=is_own), states
        hidden = self.run(batch.with_all_rows, cache, states, is_own=is_own)
        following = self.following_states(hidden)
        outputs = batch.output_rows
        return hidden if outputs is None else hidden[outputs.indices], following

    def _run_layers(
        self, batch: StepBatch, cache: KVCache, buffers: Activations, kept: Activations
    ) -> None:
        self._run_last(self._number, batch, cache, buffers, kept)

    def _grow(self, tokens: int) -> None:
        super()._grow(tokens)
        for recording in self._recordings:
            if recording is not None:
                recording.discard()
