"""Attention over a paged KV cache in Triton, with any head dimension to 512.

Layers may have soft caps, sinks, windows and biases by distance (ALiBi).

The online softmax is FlashAttention's (Dao 2023, arXiv:2307.08691); the division of long contexts
is Flash-Decoding's.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from services.engine.model.attention.multiprocessors import count_multiprocessors
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
    shared: Tensor,
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    sinks: Tensor | None,
    out: Tensor,
    slopes: Tensor | None = None,
) -> None:
    """Do `attend_pages` for decodes whose contexts begin with the same pages, reading these once.

    shared: int32 [1], number of these pages' tokens; the shape has no window. The queries of all
    sequences attend to the shared pages like rows of one sequence, and then each to the rest of its
    own context (Hydragen, Juravsky et al. 2024, arXiv:2402.05099).
    """
    rows, group = len(queries), shape.heads // shape.kv_heads
    together, alone = prefill_tile(group, shape.widest), decode_tile(group, shape.widest)
    tiles = -(-rows // together.queries)
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
        for count, tile in ((tiles, together), (rows, alone))
    )
    operands = _Operands(shape, batch, queries, keys, values, slopes)
    parts = _Parts.allocate(out, shape, shared_parts + own_parts)
    operands.attend(together, tiles, shared_parts, sinks, parts, shared, is_together=True)
    operands.attend(alone, rows, own_parts, None, parts, shared, first_part=shared_parts)
    parts.merge_into(out)


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

    def merge_into(self, out: Tensor) -> None:
        """Merge the parts of each row and head."""
        rows, heads, parts, value_dim = self.outputs.shape
        width = max(16, power_of_two(value_dim))
        _merge[(rows * heads,)](
            out,
            self.outputs,
            self.sums,
            parts,
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
        shared: Tensor | None = None,
        *,
        first_part: int = 0,
        is_together: bool = False,
    ) -> None:
        """Launch the kernel for `tiles` tiles of queries, and `splits` parts of their contexts.

        out: result, or parts of it that are written from `first_part` on. shared: as for
        `attend_shared`; is_together: attend to the shared pages instead of the pages after them.
        """
        shape, batch = self.shape, self.batch
        group = shape.heads // shape.kv_heads
        parts = out if isinstance(out, _Parts) else None
        _attend[(tiles, shape.kv_heads * -(-group // tile.heads), splits)](
            out if parts is None else parts.outputs,
            None if parts is None else parts.sums,
            self.queries,
            self.keys,
            self.values,
            batch.tables,
            batch.starts,
            batch.lengths,
            batch.ends,
            sinks,
            self.slopes,
            shared,
            len(batch.lengths),
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


# Fields of the staging buffer begin at any multiple of 4 bytes: without alignment in its key, a
# kernel is compiled once and not again in the middle of a run.
@triton.jit(  # type: ignore[untyped-decorator]
    do_not_specialize=["starts", "lengths", "ends", "shared", "sequences", "parts", "first_part"]
)
def _attend(
    out: tl.tensor,
    sums: tl.tensor,
    queries: tl.tensor,
    keys: tl.tensor,
    values: tl.tensor,
    tables: tl.tensor,
    starts: tl.tensor,
    lengths: tl.tensor,
    ends: tl.tensor,
    sinks: tl.tensor,
    slopes: tl.tensor,
    shared: tl.tensor,
    sequences: tl.tensor,
    query_stride: tl.tensor,
    table_stride: tl.tensor,
    parts: tl.tensor,
    first_part: tl.tensor,
    scale: tl.constexpr,
    cap: tl.constexpr,
    window: tl.constexpr,
    kv_heads: tl.constexpr,
    group: tl.constexpr,
    head_dim: tl.constexpr,
    value_dim: tl.constexpr,
    page_size: tl.constexpr,
    min_span: tl.constexpr,
    is_decode: tl.constexpr,
    is_together: tl.constexpr,
    tile_rows: tl.constexpr,
    tile_heads: tl.constexpr,
    tile_keys: tl.constexpr,
    padded_dim: tl.constexpr,
    padded_value: tl.constexpr,
) -> None:
    """Attend for a tile of one sequence's queries and one key head, over a part of its context.

    A tile's rows are its queries × its heads of the group, heads innermost, and padding. With
    `sums`, `out` holds the parts and `sums` the logarithms of their softmax sums, to base 2. With
    `shared`, the context is the tokens after the pages that all sequences share, or these pages if
    `is_together`: then each row is the query of one sequence.
    """
    log2_e: tl.constexpr = 1.4426950408889634
    tile_queries: tl.constexpr = tile_rows // tile_heads
    head_parts: tl.constexpr = (group + tile_heads - 1) // tile_heads
    key_stride: tl.constexpr = kv_heads * head_dim
    value_stride: tl.constexpr = kv_heads * value_dim
    tile = tl.program_id(0)
    kv_head = tl.program_id(1) // head_parts
    head_part = tl.program_id(1) % head_parts
    if is_decode:
        sequence = tile
        first_query = 0
        start = tile
        count = 1
    elif is_together:
        sequence = 0
        first_query = tile * tile_queries
        start = 0
        count = sequences
    else:
        # The last sequence whose tiles begin at or before this one.
        base = tl.load(starts)
        sequence = tl.full((), 0, tl.int32)
        behind = sequences + tl.full((), 0, tl.int32)
        while behind - sequence > 1:
            middle = (sequence + behind) // 2
            is_before = (tl.load(starts + middle) - base) // tile_queries + middle <= tile
            sequence = tl.where(is_before, middle, sequence)
            behind = tl.where(is_before, behind, middle)
        start = tl.load(starts + sequence)
        count = tl.load(starts + sequence + 1) - start
        start -= base
        first_query = (tile - start // tile_queries - sequence) * tile_queries
    context = tl.load(shared) if is_together else tl.load(lengths + sequence)

    slots = tl.arange(0, tile_rows)
    in_head = head_part * tile_heads + slots % tile_heads
    query = first_query + slots // tile_heads
    is_row = (slots < tile_queries * tile_heads) & (query < count) & (in_head < group)
    row = (start + query).to(tl.int64)
    head = kv_head * group + in_head
    position = context - count + query
    if is_together:
        end = tl.zeros_like(position) + context
    elif ends is None:
        end = position + 1
    else:
        end = tl.load(ends + row, mask=is_row, other=0)
    end = tl.where(is_row, tl.minimum(end, context), 0)

    width = tl.arange(0, padded_dim)
    is_width = width < head_dim
    offsets = row[:, None] * query_stride + head[:, None] * head_dim + width[None, :]
    query_mask = is_row[:, None] & is_width[None, :]
    q = tl.load(queries + offsets, mask=query_mask, other=0.0)

    highest = tl.full((tile_rows,), float("-inf"), tl.float32)
    total = tl.zeros((tile_rows,), tl.float32)
    if sinks is not None:
        # The sink acts as a key of the first part that has this score and no value.
        is_first = tl.program_id(2) == 0
        sink = tl.load(sinks + head, mask=is_row, other=0.0) * log2_e
        highest = tl.where(is_first, sink, highest)
        total = tl.where(is_first, 1.0, total)
    attended = tl.zeros((tile_rows, padded_value), tl.float32)
    if slopes is not None:
        slope = tl.load(slopes + head, mask=is_row, other=0.0) * log2_e
        if is_together:
            position = tl.load(lengths + query, mask=is_row, other=1) - 1

    # Not the maximum of `end`: a loop whose bounds come from a reduction is not pipelined.
    behind_queries = tl.minimum(first_query + tile_queries, count)
    if is_together:
        last = context
    elif ends is None:
        last = tl.where(first_query < count, context - count + behind_queries, 0)
    else:
        last = tl.load(ends + start + behind_queries - 1, mask=first_query < count, other=0)
        last = tl.minimum(last, context)
    first = 0
    if is_decode and shared is not None:
        first = tl.load(shared)
    if window > 0:
        first = tl.maximum(context - count + first_query - window + 1, 0) // tile_keys * tile_keys
    if sums is not None:
        span = tl.maximum(tl.cdiv(last - first, tl.num_programs(2)), min_span)
        span = tl.cdiv(span, tile_keys) * tile_keys
        first += tl.program_id(2) * span
        last = tl.minimum(last, first + span)

    table = tables + sequence.to(tl.int64) * table_stride
    columns = tl.arange(0, tile_keys)
    value_width = tl.arange(0, padded_value)
    is_value = value_width < value_dim
    key_offsets = columns[None, :] * key_stride + width[:, None] + kv_head * head_dim
    value_offsets = columns[:, None] * value_stride + value_width[None, :] + kv_head * value_dim
    page = tl.load(table + first // page_size, mask=first < last, other=0)
    for begin in range(first, last, tile_keys):
        at = page.to(tl.int64) * page_size + begin % page_size
        key = begin + columns
        is_key = key < last  # slots behind a context may hold NaN, which a weight of 0 keeps
        key_mask = is_key[None, :] & is_width[:, None]
        k = tl.load(keys + at * key_stride + key_offsets, mask=key_mask, other=0.0)
        scores = tl.dot(q, k, input_precision="ieee")
        if cap > 0:
            # cap * tanh(score / cap) = cap * (1 - 2 / (exp(2 * score / cap) + 1))
            grown = tl.exp2(scores * (2 * log2_e * scale / cap))
            scores = cap * log2_e - 2 * cap * log2_e / (grown + 1)
        else:
            scores = scores * (scale * log2_e)
        if slopes is not None:
            scores += slope[:, None] * (key[None, :] - position[:, None]).to(tl.float32)
        visible = key[None, :] < end[:, None]
        if window > 0:
            visible = visible & (key[None, :] > position[:, None] - window)
        scores = tl.where(visible, scores, float("-inf"))
        peak = tl.maximum(highest, tl.max(scores, 1))
        base_score = tl.where(peak == float("-inf"), 0.0, peak)  # -inf - -inf is NaN
        weights = tl.exp2(scores - base_score[:, None])
        decay = tl.exp2(highest - base_score)
        total = total * decay + tl.sum(weights, 1)
        value_mask = is_key[:, None] & is_value[None, :]
        v = tl.load(values + at * value_stride + value_offsets, mask=value_mask, other=0.0)
        attended = attended * decay[:, None]
        attended += tl.dot(weights.to(v.dtype), v, input_precision="ieee")
        highest = peak
        # Load the page one turn ahead: the pipeline would else wait for it to know an address.
        following = begin + tile_keys
        page = tl.load(table + following // page_size, mask=following < last, other=0)

    is_empty = total == 0.0
    divisor = tl.where(is_empty, 1.0, total)
    attended = attended / divisor[:, None]
    cell = row * (kv_heads * group) + head
    if sums is not None:
        cell = cell * parts + first_part + tl.program_id(2)
        logarithm = tl.where(is_empty, float("-inf"), highest + tl.log2(divisor))
        tl.store(sums + cell, logarithm, mask=is_row)
    cells = cell[:, None] * value_dim + value_width[None, :]
    out_mask = is_row[:, None] & is_value[None, :]
    tl.store(out + cells, attended.to(out.dtype.element_ty), mask=out_mask)


@triton.jit(do_not_specialize=["splits"])  # type: ignore[untyped-decorator]
def _merge(
    out: tl.tensor,
    parts: tl.tensor,
    sums: tl.tensor,
    splits: tl.tensor,
    value_dim: tl.constexpr,
    max_splits: tl.constexpr,
    padded_dim: tl.constexpr,
) -> None:
    """Merge the parts of one query and head."""
    cell = tl.program_id(0).to(tl.int64)
    width = tl.arange(0, padded_dim)
    is_width = width < value_dim
    split = tl.arange(0, max_splits)
    logarithms = tl.load(sums + cell * splits + split, mask=split < splits, other=float("-inf"))
    is_part = logarithms != float("-inf")
    peak = tl.max(logarithms, 0)
    weights = tl.exp2(logarithms - tl.where(peak == float("-inf"), 0.0, peak))
    total = tl.sum(weights, 0)
    weights = weights / tl.where(total == 0.0, 1.0, total)
    offsets = (cell * splits + split)[:, None] * value_dim + width[None, :]
    mask = is_part[:, None] & is_width[None, :]
    part = tl.load(parts + offsets, mask=mask, other=0.0)
    merged = tl.sum(weights[:, None] * part, 0)
    tl.store(out + cell * value_dim + width, merged.to(out.dtype.element_ty), mask=is_width)
