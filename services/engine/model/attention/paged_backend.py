"""Attention on CUDA: torch's flash attention for whole prompts, else our kernel over pages.

Tests on a CPU compare the kernels with TorchAttention under Triton's interpreter, and compile them.
"""

from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from itertools import accumulate
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor

from services.engine.batch.step_batch import SharedPrefixes, StepBatch
from services.engine.model.architecture.layers import AttentionSpec
from services.engine.model.architecture.spec import ModelSpec
from services.engine.model.attention.cache_kernel import write_tokens
from services.engine.model.attention.flash import (
    attend_part,
    flash_attention,
    use_newest_flash,
)
from services.engine.model.attention.fp8_pages import KV_FP8, make_pages, numbers_of, write_fp8
from services.engine.model.attention.interface import AttentionStep, KVCache
from services.engine.model.attention.kv_dtype import WIDEST_HEAD
from services.engine.model.attention.long_prompts import (
    LongPrompts,
    PromptKernels,
    Way,
    is_long,
    takes_flash,
)
from services.engine.model.attention.paged_kernels import (
    PagedRows,
    PagedShape,
    attend_padded,
    attend_pages,
    attend_shared,
)
from services.engine.model.attention.prompt_chunk import PromptChunk
from services.engine.model.attention.torch_backend import TorchAttention

__all__ = ["PagedAttention", "StepMetadata", "tokens_of"]

_PAGE = 64
"""Divisor of page sizes, in tokens: kernels read as many keys at a time"""
_WITH_DESCRIPTORS = (9, 0)
"""Least compute capability with a tensor memory accelerator"""
_BATCHES = 8
"""Number of batches whose metadata is kept: one step's, one for each cache group"""
_DTYPES = (torch.float16, torch.bfloat16)


_Operands: TypeAlias = tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor, Tensor | None]
"""Queries, keys, values, sinks, output and slopes of a launch"""


class PagedAttention(TorchAttention):
    """Backend that reads keys and values from pages, for decodes and chunks after a cached prefix.

    Prompts without a cached prefix use torch's flash attention in layers with plain attention,
    values as wide as keys, and head dimensions up to 256. Long chunks of prompts use the way that
    `choose_kernels` has found the fastest. Our Triton kernel does the rest. TorchAttention serves
    float32 and head dimensions above 512.

    Strides put a block's tokens outermost, unlike TorchAttention's, so that the cache is one run of
    pages × page size tokens.
    """

    name = "triton"
    block_size = _PAGE
    has_pages = True

    def __init__(
        self,
        spec: ModelSpec,
        dtype: torch.dtype,
        device: torch.device,
        kv_dtype: torch.dtype | None = None,
    ) -> None:
        """kv_dtype: float8_e4m3fn for pages of `fp8_pages`; None = `dtype`."""
        super().__init__(spec, dtype, device)
        self._dtype = dtype
        self.kv_dtype = kv_dtype or dtype
        self._is_fp8 = self.kv_dtype == KV_FP8
        self._is_supported = self.is_capturable = (
            dtype in _DTYPES and spec.widest_head <= WIDEST_HEAD
        )
        self._flash_layers = {
            index
            for index, layer in spec.attention_layers.items()
            if layer.is_plain and takes_flash(layer)
        }
        self._has_flash = torch.backends.cuda.is_flash_attention_available()
        is_cuda = device.type == "cuda"
        if is_cuda and self._is_supported and self._flash_layers:
            use_newest_flash(device, self._try_flash)
        capability = torch.cuda.get_device_capability(device) if is_cuda else _WITH_DESCRIPTORS
        self._long_prompts = LongPrompts(
            spec.attention_layers,
            PromptKernels(
                _PAGE, dtype, self.kv_dtype, self._has_flash, capability >= _WITH_DESCRIPTORS
            ),
        )
        self.reads_shared_once = self.sees_chunks = self._is_supported
        self._metadata: dict[int, StepMetadata] = {}
        """Metadata of the newest batches, by the batch's id()"""

    def token_bytes(self, layer: AttentionSpec) -> int:
        return super().token_bytes(layer) + 2 * layer.num_kv_heads * self._is_fp8

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
            if self._is_fp8:
                return make_pages(*shape, self._device)
            return torch.zeros(shape, dtype=self.kv_dtype, device=self._device).transpose(1, 2)

        return KVCache.allocate(layers or self._spec.paged_layers, num_blocks, block_size, make)

    def write(self, layer: int, step: AttentionStep) -> None:
        keys, values = self.pages(layer, step.cache)
        if self._is_fp8:
            write_fp8(step.keys, step.values, keys, values, step.batch.slots)
        else:
            caches = keys.flatten(0, 1), values.flatten(0, 1)
            write_tokens(step.keys, step.values, *caches, step.batch.slots)

    def pages(self, layer: int, cache: KVCache) -> tuple[Tensor, Tensor]:
        keys, values = cache.keys[layer], cache.values[layer]
        if not self._is_fp8:
            return keys.transpose(1, 2), values.transpose(1, 2)
        spec = self._spec.attention(layer)
        page, heads = cache.block_size, spec.num_kv_heads
        key_pages = numbers_of(keys, page, heads, spec.head_dim)
        return key_pages, numbers_of(values, page, heads, spec.value_dim)

    def attend(self, layer: int, step: AttentionStep) -> None:
        batch, padded = step.batch, step.batch.padded
        if padded is None:
            super().attend(layer, step)
            return
        if not step.is_written:
            self.write(layer, step)
        rows = PagedRows(
            batch.query_starts,
            batch.context_lengths,
            batch.block_tables,
            ends=None,
            longest=len(step.queries),
            counts=padded.counts,
        )
        operands = self._operands(layer, step, slice(None))
        shape = PagedShape.of(self._spec.attention(layer), step.cache.block_size)
        attend_padded(shape, rows, padded.most_chunks, batch.prefixes, *operands)

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
        spans = self._metadata_of(step.batch).spans
        begin = 0
        for number, way in self._ways(layer, step.batch):
            self._attend_chunks(layer, step, begin, number)
            way.attend(self._chunk(layer, step, spans[number]))
            begin = number + 1
        self._attend_chunks(layer, step, begin, len(spans))

    def choose_kernels(self, tokens: int) -> None:
        if self._is_supported:
            self._long_prompts.measure(tokens, self._spec.context_length, self._device)

    def _try_flash(self) -> None:
        """Call flash attention as each layer does; its errors are those of the operator."""
        starts = torch.tensor([0, _PAGE], dtype=torch.int32, device=self._device)
        for layer in {self._spec.attention(index) for index in self._flash_layers}:
            queries, keys, values = (
                torch.zeros(_PAGE, heads, layer.head_dim, dtype=self._dtype, device=self._device)
                for heads in (layer.num_heads, layer.num_kv_heads, layer.num_kv_heads)
            )
            flash_attention(queries, keys, values, starts, _PAGE, layer.scale, layer.window)
            attend_part(queries, keys, values, layer.scale, is_causal=False)

    def _ways(self, layer: int, batch: StepBatch) -> Iterator[tuple[int, Way]]:
        """Yield the number of each long chunk that has a way in this layer, and the way."""
        metadata = self._metadata_of(batch)
        for number in metadata.long_chunks:
            span = metadata.spans[number]
            way = self._long_prompts.way(layer, span.rows, span.context)
            if way is not None:
                yield number, way

    def _chunk(self, layer: int, step: AttentionStep, span: "Span") -> PromptChunk:
        part = slice(span.first, span.first + span.rows)
        has_keys = _has_keys_of_rows(step)
        spec = self._spec.attention(layer)
        return PromptChunk(
            step.queries[part],
            step.keys[part] if has_keys else None,
            step.values[part] if has_keys else None,
            *self.pages(layer, step.cache),
            step.batch.block_tables[span.sequence],
            span.context,
            step.sinks,
            step.out[part].view(span.rows, spec.num_heads, spec.value_dim),
        )

    def _attend_chunks(self, layer: int, step: AttentionStep, begin: int, end: int) -> None:
        """Attend for the chunks from number `begin` to `end` with the usual kernels."""
        if begin == end:
            return
        chunks = self._metadata_of(step.batch).chunks(begin, end)
        spec = self._spec.attention(layer)
        has_flash = self._has_flash and layer in self._flash_layers
        if spec.is_chunked:
            has_flash &= chunks.longest_context <= spec.window
        if has_flash and chunks.are_whole_prompts and _has_keys_of_rows(step):
            attended = flash_attention(
                step.queries[chunks.part],
                step.keys[chunks.part],
                step.values[chunks.part],
                chunks.starts,
                chunks.rows.longest,
                spec.scale,
                spec.window,
            )
            step.out[chunks.part] = attended.flatten(1)
        else:
            self._attend_pages(layer, step, chunks.rows, chunks.part)

    def _attend_pages(
        self,
        layer: int,
        step: AttentionStep,
        rows: PagedRows,
        part: slice,
        prefixes: SharedPrefixes | None = None,
    ) -> None:
        """Attend for the sequences of `rows`; their queries are the slice `part` of the step's."""
        shape = PagedShape.of(self._spec.attention(layer), step.cache.block_size)
        operands = self._operands(layer, step, part)
        if prefixes is None or shape.window:
            attend_pages(shape, rows, *operands)
        else:
            attend_shared(shape, rows, prefixes, *operands)

    def _operands(self, layer: int, step: AttentionStep, part: slice) -> _Operands:
        """Return the tensors of a launch for the slice `part` of the step's queries."""
        return (
            step.queries[part],
            *self.pages(layer, step.cache),
            step.sinks,
            step.out[part],
            step.slopes,
        )

    def _metadata_of(self, batch: StepBatch) -> "StepMetadata":
        found = self._metadata.get(id(batch))
        if found is None or found.batch is not batch:
            if len(self._metadata) >= _BATCHES:
                self._metadata.clear()
            found = self._metadata[id(batch)] = StepMetadata(batch)
        return found


class Span(NamedTuple):
    """A chunk's place in a batch."""

    sequence: int
    """Number of the chunk's sequence"""
    first: int
    """Index of the chunk's first row"""
    rows: int
    context: int
    """Number of its sequence's tokens, up to its last one"""


class Chunks:
    """Chunks of neighbouring sequences, which one launch computes."""

    def __init__(self, batch: StepBatch, spans: Sequence[Span]) -> None:
        first, last = spans[0], spans[-1]
        sequences = slice(first.sequence, last.sequence + 1)
        ends = batch.visible_ends
        self.part = slice(first.first, last.first + last.rows)
        """Rows of the chunks"""
        self.longest_context = max(span.context for span in spans)
        """Number of tokens of the longest context"""
        self.rows = PagedRows(
            batch.query_starts[first.sequence : last.sequence + 2],
            batch.context_lengths[sequences],
            batch.block_tables[sequences],
            ends=None if ends is None else ends[self.part],
            longest=max(span.rows for span in spans),
            most_tokens=self.longest_context,
        )
        self.are_whole_prompts = ends is None and all(span.rows == span.context for span in spans)
        """True if flash attention computes them, because all their keys are of this step"""

    @cached_property
    def starts(self) -> Tensor:
        """First row of each chunk among the rows of all chunks, int32 [chunks + 1]."""
        starts = self.rows.starts
        return starts - starts[0] if self.part.start else starts


class StepMetadata:
    """Attention metadata that the layers of one step share, made on first use."""

    def __init__(self, batch: StepBatch) -> None:
        self.batch = batch
        lengths = batch.query_lengths_host
        firsts = accumulate(lengths, initial=0)
        places = enumerate(zip(firsts, lengths, batch.context_lengths_host, strict=False))
        self.spans = [Span(sequence, *place) for sequence, place in places][batch.num_decodes :]
        """The chunks in order"""
        chunks = enumerate(self.spans if batch.visible_ends is None else ())
        self.long_chunks = [number for number, span in chunks if is_long(span.rows, span.context)]
        """Numbers of the long chunks whose rows see the keys up to their own"""
        self._chunks: dict[tuple[int, int], Chunks] = {}

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

    def chunks(self, begin: int, end: int) -> Chunks:
        """Return the chunks from number `begin` to `end`."""
        key = begin, end
        if key not in self._chunks:
            self._chunks[key] = Chunks(self.batch, self.spans[begin:end])
        return self._chunks[key]


def _has_keys_of_rows(step: AttentionStep) -> bool:
    """Return whether a step's keys are those of its rows.

    A narrowed batch has fewer rows than tokens, and some layers read the keys of others.
    """
    return len(step.keys) == len(step.queries)


def tokens_of(layer: Tensor) -> Tensor:
    """View one layer's keys or values as [slots, kv_heads, width]."""
    return layer.transpose(1, 2).flatten(0, 1)
