"""The one decoder, driven by a spec."""

from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from services.engine.batch.step_batch import StepBatch
from services.engine.kernels.memory import touch
from services.engine.model.architecture.rotary import Rotary, Rotation
from services.engine.model.architecture.spec import ModelSpec
from services.engine.model.attention import AttentionBackend, KVCache
from services.engine.model.feed_forward import FeedForward
from services.engine.model.operators.interface import Operators, Projection

__all__ = ["Decoder", "DecoderLayer", "DecoderWeights"]


@dataclass(frozen=True, slots=True)
class DecoderLayer:
    """One layer's weights; norms are [width] in the model's dtype, or there is none."""

    attention_norm: Tensor | None
    qkv: Projection
    query_norm: Tensor | None
    key_norm: Tensor | None
    output: Projection
    feed_forward_norm: Tensor | None
    feed_forward: FeedForward


@dataclass(frozen=True, slots=True)
class DecoderWeights:
    """All weights of a decoder, where the operators want them."""

    embedding: Tensor
    """[vocab_size, hidden_size]"""
    positions: Tensor | None
    """[context_length, hidden_size], added to the embedding"""
    layers: tuple[DecoderLayer, ...]
    final_norm: Tensor
    output: Projection
    """hidden_size → vocab_size"""
    num_bytes: int
    """What a step reads of them at most: everything but the embeddings"""


@dataclass(frozen=True, slots=True)
class _Heads:
    """Views of what `qkv` makes: [tokens, heads, head_dim] each."""

    rotated: Tensor
    """Queries and keys"""
    queries: Tensor
    keys: Tensor
    values: Tensor

    def first(self, tokens: int) -> "_Heads":
        some = (self.rotated, self.queries, self.keys, self.values)
        return _Heads(*(heads[:tokens] for heads in some))


@dataclass(frozen=True, slots=True)
class _Activations:
    """Buffers of one forward pass, reused by every layer and every step: [tokens, width] each."""

    hidden: Tensor
    normed: Tensor
    qkv: Tensor
    heads: _Heads
    attended: Tensor
    inner: Tensor
    rotations: tuple[Rotation, ...]
    """One for each way to rotate"""

    @property
    def large(self) -> tuple[Tensor, ...]:
        """All but the rotations."""
        return self.hidden, self.normed, self.qkv, self.attended, self.inner

    def first(self, tokens: int) -> "_Activations":
        return _Activations(
            self.hidden[:tokens],
            self.normed[:tokens],
            self.qkv[:tokens],
            self.heads.first(tokens),
            self.attended[:tokens],
            self.inner[:tokens],
            tuple(rotation.first(tokens) for rotation in self.rotations),
        )


class Decoder:
    """A decoder-only transformer. Not thread-safe: a pass writes into buffers of its own."""

    def __init__(
        self,
        spec: ModelSpec,
        dtype: torch.dtype,
        weights: DecoderWeights,
        operators: Operators,
        attention: AttentionBackend,
    ) -> None:
        self.spec = spec
        self.dtype = dtype
        self.device = weights.final_norm.device
        self._weights = weights
        self._operators = operators
        self._attention = attention
        different = list(dict.fromkeys(filter(None, spec.rotaries)))
        self._rotaries = [Rotary(rotary, spec.head_dim, self.device) for rotary in different]
        self._rotary_of_layer = [
            None if rotary is None else different.index(rotary) for rotary in spec.rotaries
        ]
        self._activations = self._rows = self._allocate(64)
        self._logits = torch.empty((0, spec.vocab_size), device=self.device)
        self._recording = operators.recording()

    @property
    def weight_bytes(self) -> int:
        """Bytes of weights that a step reads at most."""
        return self._weights.num_bytes

    @property
    def block_size(self) -> int:
        """Tokens of a KV block that suit the attention backend best."""
        return self._attention.block_size

    @property
    def rows_at_once(self) -> int:
        """Rows that products compute at once."""
        return self._operators.rows_at_once

    @property
    def is_capturable(self) -> bool:
        """Whether a CUDA graph of a step that only decodes serves all of its size."""
        # the host looks at which experts were chosen, which a graph can't
        return self._attention.is_capturable and self.spec.experts is None

    @property
    def buffers(self) -> object:
        """What passes write into, to be kept by whoever captured one."""
        return self._activations

    def allocate_cache(self, num_blocks: int, block_size: int | None = None) -> KVCache:
        """A cache of `num_blocks` blocks for `forward`, in the layout of the attention backend."""
        return self._attention.allocate(num_blocks, block_size or self.block_size)

    def reserve(self, tokens: int, rows: int) -> None:
        """Allocate what passes of up to so many tokens write into, and logits of so many rows.

        It is found now, or found missing, rather than when a prompt of that length comes.
        """
        at, logits = self._buffers(tokens), self._logits_of(rows)
        if self.device.type == "cpu":
            touch((*at.large, logits))

    def bytes_to_reserve(self, tokens: int, rows: int) -> int:
        """What `reserve` takes."""
        of_a_few = sum(buffer.nbytes for buffer in self._activations.large)
        of_logits = rows * self.spec.vocab_size * self._logits.itemsize
        return tokens * of_a_few // len(self._activations.hidden) + of_logits

    @torch.inference_mode()
    def forward(self, batch: StepBatch, cache: KVCache) -> Tensor:
        """Hidden states [rows, hidden_size] before the final norm, valid until the next call.

        A row for each token, or for each of `batch.output_rows`. Writes the step's keys and values
        into `cache`.
        """
        at = self._buffers(len(batch.token_ids))
        self._embed(batch, at.hidden)
        for rotary, rotation in zip(self._rotaries, at.rotations, strict=True):
            rotary.into(batch.positions, rotation)
        outputs = batch.output_rows
        kept = at if outputs is None else self._activations.first(len(outputs.indices))
        layers = partial(self._run_layers, batch, cache, at, kept)
        if self._recording is None:
            layers()
        else:
            self._recording.run(batch, cache, layers)
        return kept.hidden

    @torch.inference_mode()
    def logits(self, hidden: Tensor) -> Tensor:
        """float32 [rows, vocab_size] of the given rows of `forward`'s result, valid until the next
        call."""
        normed = self._final(hidden)
        logits = self._logits_of(hidden.shape[0])
        self._weights.output.into(normed, logits)
        if self.spec.logit_scale != 1:
            logits *= self.spec.logit_scale
        if cap := self.spec.logit_cap:
            logits.div_(cap).tanh_().mul_(cap)
        return logits

    @property
    def finds_most_likely(self) -> bool:
        """Whether it has `most_likely`."""
        spec = self.spec
        return self._weights.output.finds_largest and spec.logit_scale == 1 and not spec.logit_cap

    @torch.inference_mode()
    def most_likely(self, hidden: Tensor) -> Tensor:
        """int64 [rows]: where `logits` are highest, the first of equals, without storing them; -1
        where they are NaN."""
        normed = self._final(hidden)
        ids = torch.empty(len(hidden), dtype=torch.int64)
        self._weights.output.largest(normed, ids)
        return ids

    def _final(self, hidden: Tensor) -> Tensor:
        hidden = hidden.contiguous()
        normed = self._buffers(hidden.shape[0]).normed
        self._norm(hidden, self._weights.final_norm, normed)
        return normed

    def _run_layers(
        self, batch: StepBatch, cache: KVCache, at: _Activations, kept: _Activations
    ) -> None:
        """Everything between the embedding and the final norm.

        The last layer makes keys and values of all rows, and then goes on with those in `kept`.
        """
        spec, operators, epsilon = self.spec, self._operators, self.spec.norm_epsilon
        heads, last = at.heads, self._weights.layers[-1]
        for index, layer in enumerate(self._weights.layers):
            self._norm(at.hidden, layer.attention_norm, at.normed)
            layer.qkv.into(at.normed, at.qkv)
            if (rotary := self._rotary_of_layer[index]) is not None:
                rotation = at.rotations[rotary]
                norms = layer.query_norm, layer.key_norm
                operators.rotate(heads.rotated, spec.num_heads, rotation, *norms, epsilon)
            if layer is last:
                rows = None if batch.output_rows is None else batch.output_rows.indices
                operators.keep(at.hidden, rows)
                operators.keep(heads.queries, rows)
                at, batch = kept, batch.narrowed
            self._attention.attend(
                index, at.heads.queries, heads.keys, heads.values, batch, cache, at.attended
            )
            layer.output.add_to(at.attended, at.hidden)
            self._norm(at.hidden, layer.feed_forward_norm, at.normed)
            layer.feed_forward.add_to(at.normed, at.hidden, at.inner)

    def _embed(self, batch: StepBatch, hidden: Tensor) -> None:
        torch.index_select(self._weights.embedding, 0, batch.token_ids, out=hidden)
        if self.spec.embedding_scale != 1:
            hidden *= self.spec.embedding_scale
        if self._weights.positions is not None:
            hidden += self._weights.positions[batch.positions]

    def _norm(self, rows: Tensor, weight: Tensor | None, out: Tensor) -> None:
        if weight is None:
            self._operators.arrange(rows, out)
        else:
            self._operators.rms_norm(rows, weight, self.spec.norm_epsilon, out)

    def _buffers(self, tokens: int) -> _Activations:
        if tokens > self._activations.hidden.shape[0]:
            self._activations = self._rows = self._allocate(tokens)
            if self._recording is not None:
                self._recording.forget()
        if tokens != len(self._rows.hidden):
            self._rows = self._activations.first(tokens)
        return self._rows

    def _logits_of(self, rows: int) -> Tensor:
        # Allocated anew for every step, they would leave holes that small objects move into.
        if rows > len(self._logits):
            self._logits = torch.empty((rows, self.spec.vocab_size), device=self.device)
        return self._logits[:rows]

    def _allocate(self, tokens: int) -> _Activations:
        spec, empty = self.spec, self._operators.empty
        qkv = empty(tokens, (spec.num_heads + 2 * spec.num_kv_heads) * spec.head_dim)
        heads = qkv.view(tokens, -1, spec.head_dim)
        rotated, values = heads.tensor_split((spec.num_heads + spec.num_kv_heads,), dim=1)
        queries, keys = rotated.tensor_split((spec.num_heads,), dim=1)
        return _Activations(
            hidden=empty(tokens, spec.hidden_size),
            normed=empty(tokens, spec.hidden_size),
            qkv=qkv,
            heads=_Heads(rotated, queries, keys, values),
            attended=empty(tokens, spec.num_heads * spec.head_dim),
            inner=empty(tokens, spec.intermediate_size),
            rotations=tuple(rotary.empty(tokens) for rotary in self._rotaries),
        )
