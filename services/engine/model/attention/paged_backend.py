"""Attention on CUDA: torch's flash attention for whole prompts, else our kernel over pages.

Tests on a CPU compare the kernels with TorchAttention under Triton's interpreter, and compile them.
"""

from collections.abc import Mapping
from functools import cached_property

import torch
from torch import Tensor

from services.engine.batch.step_batch import SharedPrefixes, StepBatch
from services.engine.model.architecture.layers import AttentionSpec
from services.engine.model.architecture.spec import ModelSpec
from services.engine.model.attention.cache_kernel import write_tokens
from services.engine.model.attention.interface import AttentionStep, KVCache
from services.engine.model.attention.paged_kernels import (
    PagedRows,
    PagedShape,
    attend_pages,
    attend_shared,
)
from services.engine.model.attention.torch_backend import TorchAttention

__all__ = ["PagedAttention", "StepMetadata", "tokens_of"]

_PAGE = 64
"""Divisor of page sizes, in tokens: kernels read as many keys at a time"""
_MAX_HEAD_DIM = 512
_MAX_FLASH_HEAD_DIM = 256
_BATCHES = 8
"""Number of batches whose metadata is kept: one step's, one for each cache group"""
_DTYPES = (torch.float16, torch.bfloat16)


class PagedAttention(TorchAttention):
    """Backend that reads keys and values from pages, for decodes and chunks after a cached prefix.

    Prompts without a cached prefix use torch's flash attention in layers with plain attention,
    values as wide as keys, and head dimensions up to 256. Our Triton kernel does the rest.
    TorchAttention serves float32 and head dimensions above 512.

    Strides put a block's tokens outermost, unlike TorchAttention's, so that the cache is one run of
    pages × page size tokens.
    """

    name = "triton"
    block_size = _PAGE

    def __init__(
        self,
        spec: ModelSpec,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        super().__init__(spec, dtype, device)
        self._is_supported = self.is_capturable = (
            dtype in _DTYPES and spec.widest_head <= _MAX_HEAD_DIM
        )
        self._flash_layers = {
            index
            for index, layer in spec.attention_layers.items()
            if layer.is_plain
            and layer.value_dim == layer.head_dim
            and layer.head_dim % 8 == 0
            and layer.head_dim <= _MAX_FLASH_HEAD_DIM
        }
        self._has_flash = torch.backends.cuda.is_flash_attention_available()
        self.reads_shared_once = self._is_supported
        self._metadata: dict[int, StepMetadata] = {}
        """Metadata of the newest batches, by the batch's id()"""

    def allocate(
        self,
        num_blocks: int | Mapping[int, int],
        block_size: int,
        layers: Mapping[int, AttentionSpec] | None = None,
    ) -> KVCache:
        if block_size % _PAGE:
            raise ValueError(f"the block size must be a multiple of {_PAGE}, got {block_size}")

        def make(layer: AttentionSpec, blocks: int, width: int) -> Tensor:
            shape = (blocks, block_size, layer.num_kv_heads, width)
            return torch.zeros(shape, dtype=self.kv_dtype, device=self._device).transpose(1, 2)

        return KVCache.allocate(layers or self._spec.paged_layers, num_blocks, block_size, make)

    def write(self, layer: int, step: AttentionStep) -> None:
        caches = tokens_of(step.cache.keys[layer]), tokens_of(step.cache.values[layer])
        write_tokens(step.keys, step.values, *caches, step.batch.slots)

    def _decode(self, layer: int, step: AttentionStep) -> None:
        if not self._is_supported:
            super()._decode(layer, step)
            return
        decodes = self._metadata_of(step.batch).decodes
        part = slice(0, step.batch.num_decodes)
        self._attend_pages(layer, step, decodes, part, step.batch.prefixes)

    def _prefill(self, layer: int, step: AttentionStep) -> None:
        if not self._is_supported:
            super()._prefill(layer, step)
            return
        metadata, first = self._metadata_of(step.batch), step.batch.num_decodes
        if not metadata.has_chunks:
            return
        has_flash = self._has_flash and layer in self._flash_layers
        if has_flash and metadata.has_whole_prompts and len(step.keys):
            attended = flash_attention(
                step.queries[first:],
                step.keys[first:],
                step.values[first:],
                metadata.chunk_starts,
                metadata.chunks.longest,
                self._spec.attention(layer).scale,
                self._spec.attention(layer).window,
            )
            step.out[first:] = attended.flatten(1)
        else:
            self._attend_pages(layer, step, metadata.chunks, slice(first, None))

    def _attend_pages(
        self,
        layer: int,
        step: AttentionStep,
        rows: PagedRows,
        part: slice,
        prefixes: SharedPrefixes | None = None,
    ) -> None:
        """Attend for the sequences of `rows`; their queries are the slice `part` of the step's."""
        spec, cache = self._spec.attention(layer), step.cache
        shape = PagedShape(
            spec.num_heads,
            spec.num_kv_heads,
            spec.head_dim,
            spec.value_dim,
            cache.block_size,
            spec.scale,
            spec.cap,
            spec.window,
        )
        operands = (
            step.queries[part],
            cache.keys[layer].transpose(1, 2),
            cache.values[layer].transpose(1, 2),
            step.sinks,
            step.out[part],
            step.slopes,
        )
        if prefixes is None or shape.window:
            attend_pages(shape, rows, *operands)
        else:
            attend_shared(shape, rows, prefixes, *operands)

    def _metadata_of(self, batch: StepBatch) -> "StepMetadata":
        found = self._metadata.get(id(batch))
        if found is None or found.batch is not batch:
            if len(self._metadata) >= _BATCHES:
                self._metadata.clear()
            found = self._metadata[id(batch)] = StepMetadata(batch)
        return found


class StepMetadata:
    """Attention metadata that the layers of one step share, made on first use."""

    def __init__(self, batch: StepBatch) -> None:
        self.batch = batch
        first = batch.num_decodes
        lengths = batch.query_lengths_host[first:]
        self.has_chunks = bool(lengths)
        self.has_whole_prompts = (
            batch.visible_ends is None and lengths == batch.context_lengths_host[first:]
        )
        """True if flash attention computes the chunks, because all their keys are of this step"""

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
            most_tokens=max(batch.context_lengths_host[first:]),
        )

    @cached_property
    def chunk_starts(self) -> Tensor:
        """First row of each chunk among the rows of all chunks, int32 [chunks + 1]."""
        starts = self.batch.query_starts[self.batch.num_decodes :]
        return starts - starts[0] if self.batch.num_decodes else starts


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


def tokens_of(layer: Tensor) -> Tensor:
    """View one layer's keys or values as [slots, kv_heads, width]."""
    return layer.transpose(1, 2).flatten(0, 1)
