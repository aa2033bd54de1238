"""Attention in plain torch: every dtype, every device, exact in float32."""

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from services.engine.batch.step_batch import StepBatch
from services.engine.model.architecture.spec import ModelSpec
from services.engine.model.attention.interface import AttentionBackend, KVCache

__all__ = ["TorchAttention"]

_PIECE = 256
"""Query rows whose logits are written out at once"""


class TorchAttention(AttentionBackend):
    """Gathers each sequence's blocks and calls torch's scaled_dot_product_attention.

    Where the softmax is not the plain one, it is written out, in float32.

    Layout of a layer's keys and of its values: [blocks, kv_heads, block_size, head_dim].
    """

    def __init__(
        self,
        spec: ModelSpec,
        dtype: torch.dtype,
        device: torch.device,
        sinks: tuple[Tensor, ...] | None = None,
    ) -> None:
        self._spec = spec
        self._sinks = sinks
        self._dtype = dtype
        self._device = device

    def allocate(self, num_blocks: int, block_size: int) -> KVCache:
        shape = (num_blocks, self._spec.num_kv_heads, block_size, self._spec.head_dim)

        def layers() -> tuple[Tensor, ...]:
            return tuple(
                torch.zeros(shape, dtype=self._dtype, device=self._device)
                for _ in range(self._spec.num_layers)
            )

        return KVCache(layers(), layers(), block_size)

    def attend(
        self,
        layer: int,
        queries: Tensor,
        keys: Tensor,
        values: Tensor,
        batch: StepBatch,
        cache: KVCache,
        out: Tensor,
    ) -> None:
        out = out.view(queries.shape)
        self._write_and_decode(layer, queries, keys, values, batch, cache, out)
        self._prefill(layer, queries, batch, cache, out)

    def _write_and_decode(
        self,
        layer: int,
        queries: Tensor,
        keys: Tensor,
        values: Tensor,
        batch: StepBatch,
        cache: KVCache,
        out: Tensor,
    ) -> None:
        """Writes all keys and values, then attends for the sequences that decode."""
        blocks, offsets = batch.slots // cache.block_size, batch.slots % cache.block_size
        cache.keys[layer][blocks, :, offsets] = keys
        cache.values[layer][blocks, :, offsets] = values
        if batch.num_decodes:
            self._decode(layer, queries, batch, cache, out)

    def _decode(
        self, layer: int, queries: Tensor, batch: StepBatch, cache: KVCache, out: Tensor
    ) -> None:
        """All decoding sequences at once, padded to the longest."""
        count, spec = batch.num_decodes, self._spec
        longest = max(batch.context_lengths_host[:count])
        tables = batch.block_tables[:count, : _blocks(longest, cache)].long()
        positions = torch.arange(tables.shape[1] * cache.block_size, device=self._device)
        lengths = batch.context_lengths[:count, None]
        visible = positions < lengths
        if window := spec.windows[layer]:
            visible &= positions >= lengths - window
        # The heads that share a key head become rows of one query, so no key is repeated.
        # Behind a context lies what an earlier sequence left, and a NaN would survive the mask.
        stale = ~visible[:, None, :, None]
        keys = _gather(cache.keys[layer], tables).masked_fill_(stale, 0)
        values = _gather(cache.values[layer], tables).masked_fill_(stale, 0)
        grouped = queries[:count].reshape(count, spec.num_kv_heads, -1, spec.head_dim)
        mask = visible[:, None, None, :]
        if spec.has_plain_attention:
            attended = scaled_dot_product_attention(
                grouped, keys, values, attn_mask=mask, scale=spec.attention_scale
            )
        else:
            attended = self._written_out(layer, grouped, keys, values, mask)
        out[:count] = attended.reshape(count, spec.num_heads, spec.head_dim)

    def _prefill(
        self, layer: int, queries: Tensor, batch: StepBatch, cache: KVCache, out: Tensor
    ) -> None:
        """One prompt chunk after another; each sees its cached prefix and, causally, itself."""
        spec = self._spec
        start = batch.num_decodes
        for sequence in range(batch.num_decodes, len(batch.query_lengths_host)):
            length = batch.query_lengths_host[sequence]
            context = batch.context_lengths_host[sequence]
            table = batch.block_tables[sequence : sequence + 1, : _blocks(context, cache)].long()
            chunk = queries[None, start : start + length].transpose(1, 2)
            keys = _gather(cache.keys[layer], table)[:, :, :context]
            values = _gather(cache.values[layer], table)[:, :, :context]
            attend = self._sdpa if spec.has_plain_attention else self._pieces
            attended = attend(layer, chunk, keys, values)
            out[start : start + length] = attended[0].transpose(0, 1)
            start += length

    def _sdpa(self, layer: int, chunk: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        mask = self._mask(layer, chunk.shape[2], keys.shape[2])
        return scaled_dot_product_attention(
            chunk,
            keys,
            values,
            attn_mask=mask,
            is_causal=mask is None,
            scale=self._spec.attention_scale,
            enable_gqa=self._spec.num_heads != self._spec.num_kv_heads,
        )

    def _pieces(self, layer: int, chunk: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        """The same with the softmax written out, some rows at a time to bound its memory."""
        spec, (length, context) = self._spec, (chunk.shape[2], keys.shape[2])
        pieces = []
        for first in range(0, length, _PIECE):
            piece = chunk[:, :, first : first + _PIECE]
            rows = piece.shape[2]
            end = context - length + first + rows  # what lies behind is not seen
            mask = self._visible(layer, rows, end).repeat(spec.num_heads // spec.num_kv_heads, 1)
            grouped = piece.reshape(1, spec.num_kv_heads, -1, spec.head_dim)
            seen = (keys[:, :, :end], values[:, :, :end])
            attended = self._written_out(layer, grouped, *seen, mask)
            pieces.append(attended.view(1, spec.num_heads, rows, spec.head_dim))
        return torch.cat(pieces, dim=2)

    def _written_out(
        self, layer: int, queries: Tensor, keys: Tensor, values: Tensor, mask: Tensor
    ) -> Tensor:
        """Softmax with its logits capped, or with a sink beside them.

        queries: [n, kv_heads, rows, head_dim], a row for each query of each head of the group.
        """
        spec = self._spec
        scores = queries.float() @ keys.float().transpose(2, 3) * spec.attention_scale
        if cap := spec.attention_cap:
            scores = (scores / cap).tanh() * cap
        scores = scores.masked_fill(~mask, -torch.inf)
        if self._sinks is None:
            return (scores.softmax(dim=3) @ values.float()).to(queries.dtype)
        group = spec.num_heads // spec.num_kv_heads
        sinks = self._sinks[layer].view(spec.num_kv_heads, group)
        sinks = sinks.repeat_interleave(scores.shape[2] // group, dim=1)
        column = sinks[None, :, :, None].expand(len(scores), -1, -1, 1)
        weights = torch.cat((scores, column), dim=3).softmax(dim=3)[..., :-1]
        return (weights @ values.float()).to(queries.dtype)

    def _mask(self, layer: int, length: int, context: int) -> Tensor | None:
        """bool [length, context], or None where torch's own causal mask is the right one."""
        window = self._spec.windows[layer]
        if length == context and (not window or context <= window):
            return None
        return self._visible(layer, length, context)

    def _visible(self, layer: int, length: int, context: int) -> Tensor:
        """What the last `length` tokens see of `context`: bool [length, context]."""
        window = self._spec.windows[layer]
        rows = torch.arange(context - length, context, device=self._device)[:, None]
        columns = torch.arange(context, device=self._device)
        visible = columns <= rows
        if window:
            visible &= columns > rows - window
        return visible


def _blocks(tokens: int, cache: KVCache) -> int:
    return -(-tokens // cache.block_size)


def _gather(layer: Tensor, tables: Tensor) -> Tensor:
    """[sequences, kv_heads, blocks * block_size, head_dim] from blocks anywhere in the cache."""
    gathered = layer[tables].transpose(1, 2)
    return gathered.flatten(2, 3)
