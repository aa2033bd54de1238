"""Attention of one long chunk over pages in Triton, with the tensor memory accelerator.

Unlike `paged_kernels`, it loads keys and values by descriptors, for 128 rows and two groups of four
warps, and masks only the last tiles of keys. It computes plain attention, with or without sinks.
"""

from dataclasses import dataclass

import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from services.engine.model.attention.paged_tiles import power_of_two
from services.engine.model.attention.prompt_chunk import PromptChunk

__all__ = ["WIDE_TILES", "WideTile", "attend_widely"]


@dataclass(frozen=True, slots=True)
class WideTile:
    """Part of the attention that one program computes at a time."""

    rows: int
    """Number of queries × query heads that share a key head"""
    keys: int
    """Number of keys read at a time, which divides a page"""
    warps: int
    stages: int
    """Depth of the pipeline that loads keys and values"""
    widths: tuple[int, ...]
    """Widths of keys and of values that it is for; descriptors load whole rows of these"""

    def takes(self, head_dim: int, value_dim: int, group: int) -> bool:
        """Return whether it is for these widths. group: number of queries that share a key."""
        return {head_dim, value_dim} <= {*self.widths} and group <= self.rows

    def __str__(self) -> str:
        return f"our kernel with TMA, {self.rows}x{self.keys}"


WIDE_TILES = (
    WideTile(rows=128, keys=64, warps=8, stages=3, widths=(64, 128)),
    WideTile(rows=64, keys=64, warps=4, stages=2, widths=(64, 128)),
    WideTile(rows=128, keys=32, warps=8, stages=2, widths=(256,)),
)
"""Tiles to choose from: two groups of warps with one program on a multiprocessor, or one group with
two programs; wide heads need two groups for their registers"""


def attend_widely(chunk: PromptChunk, scale: float, tile: WideTile) -> None:
    """Fill the chunk's output with its attention over all tokens of its sequence."""
    count, heads, head_dim = chunk.queries.shape
    pages, page, kv_heads, value_dim = chunk.value_pages.shape
    group = heads // kv_heads
    tile_heads = power_of_two(group)
    keys, values = (
        TensorDescriptor.from_tensor(each.view(pages * page, -1), [tile.keys, each.shape[3]])
        for each in (chunk.key_pages, chunk.value_pages)
    )
    _attend_widely[(triton.cdiv(count, tile.rows // tile_heads), kv_heads)](
        chunk.out,
        chunk.queries,
        keys,
        values,
        chunk.table,
        chunk.sinks,
        count,
        chunk.context,
        chunk.queries.stride(0),
        scale=scale,
        kv_heads=kv_heads,
        group=group,
        head_dim=head_dim,
        value_dim=value_dim,
        page_size=page,
        tile_rows=tile.rows,
        tile_heads=tile_heads,
        tile_keys=tile.keys,
        num_warps=tile.warps,
        num_stages=tile.stages,
    )


@triton.jit(do_not_specialize=["table", "count", "context"])  # type: ignore[untyped-decorator]
def _attend_widely(
    out: tl.tensor,
    queries: tl.tensor,
    keys: tl.tensor,
    values: tl.tensor,
    table: tl.tensor,
    sinks: tl.tensor,
    count: tl.tensor,
    context: tl.tensor,
    query_stride: tl.tensor,
    scale: tl.constexpr,
    kv_heads: tl.constexpr,
    group: tl.constexpr,
    head_dim: tl.constexpr,
    value_dim: tl.constexpr,
    page_size: tl.constexpr,
    tile_rows: tl.constexpr,
    tile_heads: tl.constexpr,
    tile_keys: tl.constexpr,
) -> None:
    """Attend for a tile of queries and one key head. Grid: tiles of queries, key heads.

    A tile's rows are its queries × the heads of the group, heads innermost, and padding.
    """
    log2_e: tl.constexpr = 1.4426950408889634
    tile_queries: tl.constexpr = tile_rows // tile_heads
    # The last queries see the most keys, so their programs begin first.
    first_query = (tl.num_programs(0) - 1 - tl.program_id(0)) * tile_queries
    kv_head = tl.program_id(1)
    slots = tl.arange(0, tile_rows)
    query = first_query + slots // tile_heads
    in_head = slots % tile_heads
    is_row = (query < count) & (in_head < group)
    head = kv_head * group + in_head
    position = context - count + query
    width = tl.arange(0, head_dim)[None, :]
    place = query.to(tl.int64)[:, None] * query_stride + head[:, None] * head_dim + width
    q = tl.load(queries + place, mask=is_row[:, None], other=0.0)

    highest = tl.full((tile_rows,), float("-inf"), tl.float32)
    total = tl.zeros((tile_rows,), tl.float32)
    if sinks is not None:  # a sink acts as a key that has this score and no value
        highest = tl.load(sinks + head, mask=is_row, other=0.0) * log2_e
        total += 1.0
    attended = tl.zeros((tile_rows, value_dim), tl.float32)
    # All queries of the tile see the keys before `whole`.
    whole = (context - count + first_query + 1) // tile_keys * tile_keys
    last = context - count + tl.minimum(first_query + tile_queries, count)
    page = tl.load(table)
    for begin in range(0, whole, tile_keys):
        at = page * page_size + begin % page_size
        # Load the page one turn ahead: the pipeline would else wait for it to know an address.
        following = (begin + tile_keys) // page_size
        page = tl.load(table + following, mask=begin + tile_keys < last, other=0)
        k = keys.load([at, kv_head * head_dim])
        scores = tl.dot(q, k.T, input_precision="ieee")
        peak = tl.maximum(highest, tl.max(scores, 1) * (scale * log2_e))
        weights = tl.exp2(scores * (scale * log2_e) - peak[:, None])
        decay = tl.exp2(highest - peak)
        total = total * decay + tl.sum(weights, 1)
        v = values.load([at, kv_head * value_dim])
        attended = attended * decay[:, None]
        attended = tl.dot(weights.to(v.dtype), v, attended, input_precision="ieee")
        highest = peak
    for begin in range(whole, last, tile_keys):
        at = tl.load(table + begin // page_size) * page_size + begin % page_size
        key = begin + tl.arange(0, tile_keys)
        k = keys.load([at, kv_head * head_dim])
        scores = tl.dot(q, k.T, input_precision="ieee") * (scale * log2_e)
        scores = tl.where(key[None, :] <= position[:, None], scores, float("-inf"))
        peak = tl.maximum(highest, tl.max(scores, 1))
        base_score = tl.where(peak == float("-inf"), 0.0, peak)  # -inf - -inf is NaN
        weights = tl.exp2(scores - base_score[:, None])
        decay = tl.exp2(highest - base_score)
        total = total * decay + tl.sum(weights, 1)
        v = values.load([at, kv_head * value_dim])
        # Slots behind a context may hold NaN, which a weight of 0 keeps.
        v = tl.where((key < context)[:, None], v, 0.0).to(v.dtype)
        attended = attended * decay[:, None]
        attended = tl.dot(weights.to(v.dtype), v, attended, input_precision="ieee")
        highest = peak
    attended = attended / tl.where(is_row, total, 1.0)[:, None]
    cell = (query.to(tl.int64) * (kv_heads * group) + head)[:, None] * value_dim
    cell += tl.arange(0, value_dim)[None, :]
    tl.store(out + cell, attended.to(out.dtype.element_ty), mask=is_row[:, None])
