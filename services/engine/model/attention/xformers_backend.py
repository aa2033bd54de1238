"""Attention on CUDA through xformers 0.0.35. The only file that imports it.

Not yet run on a GPU. What was checked on a CPU: the biases, written out, against their definition,
and the split-K kernel under Triton's interpreter against TorchAttention.
"""

from functools import cached_property

import torch
from torch import Tensor
from torch.nn.functional import pad
from xformers.ops import fmha
from xformers.ops.fmha.attn_bias import (
    BlockDiagonalCausalFromBottomRightMask,
    PagedBlockDiagonalGappyKeysMask,
    PagedBlockDiagonalPaddedKeysMask,
    _GappySeqInfo,
    _PaddedSeqLenInfo,
    _SeqLenInfo,
)

from services.engine.batch.buckets import row_bucket
from services.engine.batch.step_batch import StepBatch
from services.engine.model.architecture.spec import ModelSpec
from services.engine.model.attention.interface import KVCache
from services.engine.model.attention.torch_backend import TorchAttention

__all__ = ["XformersAttention", "decode_bias", "prefill_bias"]

_PAGE = 64
"""The Triton split-K kernel wants pages of a multiple of this many tokens"""
_HEAD_DIMS = (16, 32, 64, 128, 256)
"""Both operators can do these"""
_DTYPES = (torch.float16, torch.bfloat16)


class XformersAttention(TorchAttention):
    """Decodes by the Triton split-K kernel, from the pages themselves; prompts by flash attention.

    All chunks of a step are one call. Where any has a cached prefix, keys and values of all of them
    are gathered from the cache; else the step's own are read. Soft caps, sinks, float32 and other
    head dimensions are TorchAttention's.

    The layout differs from TorchAttention's in its strides only: a block's tokens are outermost, so
    that the cache is one run of pages × page size tokens, which is how xformers reads it.
    """

    block_size = _PAGE

    def __init__(
        self,
        spec: ModelSpec,
        dtype: torch.dtype,
        device: torch.device,
        sinks: tuple[Tensor, ...] | None = None,
    ) -> None:
        super().__init__(spec, dtype, device, sinks)
        self._group = spec.num_heads // spec.num_kv_heads
        self._can = spec.has_plain_attention and dtype in _DTYPES and spec.head_dim in _HEAD_DIMS
        self.is_capturable = self._can
        self._shared: _Shared | None = None

    def allocate(self, num_blocks: int, block_size: int) -> KVCache:
        if block_size % _PAGE:
            raise ValueError(f"the block size must be a multiple of {_PAGE}, not {block_size}")
        shape = (num_blocks, block_size, self._spec.num_kv_heads, self._spec.head_dim)

        def layers() -> tuple[Tensor, ...]:
            return tuple(
                torch.zeros(shape, dtype=self._dtype, device=self._device).transpose(1, 2)
                for _ in range(self._spec.num_layers)
            )

        return KVCache(layers(), layers(), block_size)

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
        _tokens(cache.keys[layer]).index_copy_(0, batch.slots, keys)
        _tokens(cache.values[layer]).index_copy_(0, batch.slots, values)
        if batch.num_decodes:
            self._decode(layer, queries, batch, cache, out)
        if self._can and len(batch.query_lengths_host) > batch.num_decodes:
            self._prefill_at_once(layer, queries, keys, values, batch, cache, out)

    def _decode(
        self, layer: int, queries: Tensor, batch: StepBatch, cache: KVCache, out: Tensor
    ) -> None:
        if not self._can:
            super()._decode(layer, queries, batch, cache, out)
            return
        count, rows = batch.num_decodes, row_bucket(batch.num_decodes)
        bias = self._shared_by(batch, cache).decode_bias(self._spec.windows[layer])
        some = queries[:count]
        if rows != count:  # the kernel is compiled for a number of rows
            some = pad(some, (0, 0, 0, 0, 0, rows - count))
        attended = fmha.memory_efficient_attention_forward(
            some.reshape(1, rows, self._spec.num_kv_heads, self._group, self._spec.head_dim),
            self._grouped(_tokens(cache.keys[layer])),
            self._grouped(_tokens(cache.values[layer])),
            attn_bias=bias,
            scale=self._spec.attention_scale,
            op=fmha.triton_splitk.FwOp,
        )
        out[:count] = attended.reshape(rows, self._spec.num_heads, self._spec.head_dim)[:count]

    def _prefill(
        self, layer: int, queries: Tensor, batch: StepBatch, cache: KVCache, out: Tensor
    ) -> None:
        if not self._can:
            super()._prefill(layer, queries, batch, cache, out)

    def _prefill_at_once(
        self,
        layer: int,
        queries: Tensor,
        keys: Tensor,
        values: Tensor,
        batch: StepBatch,
        cache: KVCache,
        out: Tensor,
    ) -> None:
        first, shared, spec = batch.num_decodes, self._shared_by(batch, cache), self._spec
        if shared.slots is None:
            keys, values = keys[first:], values[first:]
        else:
            keys = _tokens(cache.keys[layer]).index_select(0, shared.slots)
            values = _tokens(cache.values[layer]).index_select(0, shared.slots)
        attended = fmha.memory_efficient_attention_forward(
            queries[first:].reshape(1, -1, spec.num_kv_heads, self._group, spec.head_dim),
            self._grouped(keys),
            self._grouped(values),
            attn_bias=shared.prefill_bias(spec.windows[layer]),
            scale=spec.attention_scale,
            op=fmha.flash.FwOp,
        )
        out[first:] = attended.reshape(-1, spec.num_heads, spec.head_dim)

    def _grouped(self, tokens: Tensor) -> Tensor:
        """[1, tokens, kv_heads, group, head_dim]; the group is a stride of 0, not a copy."""
        return tokens[None, :, :, None].expand(-1, -1, -1, self._group, -1)

    def _shared_by(self, batch: StepBatch, cache: KVCache) -> "_Shared":
        if self._shared is None or self._shared.batch is not batch:
            self._shared = _Shared(batch, cache.block_size)
        return self._shared


class _Shared:
    """What the layers of one step share: made by the first that needs it."""

    def __init__(self, batch: StepBatch, page: int) -> None:
        self.batch = batch
        self._page = page
        self._decode_biases: dict[int, object] = {}
        self._prefill_biases: dict[int, object] = {}

    @cached_property
    def slots(self) -> Tensor | None:
        """int64 [tokens], where the cache holds the contexts of all chunks; None = no prefixes."""
        batch, first = self.batch, self.batch.num_decodes
        contexts = batch.context_lengths_host[first:]
        if contexts == batch.query_lengths_host[first:]:
            return None
        offsets = torch.arange(self._page, device=batch.block_tables.device)
        tables = batch.block_tables[first:].long() * self._page
        pieces = [
            (table[: -(-context // self._page), None] + offsets).view(-1)[:context]
            for table, context in zip(tables, contexts, strict=True)
        ]
        return torch.cat(pieces)

    def decode_bias(self, window: int) -> object:
        if window not in self._decode_biases:
            batch, count = self.batch, self.batch.num_decodes
            rows = row_bucket(count)
            tables, lengths = batch.block_tables[:count], batch.context_lengths[:count]
            if rows != count:
                tables = pad(tables, (0, 0, 0, rows - count))
                lengths = pad(lengths, (0, rows - count), value=1)
            self._decode_biases[window] = decode_bias(tables, lengths, self._page, window)
        return self._decode_biases[window]

    def prefill_bias(self, window: int) -> object:
        if window not in self._prefill_biases:
            batch, first = self.batch, self.batch.num_decodes
            self._prefill_biases[window] = prefill_bias(
                batch.query_lengths_host[first:],
                batch.context_lengths_host[first:],
                window,
                batch.slots.device,
            )
        return self._prefill_biases[window]


def decode_bias(tables: Tensor, lengths: Tensor, page: int, window: int) -> object:
    """One query each over so many tokens in pages, or over the last `window` of them.

    tables: int32 [rows, pages]; lengths: int32 [rows]. Made without a look at either, so that a
    captured graph can be replayed with others: what xformers keeps on the host are bounds.
    """
    rows, most = len(lengths), tables.shape[1] * page
    starts = torch.arange(rows + 1, dtype=torch.int32, device=lengths.device)
    queries = _SeqLenInfo(
        seqstart=starts, max_seqlen=1, min_seqlen=1, seqstart_py=list(range(rows + 1))
    )
    if not window:
        keys = _PaddedSeqLenInfo(
            seqstart=starts * most,
            max_seqlen=most,
            min_seqlen=1,
            seqstart_py=list(range(0, rows * most + 1, most)),
            seqlen=lengths,
            seqlen_py=[most] * rows,
            padding=most,
        )
        return PagedBlockDiagonalPaddedKeysMask(queries, keys, tables, page)
    # of a sequence's pages, the first token seen, and the one behind the last
    seen = _GappySeqInfo(
        seqstart=pad((lengths - window).clamp(min=0), (0, 1)),
        max_seqlen=most,
        min_seqlen=1,
        seqstart_py=[0] * (rows + 1),
        seqlen=lengths,
        seqlen_py=[most] * rows,
    )
    return PagedBlockDiagonalGappyKeysMask(queries, seen, tables, page)


def prefill_bias(
    lengths: tuple[int, ...], contexts: tuple[int, ...], window: int, device: torch.device
) -> object:
    """Causal attention of the last `lengths` tokens of each of several contexts, end to end."""
    bias = BlockDiagonalCausalFromBottomRightMask.from_seqlens(
        list(lengths), list(contexts), device=device
    )
    return bias.make_local_attention_from_bottomright(window) if window else bias


def _tokens(layer: Tensor) -> Tensor:
    """One layer's cache as [tokens, kv_heads, head_dim], by slot."""
    return layer.transpose(1, 2).flatten(0, 1)
