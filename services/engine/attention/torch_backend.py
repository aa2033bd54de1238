"""Attention in plain torch: every dtype, every device, exact in float32."""

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from services.engine.attention.interface import AttentionBackend, KVCache
from services.engine.batch import StepBatch
from services.engine.model.spec import ModelSpec

__all__ = ["TorchAttention"]


class TorchAttention(AttentionBackend):
    """Gathers each sequence's blocks and calls torch's scaled_dot_product_attention.

    Layout of a layer's keys and of its values: [blocks, kv_heads, block_size, head_dim].
    """

    def __init__(self, spec: ModelSpec, dtype: torch.dtype, device: torch.device) -> None:
        self._spec = spec
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
        attended = scaled_dot_product_attention(
            grouped,
            keys,
            values,
            attn_mask=visible[:, None, None, :],
            scale=spec.attention_scale,
        )
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
            mask = self._mask(layer, length, context)
            attended = scaled_dot_product_attention(
                chunk,
                keys,
                values,
                attn_mask=mask,
                is_causal=mask is None,
                scale=spec.attention_scale,
                enable_gqa=spec.num_heads != spec.num_kv_heads,
            )
            out[start : start + length] = attended[0].transpose(0, 1)
            start += length

    def _mask(self, layer: int, length: int, context: int) -> Tensor | None:
        """bool [length, context], or None where torch's own causal mask is the right one."""
        window = self._spec.windows[layer]
        if length == context and (not window or context <= window):
            return None
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
