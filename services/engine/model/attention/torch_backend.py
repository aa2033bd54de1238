"""Attention in plain torch: all dtypes and devices, exact in float32."""

from collections.abc import Mapping

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from services.common.cached_prefix import window_start
from services.engine.model.architecture.layers import AttentionSpec
from services.engine.model.architecture.spec import ModelSpec
from services.engine.model.attention.interface import AttentionBackend, AttentionStep, KVCache

__all__ = ["TorchAttention"]

_PIECE = 256
"""Number of query rows whose scores are in memory at once"""


class TorchAttention(AttentionBackend):
    """Backend that gathers each sequence's blocks and calls scaled_dot_product_attention.

    With soft caps, sinks or slopes, it computes the softmax itself, in float32. A layer's keys are
    [blocks, kv_heads, block_size, head_dim], its values [blocks, kv_heads, block_size, value_dim].
    """

    name = "torch"

    def __init__(
        self,
        spec: ModelSpec,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        super().__init__(dtype)
        self._spec = spec
        self._device = device

    def allocate(
        self,
        num_blocks: int | Mapping[int, int],
        block_size: int,
        layers: Mapping[int, AttentionSpec] | None = None,
    ) -> KVCache:
        def make(layer: AttentionSpec, blocks: int, width: int) -> Tensor:
            shape = (blocks, layer.num_kv_heads, block_size, width)
            return torch.zeros(shape, dtype=self.kv_dtype, device=self._device)

        return KVCache.allocate(layers or self._spec.paged_layers, num_blocks, block_size, make)

    def attend(self, layer: int, step: AttentionStep) -> None:
        self._write_and_decode(layer, step)
        self._prefill(layer, step)

    def _write_and_decode(self, layer: int, step: AttentionStep) -> None:
        """Write all keys and values, then attend for the sequences that decode."""
        if not step.is_written:
            self.write(layer, step)
        if step.batch.num_decodes:
            self._decode(layer, step)

    def write(self, layer: int, step: AttentionStep) -> None:
        slots, cache = step.batch.slots, step.cache
        blocks, offsets = slots // cache.block_size, slots % cache.block_size
        cache.keys[layer][blocks, :, offsets] = step.keys
        cache.values[layer][blocks, :, offsets] = step.values

    def _decode(self, layer: int, step: AttentionStep) -> None:
        """Attend for all decoding sequences at once, padded to the longest."""
        batch, cache, spec = step.batch, step.cache, self._spec.attention(layer)
        count = batch.num_decodes
        longest = max(batch.context_lengths_host[:count])
        tables = batch.block_tables[:count, : _blocks(longest, cache)].long()
        positions = torch.arange(tables.shape[1] * cache.block_size, device=self._device)
        lengths = batch.context_lengths[:count, None]
        visible = positions < lengths
        if window := spec.window:
            visible &= positions >= lengths - window
        # Query heads that share a key head become rows of one query, so no key is repeated. Slots
        # past a context hold an earlier sequence's data: a NaN there would survive the mask.
        stale = ~visible[:, None, :, None]
        keys = _gather(cache.keys[layer], tables).masked_fill_(stale, 0)
        values = _gather(cache.values[layer], tables).masked_fill_(stale, 0)
        grouped = step.queries[:count].reshape(count, spec.num_kv_heads, -1, spec.head_dim)
        mask = visible[:, None, None, :]
        if spec.is_plain:
            attended = scaled_dot_product_attention(
                grouped, keys, values, attn_mask=mask, scale=spec.scale
            )
        else:
            distances = (positions - lengths + 1)[:, None]
            operands = (grouped, keys, values, mask, distances)
            attended = self._attend_in_float32(layer, step, *operands)
        step.out[:count] = attended.reshape(count, -1)

    def _prefill(self, layer: int, step: AttentionStep) -> None:
        """Attend for one prompt chunk after another: causally over its cached prefix and itself."""
        batch, cache, spec = step.batch, step.cache, self._spec.attention(layer)
        out = step.out.view(len(step.queries), spec.num_heads, spec.value_dim)
        start = batch.num_decodes
        for sequence in range(batch.num_decodes, len(batch.query_lengths_host)):
            length = batch.query_lengths_host[sequence]
            context = batch.context_lengths_host[sequence]
            table = batch.block_tables[sequence : sequence + 1, : _blocks(context, cache)].long()
            chunk = step.queries[None, start : start + length].transpose(1, 2)
            keys = _gather(cache.keys[layer], table)[:, :, :context]
            values = _gather(cache.values[layer], table)[:, :, :context]
            unread = window_start(context - length, spec.window)
            # blocks before the window may be another sequence's: a NaN there would survive the mask
            keys[:, :, :unread], values[:, :, :unread] = 0, 0
            attend = self._sdpa if spec.is_plain else self._attend_in_pieces
            ends = batch.visible_ends
            own = None if ends is None else ends[start : start + length]
            attended = attend(layer, step, chunk, keys, values, own)
            out[start : start + length] = attended[0].transpose(0, 1)
            start += length

    def _sdpa(
        self,
        layer: int,
        _: AttentionStep,
        chunk: Tensor,
        keys: Tensor,
        values: Tensor,
        ends: Tensor | None,
    ) -> Tensor:
        spec = self._spec.attention(layer)
        mask = self._mask(layer, chunk.shape[2], keys.shape[2], ends)
        return scaled_dot_product_attention(
            chunk,
            keys,
            values,
            attn_mask=mask,
            is_causal=mask is None,
            scale=spec.scale,
            enable_gqa=spec.num_heads != spec.num_kv_heads,
        )

    def _attend_in_pieces(
        self,
        layer: int,
        step: AttentionStep,
        chunk: Tensor,
        keys: Tensor,
        values: Tensor,
        ends: Tensor | None,
    ) -> Tensor:
        """Attend in float32, some rows at a time to bound the memory of the scores."""
        spec, (length, context) = self._spec.attention(layer), (chunk.shape[2], keys.shape[2])
        pieces = []
        for first in range(0, length, _PIECE):
            piece = chunk[:, :, first : first + _PIECE]
            rows = piece.shape[2]
            own = None if ends is None else ends[first : first + rows]
            last = context - length + first + rows
            end = last if own is None else max(last, int(own[-1]))  # later keys are masked
            mask = self._visible(layer, rows, end, last, own).repeat(
                spec.num_heads // spec.num_kv_heads, 1
            )
            grouped = piece.reshape(1, spec.num_kv_heads, -1, spec.head_dim)
            seen = (keys[:, :, :end], values[:, :, :end])
            keys_at = torch.arange(end, device=self._device)
            rows_at = torch.arange(last - rows, last, device=self._device)
            distances = (keys_at - rows_at[:, None])[None]
            attended = self._attend_in_float32(layer, step, grouped, *seen, mask, distances)
            pieces.append(attended.view(1, spec.num_heads, rows, spec.value_dim))
        return torch.cat(pieces, dim=2)

    def _attend_in_float32(
        self,
        layer: int,
        step: AttentionStep,
        queries: Tensor,
        keys: Tensor,
        values: Tensor,
        mask: Tensor,
        distances: Tensor,
    ) -> Tensor:
        """Attend with a softmax whose scores are soft-capped or biased, or have a sink beside them.

        queries: [n, kv_heads, rows, head_dim], one row for each query of each head in the group.
        distances: [n, queries, keys], place of the key minus that of the query.
        """
        spec, sinks = self._spec.attention(layer), step.sinks
        scores = queries.float() @ keys.float().transpose(2, 3) * spec.scale
        if cap := spec.cap:
            scores = (scores / cap).tanh() * cap
        if step.slopes is not None:
            slopes = step.slopes.view(spec.num_kv_heads, -1, 1, 1)
            scores += (slopes * distances[:, None, None]).flatten(2, 3)
        scores = scores.masked_fill(~mask, -torch.inf)
        if sinks is None:
            # a row that sees no key has the weights NaN
            weights = scores.softmax(dim=3).masked_fill(~mask, 0)
            return (weights @ values.float()).to(queries.dtype)
        group = spec.num_heads // spec.num_kv_heads
        grouped = sinks.view(spec.num_kv_heads, group)
        grouped = grouped.repeat_interleave(scores.shape[2] // group, dim=1)
        column = grouped[None, :, :, None].expand(len(scores), -1, -1, 1)
        weights = torch.cat((scores, column), dim=3).softmax(dim=3)[..., :-1]
        return (weights @ values.float()).to(queries.dtype)

    def _mask(self, layer: int, length: int, context: int, ends: Tensor | None) -> Tensor | None:
        """Return bool [length, context], or None if torch's own causal mask suffices."""
        window = self._spec.attention(layer).window
        if ends is None and length == context and (not window or context <= window):
            return None
        return self._visible(layer, length, context, context, ends)

    def _visible(
        self, layer: int, length: int, context: int, last: int, ends: Tensor | None
    ) -> Tensor:
        """Return which of `context` keys the `length` tokens before index `last` see.

        ends: the part of StepBatch.visible_ends for these tokens. Returns bool [length, context].
        """
        window = self._spec.attention(layer).window
        rows = torch.arange(last - length, last, device=self._device)[:, None]
        columns = torch.arange(context, device=self._device)
        visible = columns <= rows if ends is None else columns < ends[:, None]
        if window:
            visible &= columns > rows - window
        return visible


def _blocks(tokens: int, cache: KVCache) -> int:
    return -(-tokens // cache.block_size)


def _gather(layer: Tensor, tables: Tensor) -> Tensor:
    """Return the tables' blocks as [sequences, kv_heads, blocks * block_size, width]."""
    gathered = layer[tables].transpose(1, 2)
    return gathered.flatten(2, 3)
