"""The encoder's forward pass: embeddings, layers, hidden states of all tokens."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn.functional import layer_norm

from services.engine.batch.step_batch import StepBatch
from services.engine.model.architecture.spec import ModelSpec
from services.engine.model.attention import AttentionBackend, KVCache
from services.engine.model.decoder import Activations, Decoder, DecoderWeights
from services.engine.model.operators.interface import LayerNorm, Operators

__all__ = ["Encoder", "EncoderWeights"]


@dataclass(frozen=True, slots=True)
class EncoderWeights(DecoderWeights):
    """All weights of an encoder. Its layers have no norms of a decoder's kind."""

    token_types: Tensor | None
    """[types, hidden_size], added to the embedding; None: the model takes no pairs of texts"""
    embedding_norm: LayerNorm
    norms: tuple[tuple[LayerNorm | None, LayerNorm], ...]
    """For each layer, the norms of its attention and of its feed-forward layer: after what they add
    to the residual, or before them if the family norms first; None: the layer has none"""
    last_norm: LayerNorm | None
    attention_bias: Tensor | None
    """float32 [heads, 2 * context_length - 1], the addend to the score of two tokens by the place
    of the key less that of the query, from 1 - context_length on; None: there is none"""


class Encoder(Decoder):
    """An encoder, which computes whole texts. It keeps no keys and values beyond a step.

    Not thread-safe: passes share buffers.
    """

    computes_whole_prompts = True

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
        self._encoder_weights = weights
        self._recording = None
        self.runs_in_pieces = False

    @property
    def is_capturable(self) -> bool:
        return False

    def allocate_cache(
        self,
        num_blocks: int | Sequence[int],
        block_size: int | None = None,
        num_states: int = 0,
    ) -> KVCache:
        """Allocate a cache of one layer, which all layers use in turn."""
        size = block_size or self.block_size
        [blocks] = [num_blocks] if isinstance(num_blocks, int) else num_blocks
        whole = self._attention.allocate(blocks, size, {0: self.spec.attention(0)})
        layers = range(self.spec.num_layers)
        keys, values = (dict.fromkeys(layers, each[0]) for each in (whole.keys, whole.values))
        return KVCache(keys, values, size)

    @torch.inference_mode()
    def compute(self, batch: StepBatch, cache: KVCache) -> Tensor:
        buffers = self._buffers(len(batch.token_ids))
        self._begin(batch, buffers)
        ends = _text_ends(batch)
        everywhere = replace(batch, visible_ends=ends)
        nearby: dict[int, StepBatch] = {0: everywhere}
        for index, layer in self.spec.attention_layers.items():
            window = layer.window
            if window not in nearby:
                last = (batch.positions + window).to(torch.int32)
                nearby[window] = replace(batch, visible_ends=torch.minimum(ends, last))
            self._project(index, buffers)
            mixer, scratch = self._mixing(index, buffers)
            mixer.mix(nearby[window], cache, scratch)
            self._after_mixing(index, buffers)
        if self._encoder_weights.last_norm is not None:
            self._norm_rows(buffers.hidden, self._encoder_weights.last_norm, buffers.hidden)
        if batch.output_rows is not None:
            self._operators.keep(buffers.hidden, batch.output_rows.indices)
            return buffers.hidden[: len(batch.output_rows.indices)]
        return buffers.hidden

    @torch.inference_mode()
    def states(self, hidden: Tensor) -> Tensor:
        return hidden.float()

    def _begin(self, batch: StepBatch, buffers: Activations) -> None:
        super()._begin(batch, buffers)
        weights, hidden = self._encoder_weights, buffers.hidden
        if weights.token_types is not None:
            types = batch.token_types
            hidden += weights.token_types[0] if types is None else weights.token_types[types]
        self._operators.layer_norm(
            hidden, weights.embedding_norm, self.spec.norm_epsilon, buffers.normed, replaces=True
        )

    def _project(self, index: int, buffers: Activations) -> None:
        if self._norms_first:
            self._read_norm(self._encoder_weights.norms[index][0], buffers)
        mixer, scratch = self._mixing(index, buffers)
        mixer.project(buffers.normed, scratch, buffers.rotations)

    def _after_mixing(self, index: int, buffers: Activations) -> None:
        layer = self._layers[index]
        attention_norm, feed_forward_norm = self._encoder_weights.norms[index]
        layer.mixer.add_to(buffers.mixing[layer.mixing], buffers.hidden)
        if self._norms_first:
            self._read_norm(feed_forward_norm, buffers)
        else:
            self._norm_residual(attention_norm, buffers)
        layer.feed_forward.add_to(buffers.normed, buffers.hidden, buffers.inner[layer.inner])
        if not self._norms_first:
            self._norm_residual(feed_forward_norm, buffers)

    def _read_norm(self, norm: LayerNorm | None, buffers: Activations) -> None:
        """Write what a layer reads: the norm of the residual, which stays."""
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

    def _norm_rows(self, rows: Tensor, norm: LayerNorm, out: Tensor) -> None:
        out.copy_(layer_norm(rows, rows.shape[1:], norm.weight, norm.bias, self.spec.norm_epsilon))


def _text_ends(batch: StepBatch) -> Tensor:
    """Return for each token the number of tokens in its text: int32 [tokens]."""
    lengths = torch.diff(batch.query_starts).long()
    return torch.repeat_interleave(
        batch.context_lengths, lengths, output_size=len(batch.token_ids)
    ).to(torch.int32)
