"""Attention on CUDA through xformers 0.0.35.

Not yet run on a GPU. Tests on a CPU compare the biases with their definition and, under Triton's
interpreter, the split-K kernel with TorchAttention.
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
from services.engine.model.attention.interface import AttentionStep, KVCache
from services.engine.model.attention.torch_backend import TorchAttention

__all__ = ["XformersAttention"]

_PAGE = 64
"""The Triton split-K kernel needs a page size that is a multiple of this, in tokens"""
_HEAD_DIMS = (16, 32, 64, 128, 256)
"""Head dimensions that both xformers operators support"""
_DTYPES = (torch.float16, torch.bfloat16)


class XformersAttention(TorchAttention):
    """Decodes on the Triton split-K kernel over pages; prompt chunks on flash attention.

    All chunks of a step are one call. If any chunk has a cached prefix, the call reads all keys and
    values from the cache, otherwise from the step. TorchAttention serves soft caps, sinks, float32
    and other head dimensions.

    Strides put a block's tokens outermost, unlike TorchAttention's, so that the cache is one run of
    pages × page size tokens, as xformers reads it.
    """

    name = "xformers"
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
        self._is_supported = self.is_capturable = (
            spec.has_plain_attention and dtype in _DTYPES and spec.head_dim in _HEAD_DIMS
        )
        self._metadata: _StepMetadata | None = None

    def allocate(self, num_blocks: int, block_size: int) -> KVCache:
        if block_size % _PAGE:
            raise ValueError(f"the block size must be a multiple of {_PAGE}, got {block_size}")
        shape = (num_blocks, block_size, self._spec.num_kv_heads, self._spec.head_dim)

        def make() -> Tensor:
            return torch.zeros(shape, dtype=self._dtype, device=self._device).transpose(1, 2)

        return KVCache.allocate(self._spec.num_layers, block_size, make)

    def _write_and_decode(self, layer: int, step: AttentionStep) -> None:
        batch, cache = step.batch, step.cache
        _tokens(cache.keys[layer]).index_copy_(0, batch.slots, step.keys)
        _tokens(cache.values[layer]).index_copy_(0, batch.slots, step.values)
        if batch.num_decodes:
            self._decode(layer, step)
        if self._prefills(batch) and len(batch.query_lengths_host) > batch.num_decodes:
            self._prefill_at_once(layer, step)

    def _decode(self, layer: int, step: AttentionStep) -> None:
        if not self._is_supported:
            super()._decode(layer, step)
            return
        batch, cache = step.batch, step.cache
        count, rows = batch.num_decodes, row_bucket(batch.num_decodes)
        bias = self._metadata_of(batch, cache).decode_bias(self._spec.windows[layer])
        queries = step.queries[:count]
        if rows != count:  # the kernel is compiled for a number of rows
            queries = pad(queries, (0, 0, 0, 0, 0, rows - count))
        attended = fmha.memory_efficient_attention_forward(
            queries.reshape(1, rows, self._spec.num_kv_heads, self._group, self._spec.head_dim),
            self._grouped(_tokens(cache.keys[layer])),
            self._grouped(_tokens(cache.values[layer])),
            attn_bias=bias,
            scale=self._spec.attention_scale,
            op=fmha.triton_splitk.FwOp,
        )
        step.out[:count] = attended.reshape(rows, -1)[:count]

    def _prefill(self, layer: int, step: AttentionStep) -> None:
        if not self._prefills(step.batch):
            super()._prefill(layer, step)

    def _prefills(self, batch: StepBatch) -> bool:
        """Return whether xformers computes the prompt chunks: torch does where images see ahead."""
        return self._is_supported and batch.visible_ends is None

    def _prefill_at_once(self, layer: int, step: AttentionStep) -> None:
        cache, spec, first = step.cache, self._spec, step.batch.num_decodes
        metadata = self._metadata_of(step.batch, cache)
        if metadata.slots is None:
            keys, values = step.keys[first:], step.values[first:]
        else:
            keys = _tokens(cache.keys[layer]).index_select(0, metadata.slots)
            values = _tokens(cache.values[layer]).index_select(0, metadata.slots)
        attended = fmha.memory_efficient_attention_forward(
            step.queries[first:].reshape(1, -1, spec.num_kv_heads, self._group, spec.head_dim),
            self._grouped(keys),
            self._grouped(values),
            attn_bias=metadata.prefill_bias(spec.windows[layer]),
            scale=spec.attention_scale,
            op=fmha.flash.FwOp,
        )
        step.out[first:] = attended.reshape(len(step.queries) - first, -1)

    def _grouped(self, tokens: Tensor) -> Tensor:
        """Return a view [1, tokens, kv_heads, group, head_dim] that repeats each key head."""
        return tokens[None, :, :, None].expand(-1, -1, -1, self._group, -1)

    def _metadata_of(self, batch: StepBatch, cache: KVCache) -> "_StepMetadata":
        if self._metadata is None or self._metadata.batch is not batch:
            self._metadata = _StepMetadata(batch, cache.block_size)
        return self._metadata


class _StepMetadata:
    """Attention metadata that the layers of one step share, made on first use."""

    def __init__(self, batch: StepBatch, page: int) -> None:
        self.batch = batch
        self._page = page
        self._decode_biases: dict[int, object] = {}
        self._prefill_biases: dict[int, object] = {}

    @cached_property
    def slots(self) -> Tensor | None:
        """Cache slots of all chunks' contexts, int64 [tokens]; None: no chunk has a prefix."""
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
    """Return the bias of one query per row over `lengths` paged tokens, or the last `window`.

    tables: int32 [rows, pages]; lengths: int32 [rows]. The bias depends on their shapes only: a
    captured graph must hold for other values, so the host-side fields are upper bounds.
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
    # For each sequence, the first visible token and the end of its context.
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
    """Return the causal bias of the last `lengths` tokens of each context, packed end to end."""
    bias = BlockDiagonalCausalFromBottomRightMask.from_seqlens(
        list(lengths), list(contexts), device=device
    )
    return bias.make_local_attention_from_bottomright(window) if window else bias


def _tokens(layer: Tensor) -> Tensor:
    """View one layer's cache as [slots, kv_heads, head_dim]."""
    return layer.transpose(1, 2).flatten(0, 1)
