"""The encoder's forward pass."""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import layer_norm

from services.engine.batch.step_batch import StepBatch
from services.engine.model.architecture.spec import ModelSpec
from services.engine.model.attention import AttentionBackend, KVCache
from services.engine.model.attention.pair_scores import PairScores
from services.engine.model.layer_stack import Activations, StackWeights
from services.engine.model.operators.deltas import TableDelta
from services.engine.model.operators.interface import LayerNorm, Operators
from services.engine.model.whole_text_stack import WholeTextStack

__all__ = ["Encoder", "EncoderWeights"]


@dataclass(frozen=True, slots=True, kw_only=True)
class EncoderWeights(StackWeights):
    """All weights of an encoder, whose layers have LayerNorms in place of a decoder's norms."""

    token_types: Tensor | None
    """[types, hidden_size], added to the embedding; None: the model takes no pairs of texts"""
    embedding_norm: LayerNorm
    norms: tuple[tuple[LayerNorm | None, LayerNorm], ...]
    """For each layer, the norms of its attention and of its feed-forward layer: after they have
    added to the residual, or before them if the family norms first; None: the layer has none"""
    table_deltas: tuple[TableDelta | None, ...]
    """Additions of adapters to the tables of tokens and of token types; None: there are none"""
    last_norm: LayerNorm | None
    pair_scores: PairScores | None
    """Addends to the scores of two tokens; None: there are none"""


class Encoder(WholeTextStack):
    """An encoder-only transformer. It computes no logits."""

    _weights: EncoderWeights
    computes_logits = False

    def __init__(
        self,
        spec: ModelSpec,
        dtype: torch.dtype,
        weights: EncoderWeights,
        operators: Operators,
        attention: AttentionBackend,
    ) -> None:
        super().__init__(spec, dtype, weights, operators, attention)
        assert spec.family.encoder is not None
        self._norms_first = spec.family.encoder.norms_first

    @torch.inference_mode()
    def compute(self, batch: StepBatch, cache: KVCache) -> Tensor:
        hidden = super().compute(batch, cache)
        if (norm := self._weights.last_norm) is not None:
            rows = layer_norm(
                hidden, hidden.shape[1:], norm.weight, norm.bias, self.spec.norm_epsilon
            )
            hidden.copy_(rows)
        return hidden

    def compute_logits(self, hidden: Tensor) -> Tensor:
        raise NotImplementedError

    @torch.inference_mode()
    def states(self, hidden: Tensor) -> Tensor:
        return hidden.float()

    def _begin(self, batch: StepBatch, buffers: Activations) -> None:
        super()._begin(batch, buffers)
        weights, hidden = self._weights, buffers.hidden
        types = batch.token_types
        if weights.token_types is not None:
            hidden += weights.token_types[0] if types is None else weights.token_types[types]
        for delta, index in zip(weights.table_deltas, (batch.token_ids, types), strict=True):
            if delta is not None:
                rows = torch.zeros_like(batch.token_ids) if index is None else index
                delta.add_rows(rows, hidden)
        self._operators.layer_norm(
            hidden, weights.embedding_norm, self.spec.norm_epsilon, buffers.normed, replaces=True
        )

    def _project(self, index: int, buffers: Activations) -> None:
        if self._norms_first:
            self._read_norm(self._weights.norms[index][0], buffers)
        mixer, scratch = self._mixing(index, buffers)
        mixer.project(buffers.normed, scratch, buffers.rotations)

    def _after_mixing(self, index: int, buffers: Activations) -> None:
        layer = self._layers[index]
        attention_norm, feed_forward_norm = self._weights.norms[index]
        layer.mixer.add_to(buffers.mixing[layer.mixing], buffers.hidden)
        if self._norms_first:
            self._read_norm(feed_forward_norm, buffers)
        else:
            self._norm_residual(attention_norm, buffers)
        layer.feed_forward.add_to(
            buffers.normed, buffers.hidden, buffers.inner[layer.inner], buffers.spares
        )
        if not self._norms_first:
            self._norm_residual(feed_forward_norm, buffers)

    def _read_norm(self, norm: LayerNorm | None, buffers: Activations) -> None:
        """Write the norm of the residual, which a layer reads, and leave the residual."""
        if norm is None:
            self._operators.arrange(buffers.hidden, buffers.normed)
        else:
            epsilon = self.spec.norm_epsilon
            self._operators.layer_norm(buffers.hidden, norm, epsilon, buffers.normed)

    def _norm_residual(self, norm: LayerNorm | None, buffers: Activations) -> None:
        """Replace the residual by its norm, which the next layer reads too."""
        assert norm is not None
        self._operators.layer_norm(
            buffers.hidden, norm, self.spec.norm_epsilon, buffers.normed, replaces=True
        )
