"""Attention over a paged KV cache: launches of the Triton kernels, for any head dimension to 512.

Layers may have soft caps, sinks, windows and biases by distance (ALiBi).
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from services.engine.batch.step_batch import SharedPrefixes
from services.engine.kernels.dependent_launch import launch_options
from services.engine.model.architecture.layers import AttentionSpec
from services.engine.model.attention.fp8_pages import KV_FP8, bytes_of
from services.engine.model.attention.multiprocessors import count_multiprocessors
from services.engine.model.attention.page_kernels import attend_tile, merge_parts
from services.engine.model.attention.paged_tiles import (
    MAX_SPAN,
    MAX_SPLITS,
    MIN_SPAN,
    Tile,
    count_padded_splits,
    count_programs,
    count_splits,
    decode_tile,
    fp8_tile,
    power_of_two,
    prefill_tile,
)

__all__ = ["PagedRows", "PagedShape", "attend_padded", "attend_pages", "attend_shared"]


@dataclass(frozen=True, slots=True)
class PagedShape:
    """Constants of a layer's attention."""

    heads: int
    kv_heads: int
    head_dim: int
    value_dim: int
    page: int
    """Number of tokens of a page, a multiple of 64"""
    scale: float
    """Factor on query-key products"""
    cap: float
    """Soft cap on scaled query-key products; 0: none"""
    window: int
    """Number of tokens that a query sees, itself included; 0: unlimited"""
    is_chunked: bool = False
    """True if a query sees its own chunk of `window` tokens, not the last `window`"""

    @staticmethod
    def of(spec: AttentionSpec, page: int) -> "PagedShape":
        """Return the constants of a layer. page: number of tokens of a page."""
        return PagedShape(
            spec.num_heads,
            spec.num_kv_heads,
            spec.head_dim,
            spec.value_dim,
            page,
            spec.scale,
            spec.cap,
            spec.window,
            spec.is_chunked,
        )

    @property
    def widest(self) -> int:
        """Width of a key or of a value, whichever is larger."""
        return max(self.head_dim, self.value_dim)

    @property
    def group(self) -> int:
        """Number of query heads that share a key head."""
        return self.heads // self.kv_heads

    def programs(self, tile: Tile) -> int:
        """Return the number of programs for all heads of a tile's queries."""
        return self.kv_heads * -(-self.group // tile.heads)


@dataclass(frozen=True, slots=True)
class PagedRows:
    """Rows of some sequences, in their order; they are the last tokens of each context."""

    starts: Tensor
    """int32 [sequences + 1], where each sequence's rows begin; the first entry may exceed 0"""
    lengths: Tensor
    """int32 [sequences], number of tokens of each context"""
    tables: Tensor
    """int32 [sequences, pages]; only rows may have gaps"""
    ends: Tensor | None
    """int32 [rows], index after the last key that each row sees, which never falls within a
    sequence; None: each row sees the keys up to itself"""
    longest: int
    """Upper bound of the number of a sequence's rows"""
    most_tokens: int | None = None
    """Upper bound of the number of a context's tokens; None: as many as the tables hold"""
    counts: Tensor | None = None
    """`PaddedStep.counts` of a padded step with prompts; None: all sequences are alike"""


def attend_pages(
    shape: PagedShape,
    batch: PagedRows,
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    sinks: Tensor | None,
    out: Tensor,
    slopes: Tensor | None = None,
) -> None:
    """Fill `out` with the attention of each row over its sequence's context.

    queries: [rows, heads, head_dim], where only rows may have gaps. keys, values: contiguous
    [pages, page, kv_heads, head_dim] and [pages, page, kv_heads, value_dim], or in FP8 as of
    `fp8_pages.numbers_of`. sinks: float32 [heads] or None. out: contiguous [rows, heads,
    value_dim]. slopes: float32 [heads] of ALiBi, or None.
    Launches depend on the shapes of tensors, on `longest` and `most_tokens`, and on whether there
    are `ends`, `sinks` and `slopes`, never on the content of tensors.
    """
    rows, sequences = len(queries), len(batch.lengths)
    is_decode = batch.longest == 1
    tile = decode_tile(shape.group, shape.widest)
    if batch.longest > tile.queries:
        tile = prefill_tile(shape.group, shape.widest)
    # A sequence's last tile may be partial, so its tiles begin at a bound of those before it.
    tiles = sequences if is_decode else rows // tile.queries + sequences
    operands = _Operands(shape, batch, queries, keys, values, slopes)
    splits = count_splits(
        tiles * shape.programs(tile),
        rows,
        shape.heads,
        shape.value_dim,
        operands.most_keys(tile),
        multiprocessors=count_multiprocessors(queries.device),
        evens=is_decode,
    )
    if splits == 1:
        operands.attend(tile, tiles, 1, sinks, out)
        return
    parts = _Parts.allocate(out, shape, splits)
    operands.attend(tile, tiles, splits, sinks, parts)
    parts.merge_into(out, batch)


def attend_shared(
    shape: PagedShape,
    batch: PagedRows,
    prefixes: SharedPrefixes,
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    sinks: Tensor | None,
    out: Tensor,
    slopes: Tensor | None = None,
) -> None:
    """Do `attend_pages` for decodes some of which share prefixes, reading each prefix once.

    The shape has no window. The queries of all sequences that share a prefix attend to it like rows
    of one sequence, and then each to the rest of its own context (Hydragen, Juravsky et al. 2024,
    arXiv:2402.05099).
    """
    rows = len(queries)
    together, alone = (each(shape.group, shape.widest) for each in (prefill_tile, decode_tile))
    full_tiles = -(-rows // together.queries)
    # each kind of parts gets half of the scratch memory and of the parts that can be merged
    tokens = min(batch.tables.shape[1] * shape.page, MAX_SPLITS // 2 * MIN_SPAN)
    shared_parts, own_parts = (
        count_splits(
            count * shape.programs(tile),
            2 * rows,
            shape.heads,
            shape.value_dim,
            tokens,
            multiprocessors=count_multiprocessors(queries.device),
            evens=False,
        )
        for count, tile in ((full_tiles, together), (rows, alone))
    )
    operands = _Operands(shape, batch, queries, keys, values, slopes)
    parts = _Parts.allocate(out, shape, shared_parts + own_parts)
    # the last tile of each prefix may be partial
    tiles = rows // together.queries + len(prefixes.starts) - 1
    operands.attend(together, tiles, shared_parts, None, parts, prefixes, is_together=True)
    operands.attend(alone, rows, own_parts, sinks, parts, prefixes, first_part=shared_parts)
    parts.merge_into(out, batch, prefixes, shared_parts)


def attend_padded(
    shape: PagedShape,
    batch: PagedRows,
    most_chunks: int,
    prefixes: SharedPrefixes | None,
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    sinks: Tensor | None,
    out: Tensor,
    slopes: Tensor | None = None,
) -> None:
    """Do `attend_pages` for a padded step, of decodes and then chunks that the device counts.

    most_chunks: upper bound of the number of chunks, whose lengths may be any. The operands' first
    dimension may have more rows than the step; their part of `out` is arbitrary. Launches depend on
    the shapes of tensors and `most_chunks` alone.
    """
    operands = _Operands(shape, batch, queries, keys, values, slopes)
    _attend_padded_chunks(operands, most_chunks, sinks, out)
    decodes = replace(operands, batch=replace(batch, longest=1))
    _attend_padded_decodes(decodes, None if shape.window else prefixes, sinks, out)


def _attend_padded_chunks(
    operands: "_Operands", most_chunks: int, sinks: Tensor | None, out: Tensor
) -> None:
    shape, rows = operands.shape, len(operands.queries)
    tile = prefill_tile(shape.group, shape.widest)
    tiles = rows // tile.queries + most_chunks
    splits = count_padded_splits(
        tiles,
        shape.programs(tile),
        (rows, shape.heads, shape.value_dim),
        operands.most_keys(tile),
        count_multiprocessors(out.device),
        evens=False,
    )
    if splits == 1:
        operands.attend(tile, tiles, 1, sinks, out)
        return
    parts = _Parts.allocate(out, shape, splits)
    operands.attend(tile, tiles, splits, sinks, parts)
    parts.merge_into(out, operands.batch)


def _attend_padded_decodes(
    operands: "_Operands", prefixes: SharedPrefixes | None, sinks: Tensor | None, out: Tensor
) -> None:
    shape, rows = operands.shape, min(len(operands.batch.lengths), len(operands.queries))
    tile, together = decode_tile(shape.group, shape.widest), prefill_tile(shape.group, shape.widest)
    tokens, multiprocessors = operands.most_keys(tile), count_multiprocessors(out.device)
    shape_of_parts, shared_parts = (rows, shape.heads, shape.value_dim), 0
    if prefixes is not None:
        # as in `attend_shared`
        tokens = min(tokens, MAX_SPLITS // 2 * MIN_SPAN)
        shape_of_parts = (2 * rows, shape.heads, shape.value_dim)
        shared_parts = count_splits(
            -(-rows // together.queries) * shape.programs(together),
            *shape_of_parts,
            tokens,
            multiprocessors=multiprocessors,
            evens=False,
        )
    splits = count_padded_splits(
        rows,
        shape.programs(tile),
        shape_of_parts,
        tokens,
        multiprocessors,
        evens=prefixes is None,
    )
    if shared_parts + splits == 1:
        operands.attend(tile, rows, 1, sinks, out)
        return
    parts = _Parts.allocate(out[:rows], shape, shared_parts + splits)
    if prefixes is not None:
        tiles = rows // together.queries + len(prefixes.starts) - 1
        operands.attend(together, tiles, shared_parts, None, parts, prefixes, is_together=True)
    operands.attend(tile, rows, splits, sinks, parts, prefixes, first_part=shared_parts)
    parts.merge_into(out, operands.batch, prefixes, shared_parts)


@dataclass(frozen=True, slots=True)
class _Parts:
    """Attention of each row over the parts of its context, before they are merged."""

    outputs: Tensor
    """float32 [rows, heads, parts, value_dim]"""
    sums: Tensor
    """float32 [rows, heads, parts], logarithms of softmax sums, to base 2"""

    @staticmethod
    def allocate(out: Tensor, shape: PagedShape, parts: int) -> "_Parts":
        """Allocate parts of `out`."""
        counts = (len(out), shape.heads, parts)
        return _Parts(
            out.new_empty((*counts, shape.value_dim), dtype=torch.float32),
            out.new_empty(counts, dtype=torch.float32),
        )

    def merge_into(
        self,
        out: Tensor,
        batch: PagedRows,
        prefixes: SharedPrefixes | None = None,
        shared_parts: int = 0,
    ) -> None:
        """Merge the parts of each row and head.

        Rows without a prefix lack the first `shared_parts` parts.
        """
        rows, heads, parts, value_dim = self.outputs.shape
        width = max(16, power_of_two(value_dim))
        merge_parts[(rows * heads,)](
            out,
            self.outputs,
            self.sums,
            None if prefixes is None else prefixes.tokens,
            batch.starts,
            batch.counts,
            heads,
            parts,
            shared_parts,
            value_dim=value_dim,
            max_splits=MAX_SPLITS,
            padded_dim=width,
            is_decode=batch.longest == 1,
            num_warps=8 if width > 128 else 4,
            **launch_options(out.device),
        )


@dataclass(frozen=True, slots=True)
class _Operands:
    """Operands of a kernel launch."""

    shape: PagedShape
    batch: PagedRows
    queries: Tensor
    keys: Tensor
    values: Tensor
    slopes: Tensor | None

    def most_keys(self, tile: Tile) -> int:
        """Return the most keys that the queries of a tile see."""
        shape, batch = self.shape, self.batch
        tokens = batch.most_tokens or batch.tables.shape[1] * shape.page
        return min(tokens, shape.window + tile.queries) if shape.window else tokens

    def attend(
        self,
        tile: Tile,
        tiles: int,
        splits: int,
        sinks: Tensor | None,
        out: Tensor | _Parts,
        prefixes: SharedPrefixes | None = None,
        *,
        first_part: int = 0,
        is_together: bool = False,
    ) -> None:
        """Launch the kernel for `tiles` tiles of queries, and `splits` parts of their contexts.

        out: result, or parts of it that are written from `first_part` on. is_together: attend to
        the prefixes instead of the pages after them.
        """
        shape, batch = self.shape, self.batch
        if self.keys.dtype == KV_FP8:
            tile = fp8_tile(tile)
        parts = out if isinstance(out, _Parts) else None
        starts, sequences, counts = batch.starts, len(batch.lengths), batch.counts
        if prefixes is not None and is_together:
            starts, sequences, counts = prefixes.starts, len(prefixes.starts) - 1, None
        attend_tile[(tiles, shape.programs(tile), splits)](
            out if parts is None else parts.outputs,
            None if parts is None else parts.sums,
            self.queries,
            self.keys,
            self.values,
            bytes_of(self.keys),
            bytes_of(self.values),
            batch.tables,
            starts,
            batch.lengths,
            batch.ends,
            sinks,
            self.slopes,
            None if prefixes is None else prefixes.tokens,
            None if prefixes is None else prefixes.rows,
            counts,
            sequences,
            self.queries.stride(0),
            batch.tables.stride(0),
            1 if parts is None else parts.sums.shape[2],
            first_part,
            count_programs(count_multiprocessors(self.queries.device)),
            scale=shape.scale,
            cap=shape.cap,
            window=shape.window,
            kv_heads=shape.kv_heads,
            group=shape.group,
            head_dim=shape.head_dim,
            value_dim=shape.value_dim,
            page_size=shape.page,
            min_span=MIN_SPAN,
            max_span=MAX_SPAN,
            is_chunked=shape.is_chunked,
            is_decode=batch.longest == 1 and not is_together,
            is_together=is_together,
            tile_rows=tile.rows,
            tile_heads=tile.heads,
            tile_keys=tile.keys,
            padded_dim=max(16, power_of_two(shape.head_dim)),
            padded_value=max(16, power_of_two(shape.value_dim)),
            num_warps=tile.warps,
            num_stages=tile.stages,
            **launch_options(self.queries.device),
        )
