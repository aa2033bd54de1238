"""Attention over a paged KV cache: launches of the Triton kernels, for any head dimension to 512.

Layers may have soft caps, sinks, windows and biases by distance (ALiBi).
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from services.engine.batch.step_batch import SharedPrefixes
from services.engine.model.architecture.layers import AttentionSpec
from services.engine.model.attention.multiprocessors import count_multiprocessors
from services.engine.model.attention.page_kernels import attend_tile, merge_parts
from services.engine.model.attention.paged_tiles import (
    MAX_SPLITS,
    MIN_SPAN,
    Tile,
    count_splits,
    decode_tile,
    power_of_two,
    prefill_tile,
)

__all__ = ["PagedRows", "PagedShape", "attend_pages", "attend_shared"]


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
        )

    @property
    def widest(self) -> int:
        """Width of a key or of a value, whichever is larger."""
        return max(self.head_dim, self.value_dim)


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
    [pages, page, kv_heads, head_dim] and [pages, page, kv_heads, value_dim]. sinks: float32 [heads]
    or None. out: contiguous [rows, heads, value_dim]. slopes: float32 [heads] of ALiBi, or None.
    Launches depend on the shapes of tensors, on `longest` and `most_tokens`, and on whether there
    are `ends`, `sinks` and `slopes`, never on the content of tensors.
    """
    rows, sequences = len(queries), len(batch.lengths)
    group = shape.heads // shape.kv_heads
    is_decode = batch.longest == 1
    tile = decode_tile(group, shape.widest)
    if batch.longest > tile.queries:
        tile = prefill_tile(group, shape.widest)
    # A sequence's last tile may be partial, so its tiles begin at a bound of those before it.
    tiles = sequences if is_decode else rows // tile.queries + sequences
    programs = tiles * shape.kv_heads * -(-group // tile.heads)
    tokens = batch.most_tokens or batch.tables.shape[1] * shape.page
    if shape.window:
        tokens = min(tokens, shape.window + tile.queries)
    splits = count_splits(
        programs,
        rows,
        shape.heads,
        shape.value_dim,
        tokens,
        multiprocessors=count_multiprocessors(queries.device),
        evens=is_decode,
    )
    operands = _Operands(shape, batch, queries, keys, values, slopes)
    if splits == 1:
        operands.attend(tile, tiles, 1, sinks, out)
        return
    parts = _Parts.allocate(out, shape, splits)
    operands.attend(tile, tiles, splits, sinks, parts)
    parts.merge_into(out)


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
    rows, group = len(queries), shape.heads // shape.kv_heads
    together, alone = prefill_tile(group, shape.widest), decode_tile(group, shape.widest)
    full_tiles = -(-rows // together.queries)
    # each kind of parts gets half of the scratch memory and of the parts that can be merged
    tokens = min(batch.tables.shape[1] * shape.page, MAX_SPLITS // 2 * MIN_SPAN)
    shared_parts, own_parts = (
        count_splits(
            count * shape.kv_heads * -(-group // tile.heads),
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
    parts.merge_into(out, prefixes.tokens, shared_parts)


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

    def merge_into(self, out: Tensor, shared: Tensor | None = None, shared_parts: int = 0) -> None:
        """Merge the parts of each row and head.

        shared: `SharedPrefixes.tokens`; rows without a prefix lack the first `shared_parts` parts.
        """
        rows, heads, parts, value_dim = self.outputs.shape
        width = max(16, power_of_two(value_dim))
        merge_parts[(rows * heads,)](
            out,
            self.outputs,
            self.sums,
            shared,
            heads,
            parts,
            shared_parts,
            value_dim=value_dim,
            max_splits=MAX_SPLITS,
            padded_dim=width,
            num_warps=8 if width > 128 else 4,
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
        group = shape.heads // shape.kv_heads
        parts = out if isinstance(out, _Parts) else None
        starts, sequences = batch.starts, len(batch.lengths)
        if prefixes is not None and is_together:
            starts, sequences = prefixes.starts, len(prefixes.starts) - 1
        attend_tile[(tiles, shape.kv_heads * -(-group // tile.heads), splits)](
            out if parts is None else parts.outputs,
            None if parts is None else parts.sums,
            self.queries,
            self.keys,
            self.values,
            batch.tables,
            starts,
            batch.lengths,
            batch.ends,
            sinks,
            self.slopes,
            None if prefixes is None else prefixes.tokens,
            None if prefixes is None else prefixes.rows,
            sequences,
            self.queries.stride(0),
            batch.tables.stride(0),
            1 if parts is None else parts.sums.shape[2],
            first_part,
            scale=shape.scale,
            cap=shape.cap,
            window=shape.window,
            kv_heads=shape.kv_heads,
            group=group,
            head_dim=shape.head_dim,
            value_dim=shape.value_dim,
            page_size=shape.page,
            min_span=MIN_SPAN,
            is_decode=batch.longest == 1 and not is_together,
            is_together=is_together,
            tile_rows=tile.rows,
            tile_heads=tile.heads,
            tile_keys=tile.keys,
            padded_dim=max(16, power_of_two(shape.head_dim)),
            padded_value=max(16, power_of_two(shape.value_dim)),
            num_warps=tile.warps,
            num_stages=tile.stages,
        )
