"""Attention on CUDA: xformers' split-K, torch's flash attention, and our kernel over pages.

Not yet run on a GPU. Tests on a CPU compare the kernels with TorchAttention under Triton's
interpreter, and compile them.
"""

import logging
from functools import cached_property

import torch
from torch import Tensor
from torch.nn.functional import pad

from services.engine.batch.buckets import row_bucket
from services.engine.batch.step_batch import StepBatch
from services.engine.model.architecture.spec import ModelSpec
from services.engine.model.attention.cache_kernel import write_tokens
from services.engine.model.attention.interface import AttentionStep, KVCache
from services.engine.model.attention.paged_kernels import PagedRows, PagedShape, attend_pages
from services.engine.model.attention.paged_tiles import (
    SPLIT_K_STAGES,
    SPLIT_K_WARPS,
    count_splits,
)
from services.engine.model.attention.torch_backend import TorchAttention


def _is_no_lack_of_extensions(record: logging.LogRecord) -> bool:
    return "C++" not in record.getMessage()


# xformers warns that its C++ extensions don't load: PyPI's are built for another CUDA than torch's.
# Nothing here calls them.
logging.getLogger("xformers").addFilter(_is_no_lack_of_extensions)

from xformers.ops import fmha  # noqa: E402
from xformers.ops.fmha.attn_bias import (  # noqa: E402
    PagedBlockDiagonalPaddedKeysMask,
    _PaddedSeqLenInfo,
    _SeqLenInfo,
)

logging.getLogger("xformers").removeFilter(_is_no_lack_of_extensions)

__all__ = ["XformersAttention"]

_PAGE = 64
"""Page sizes are multiples of this, in tokens: split-K reads as many keys at a time"""
_MAX_HEAD_DIM = 256
_SPLIT_K_HEAD_DIMS = (16, 32, 64, 128, 256)
_DTYPES = (torch.float16, torch.bfloat16)


class _SplitK(fmha.triton_splitk.FwOp):  # type: ignore[misc]
    """xformers' operator, without the rows that pad its float32 parts to a multiple of 32."""

    MAX_BLOCK_M = 1


class XformersAttention(TorchAttention):
    """Reads keys and values from pages, for decodes and for prompt chunks behind a cached prefix.

    Steps that only decode use xformers' split-K in layers with plain attention over the whole
    context. Prompts without a cached prefix use torch's flash attention, again if it is plain. Our
    Triton kernel does the rest: soft caps, sinks, windows of decodes, images that see ahead, other
    head dimensions, and mixed steps. TorchAttention serves float32 and head dimensions above 256.

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
        self._is_supported = self.is_capturable = (
            dtype in _DTYPES and spec.head_dim <= _MAX_HEAD_DIM
        )
        self._has_split_k = spec.has_plain_attention and spec.head_dim in _SPLIT_K_HEAD_DIMS
        self._has_flash = (
            spec.has_plain_attention
            and spec.head_dim % 8 == 0
            and torch.backends.cuda.is_flash_attention_available()
        )
        self._metadata: _StepMetadata | None = None

    def allocate(self, num_blocks: int, block_size: int) -> KVCache:
        if block_size % _PAGE:
            raise ValueError(f"the block size must be a multiple of {_PAGE}, got {block_size}")
        shape = (num_blocks, block_size, self._spec.num_kv_heads, self._spec.head_dim)

        def make() -> Tensor:
            return torch.zeros(shape, dtype=self._dtype, device=self._device).transpose(1, 2)

        return KVCache.allocate(self._spec.num_layers, block_size, make)

    def _write(self, layer: int, step: AttentionStep) -> None:
        caches = _tokens(step.cache.keys[layer]), _tokens(step.cache.values[layer])
        write_tokens(step.keys, step.values, *caches, step.batch.slots)

    def _decode(self, layer: int, step: AttentionStep) -> None:
        if not self._is_supported:
            super()._decode(layer, step)
            return
        metadata = self._metadata_of(step.batch, step.cache)
        if self._has_split_k and not self._spec.windows[layer] and not metadata.has_chunks:
            self._decode_by_split_k(layer, step, metadata)
        else:
            self._attend_pages(layer, step, metadata.decodes, slice(0, step.batch.num_decodes))

    def _decode_by_split_k(
        self, layer: int, step: AttentionStep, metadata: "_StepMetadata"
    ) -> None:
        spec, cache, count = self._spec, step.cache, step.batch.num_decodes
        rows, group = row_bucket(count), spec.num_heads // spec.num_kv_heads
        queries = step.queries
        if rows != count:  # the kernel is compiled for a number of rows
            queries = pad(queries, (0, 0, 0, 0, 0, rows - count))
        keys, values = (
            _tokens(pages[layer])[None, :, :, None].expand(-1, -1, -1, group, -1)
            for pages in (cache.keys, cache.values)
        )
        splits = count_splits(
            rows * spec.num_kv_heads,
            rows,
            spec.num_heads,
            spec.head_dim,
            step.batch.block_tables.shape[1] * cache.block_size,
        )
        # The operator itself: the function in front of it demands xformers' C++ extensions.
        attended, _ = _SplitK.get_operator(
            splits, num_warps=SPLIT_K_WARPS, num_stages=SPLIT_K_STAGES
        ).apply(
            fmha.Inputs(
                queries.reshape(1, rows, spec.num_kv_heads, group, spec.head_dim),
                keys,
                values,
                attn_bias=metadata.decode_bias,
                scale=spec.attention_scale,
            ),
            needs_gradient=False,
        )
        step.out[:count] = attended.reshape(rows, -1)[:count]

    def _prefill(self, layer: int, step: AttentionStep) -> None:
        if not self._is_supported:
            super()._prefill(layer, step)
            return
        metadata, first = self._metadata_of(step.batch, step.cache), step.batch.num_decodes
        if not metadata.has_chunks:
            return
        if self._has_flash and metadata.has_whole_prompts:
            attended = flash_attention(
                step.queries[first:],
                step.keys[first:],
                step.values[first:],
                metadata.chunk_starts,
                metadata.chunks.longest,
                self._spec.attention_scale,
                self._spec.windows[layer],
            )
            step.out[first:] = attended.flatten(1)
        else:
            self._attend_pages(layer, step, metadata.chunks, slice(first, None))

    def _attend_pages(self, layer: int, step: AttentionStep, rows: PagedRows, part: slice) -> None:
        """Attend for the sequences of `rows`, whose queries are `part` of the step's."""
        spec, cache = self._spec, step.cache
        shape = PagedShape(
            spec.num_heads,
            spec.num_kv_heads,
            spec.head_dim,
            cache.block_size,
            spec.attention_scale,
            spec.attention_cap,
            spec.windows[layer],
        )
        attend_pages(
            shape,
            rows,
            step.queries[part],
            cache.keys[layer].transpose(1, 2),
            cache.values[layer].transpose(1, 2),
            None if self._sinks is None else self._sinks[layer],
            step.out[part],
        )

    def _metadata_of(self, batch: StepBatch, cache: KVCache) -> "_StepMetadata":
        if self._metadata is None or self._metadata.batch is not batch:
            self._metadata = _StepMetadata(batch, cache.block_size)
        return self._metadata


class _StepMetadata:
    """Attention metadata that the layers of one step share, made on first use."""

    def __init__(self, batch: StepBatch, page: int) -> None:
        self.batch = batch
        self._page = page
        first = batch.num_decodes
        lengths = batch.query_lengths_host[first:]
        self.has_chunks = bool(lengths)
        self.has_whole_prompts = (
            batch.visible_ends is None and lengths == batch.context_lengths_host[first:]
        )
        """True if flash attention computes the chunks: all their keys are the step's"""

    @cached_property
    def decodes(self) -> PagedRows:
        batch, count = self.batch, self.batch.num_decodes
        return PagedRows(
            batch.query_starts[: count + 1],
            batch.context_lengths[:count],
            batch.block_tables[:count],
            ends=None,
            longest=1,
        )

    @cached_property
    def chunks(self) -> PagedRows:
        batch, first = self.batch, self.batch.num_decodes
        return PagedRows(
            batch.query_starts[first:],
            batch.context_lengths[first:],
            batch.block_tables[first:],
            ends=None if batch.visible_ends is None else batch.visible_ends[first:],
            longest=max(batch.query_lengths_host[first:]),
        )

    @cached_property
    def chunk_starts(self) -> Tensor:
        """Where each chunk begins among the rows of all chunks, int32 [chunks + 1]."""
        starts = self.batch.query_starts[self.batch.num_decodes :]
        return starts - starts[0] if self.batch.num_decodes else starts

    @cached_property
    def decode_bias(self) -> object:
        batch, count = self.batch, self.batch.num_decodes
        rows = row_bucket(count)
        tables, lengths = batch.block_tables[:count], batch.context_lengths[:count]
        if rows != count:
            tables = pad(tables, (0, 0, 0, rows - count))
            lengths = pad(lengths, (0, rows - count), value=1)
        return decode_bias(tables, lengths, self._page)


def decode_bias(tables: Tensor, lengths: Tensor, page: int) -> object:
    """Return the bias of one query per row over `lengths` paged tokens.

    tables: int32 [rows, pages]; lengths: int32 [rows]. The bias depends on their shapes only: a
    captured graph must hold for other values, so the host-side fields are upper bounds.
    """
    rows, most = len(lengths), tables.shape[1] * page
    starts = torch.arange(rows + 1, dtype=torch.int32, device=lengths.device)
    queries = _SeqLenInfo(
        seqstart=starts, max_seqlen=1, min_seqlen=1, seqstart_py=list(range(rows + 1))
    )
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


def flash_attention(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    starts: Tensor,
    longest: int,
    scale: float,
    window: int,
) -> Tensor:
    """Return causal attention of packed sequences over themselves, [tokens, heads, head_dim].

    queries: [tokens, heads, head_dim]; keys, values: [tokens, kv_heads, head_dim]; starts: int32
    [sequences + 1]. Unlike torch.nn.attention.varlen, its operator has taken windows and groups of
    heads in every release that xformers supports.
    """
    attended: Tensor = torch.ops.aten._flash_attention_forward(
        queries,
        keys,
        values,
        starts,
        starts,
        longest,
        longest,
        0.0,
        True,
        False,
        scale=scale,
        window_size_left=window - 1 if window else -1,
        window_size_right=0,
    )[0]
    return attended


def _tokens(layer: Tensor) -> Tensor:
    """View one layer's cache as [slots, kv_heads, head_dim]."""
    return layer.transpose(1, 2).flatten(0, 1)
