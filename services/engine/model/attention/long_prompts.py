"""Attention of long chunks of prompts, by the way that is the fastest on this GPU."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from services.engine.model.architecture.layers import AttentionSpec
from services.engine.model.attention.flash import (
    attend_part,
    attend_part_by_cudnn,
    flash_attention,
)
from services.engine.model.attention.fp8_pages import KV_FP8, rounded_pages
from services.engine.model.attention.launch_times import fastest
from services.engine.model.attention.paged_kernels import PagedRows, PagedShape, attend_pages
from services.engine.model.attention.prompt_chunk import PromptChunk
from services.engine.model.attention.prompt_kernels import gather_tokens, merge_attention
from services.engine.model.attention.wide_kernel import WIDE_TILES, WideTile, attend_widely

__all__ = ["InParts", "LongPrompts", "PromptKernels", "Way", "Widely", "is_long", "takes_flash"]

_LEAST_ROWS = 512
"""Least rows of a long chunk: the further launches of a shorter one cost more than they save"""
_LEAST_PAIRS = 1 << 21
"""Least product of a long chunk's rows and tokens"""
_GATHERED_BYTES = 64 << 20
"""Most bytes of the keys and values that are gathered from pages at a time"""
_GATHERED_UNIT = 1024
"""Tokens of which a gathered piece is a multiple, and has one at least"""
_MEASURED_PREFIX = 4
"""Tokens before the chunk of a measurement, as a multiple of the chunk's own"""
_MAX_FLASH_HEAD_DIM = 256


class Way(ABC):
    """A way to compute the attention of a chunk."""

    @abstractmethod
    def attend(self, chunk: PromptChunk) -> None:
        """Fill the chunk's output."""

    def prepare(self, chunk: PromptChunk) -> None:  # noqa: B027
        """Make what further chunks like this one need, before the first request."""


@dataclass(frozen=True, slots=True)
class Widely(Way):
    """The kernel for plain attention with the tensor memory accelerator."""

    scale: float
    tile: WideTile

    def attend(self, chunk: PromptChunk) -> None:
        attend_widely(chunk, self.scale, self.tile)

    def __str__(self) -> str:
        return str(self.tile)


@dataclass(frozen=True, slots=True)
class InParts(Way):
    """Flash attention over the chunk itself and over pieces of its prefix, merged.

    Pieces are gathered from their pages, `piece` tokens at a time. cuDNN computes the parts whose
    sizes are multiples of `unit`, for which it has plans; torch's flash attention does the others.
    """

    scale: float
    piece: int
    unit: int = 0
    """Number of a chunk's tokens for which cuDNN is used; 0: for none"""

    def attend(self, chunk: PromptChunk) -> None:
        queries, prefix = chunk.queries, chunk.prefix
        if chunk.keys is None or chunk.values is None:
            keys, values = self._gather(chunk, prefix, len(queries))
        else:
            keys, values = chunk.keys, chunk.values
        merged = self._part(queries, keys, values, is_causal=True)
        if not prefix:
            merge_attention(merged, None, chunk.sinks, chunk.out)
            return
        pieces = list(self.pieces(prefix, len(queries)))
        for first, count in pieces:
            keys, values = self._gather(chunk, first, count)
            further = self._part(queries, keys, values, is_causal=False)
            if first + count == prefix:
                merge_attention(merged, further, chunk.sinks, chunk.out)
            else:  # exact sums, because every part that is merged would round them again
                exact = torch.empty_like(merged[0], dtype=torch.float32)
                merge_attention(merged, further, None, exact, merged[1])
                merged = exact, merged[1]

    def prepare(self, chunk: PromptChunk) -> None:
        """Have cuDNN make its plans for all pieces of prefixes, and Triton compile all merges."""
        for pieces in (1, 2, 3) if chunk.prefix else ():
            context = pieces * self.piece + len(chunk.queries)
            tables = -(-context // chunk.key_pages.shape[1] // len(chunk.table))
            self.attend(replace(chunk, table=chunk.table.repeat(tables), context=context))
        longest = min(self.piece, chunk.prefix)
        for count in range(self.unit, longest + 1, self.unit) if self.unit else ():
            keys, values = self._gather(chunk, 0, count)
            self._part(chunk.queries, keys, values, is_causal=False)

    def pieces(self, prefix: int, rows: int) -> Iterator[tuple[int, int]]:
        """Yield the first token and the number of tokens of each piece of a prefix."""
        first = 0
        while first < prefix:
            count = min(self.piece, prefix - first)
            if rows == self.unit and count > self.unit:
                count -= count % self.unit
            yield first, count
            first += count

    def _part(
        self, queries: Tensor, keys: Tensor, values: Tensor, *, is_causal: bool
    ) -> tuple[Tensor, Tensor]:
        has_plan = len(queries) == self.unit and not len(keys) % self.unit
        attend = attend_part_by_cudnn if has_plan else attend_part
        return attend(queries, keys, values, self.scale, is_causal=is_causal)

    def _gather(self, chunk: PromptChunk, first: int, count: int) -> tuple[Tensor, Tensor]:
        keys, values = (
            chunk.queries.new_empty(count, *pages.shape[2:])
            for pages in (chunk.key_pages, chunk.value_pages)
        )
        gather_tokens(chunk.key_pages, chunk.table, first, keys)
        gather_tokens(chunk.value_pages, chunk.table, first, values)
        return keys, values

    def __str__(self) -> str:
        return "cuDNN in parts" if self.unit else "flash attention in parts"


@dataclass(frozen=True, slots=True)
class PromptKernels:
    """Kernels that compute the attention of prompts on a device."""

    page: int
    """Number of tokens of a page"""
    dtype: torch.dtype
    """Type of queries"""
    kv_dtype: torch.dtype
    """Type of keys and values in the pages"""
    has_flash: bool
    """True if torch's flash attention runs on the device"""
    has_descriptors: bool
    """True if there is a tensor memory accelerator, for which cuDNN has kernels, too"""

    def ways(self, spec: AttentionSpec, rows: int) -> list[Way]:
        """Return the ways that can compute a layer's attention beside the usual kernels.

        rows: number of a chunk's tokens for which cuDNN may make plans.
        """
        if spec.cap or spec.alibi_bias or spec.window or spec.index or spec.relative:
            return []
        found: list[Way] = []
        width, group = spec.head_dim, spec.num_heads // spec.num_kv_heads
        if self.has_descriptors and self.kv_dtype == self.dtype:
            found += [
                Widely(spec.scale, tile)
                for tile in WIDE_TILES
                if tile.takes(width, spec.value_dim, group) and not self.page % tile.keys
            ]
        if self.has_flash and takes_flash(spec):
            token_bytes = spec.cached_width * self.dtype.itemsize
            piece = _GATHERED_BYTES // token_bytes // _GATHERED_UNIT * _GATHERED_UNIT
            piece = max(piece, _GATHERED_UNIT)
            found.append(InParts(spec.scale, piece))
            if self.has_descriptors:
                found.append(InParts(spec.scale, piece, rows))
        return found


class LongPrompts:
    """The ways of a model's layers, chosen by their times."""

    def __init__(self, layers: Mapping[int, AttentionSpec], kernels: PromptKernels) -> None:
        self._layers = layers
        self._kernels = kernels
        self._behind: dict[AttentionSpec, Way] = {}
        """Ways for chunks behind a prefix; layers without one have the usual kernel"""
        self._whole: dict[AttentionSpec, Way] = {}
        """Ways for whole prompts"""

    def way(self, layer: int, rows: int, context: int) -> Way | None:
        """Return the way for a long chunk; None: the usual kernels compute it.

        rows: number of the chunk's tokens, the last of `context`.
        """
        ways = self._whole if rows == context else self._behind
        return ways.get(self._layers[layer])

    def measure(self, rows: int, context_length: int, device: torch.device) -> None:
        """Choose the ways by the times of chunks of `rows` tokens, a step's most.

        context_length: most tokens of a sequence.
        """
        whole = min(rows, context_length)
        behind = min(rows, context_length // 2)
        prefix = min(_MEASURED_PREFIX * behind, context_length - behind)
        for spec in set(self._layers.values()):
            for ways, count, before in ((self._whole, whole, 0), (self._behind, behind, prefix)):
                if not is_long(count, count + before):
                    continue
                if found := self._kernels.ways(spec, count):
                    chosen = self._fastest(spec, found, count, before, device)
                    if chosen is not None:
                        ways[spec] = chosen

    def _fastest(
        self, spec: AttentionSpec, ways: list[Way], rows: int, prefix: int, device: torch.device
    ) -> Way | None:
        """Return the fastest way of a layer; None: the usual kernel is as fast."""
        chunk = self._random_chunk(spec, rows, prefix, device)
        usual = self._usual(spec, chunk)
        candidates: dict[Way | None, list[Callable[[], Tensor]]] = {None: [usual] * 2}
        candidates |= {way: [partial(_launch, way, chunk)] * 2 for way in ways}
        what = f"attention of {rows} tokens behind {prefix}"
        chosen = fastest(candidates, None, what)
        if chosen is not None:
            chosen.prepare(chunk)
        return chosen

    def _usual(self, spec: AttentionSpec, chunk: PromptChunk) -> Callable[[], Tensor]:
        """Return the launch of the kernel that the backend has for all chunks."""
        count, out = len(chunk.queries), chunk.out
        bounds = torch.tensor([0, count, chunk.context], dtype=torch.int32, device=out.device)
        starts, lengths = bounds[:2], bounds[2:]
        if not chunk.prefix and self._kernels.has_flash and spec.is_plain and takes_flash(spec):
            assert chunk.keys is not None
            assert chunk.values is not None
            operands = chunk.queries, chunk.keys, chunk.values
            return lambda: flash_attention(*operands, starts, count, spec.scale, 0)
        shape = PagedShape.of(spec, self._kernels.page)
        rows = PagedRows(starts, lengths, chunk.table[None], None, count, chunk.context)
        pages = chunk.key_pages, chunk.value_pages

        def attend() -> Tensor:
            attend_pages(shape, rows, chunk.queries, *pages, chunk.sinks, out)
            return out

        return attend

    def _random_chunk(
        self, spec: AttentionSpec, rows: int, prefix: int, device: torch.device
    ) -> PromptChunk:
        page, dtype = self._kernels.page, self._kernels.dtype
        pages = -(-(rows + prefix) // page)

        def random(*shape: int) -> Tensor:
            return torch.randn(shape, device=device, dtype=dtype)

        kv_heads = spec.num_kv_heads
        keys, values = (
            random(pages, page, kv_heads, width) for width in (spec.head_dim, spec.value_dim)
        )
        if self._kernels.kv_dtype == KV_FP8:
            keys, values = rounded_pages(keys, values)
        table = torch.randperm(pages, device=device).to(torch.int32)
        own = random(rows, kv_heads, spec.head_dim), random(rows, kv_heads, spec.value_dim)
        for each, tokens in zip((keys, values), own, strict=True):
            gather_tokens(each, table, prefix, tokens)
        return PromptChunk(
            random(rows, spec.num_heads, spec.head_dim),
            *own,
            keys,
            values,
            table,
            rows + prefix,
            torch.randn(spec.num_heads, device=device) if spec.has_sinks else None,
            random(rows, spec.num_heads, spec.value_dim),
        )


def takes_flash(spec: AttentionSpec) -> bool:
    """Return whether torch's flash attention computes whole prompts of a layer, but for sinks."""
    is_softmax = not spec.cap and not spec.alibi_bias
    width = spec.head_dim
    return is_softmax and spec.value_dim == width and not width % 8 and width <= _MAX_FLASH_HEAD_DIM


def is_long(rows: int, context: int) -> bool:
    """Return whether a chunk is worth another way. rows: number of its tokens of `context`."""
    return rows >= _LEAST_ROWS and rows * context >= _LEAST_PAIRS


def _launch(way: Way, chunk: PromptChunk) -> Tensor:
    way.attend(chunk)
    return chunk.out
