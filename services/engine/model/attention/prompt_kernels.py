"""Triton kernels around the attention of long prompts: pages are gathered, parts are merged."""

import triton
import triton.language as tl
from torch import Tensor

from services.engine.model.attention.fp8_pages import bytes_of
from services.engine.model.attention.paged_tiles import power_of_two

__all__ = ["gather_tokens", "merge_attention"]

_TOKENS = 8
"""Number of tokens that a program of `_gather_tokens` copies at a time"""
_COLUMNS = 1024
"""Most columns of a token that it copies at a time"""


def gather_tokens(pages: Tensor, table: Tensor, first: int, out: Tensor) -> None:
    """Copy the keys or values of some tokens from their pages to `out`, in its dtype.

    pages: contiguous [pages, page, kv_heads, width], or in FP8 as of `fp8_pages.numbers_of`; table:
    int32 [columns], the pages of one sequence; out: contiguous [tokens, kv_heads, width], tokens
    from `first` on.
    """
    count, heads, width = out.shape
    columns = heads * width
    tile = min(_COLUMNS, power_of_two(columns))
    _gather_tokens[(triton.cdiv(count, _TOKENS), triton.cdiv(columns, tile))](
        out,
        pages,
        bytes_of(pages),
        table,
        first,
        count,
        page_size=pages.shape[1],
        page_stride=pages.stride(0),
        width=width,
        columns=columns,
        tile_tokens=_TOKENS,
        tile_columns=tile,
    )


def merge_attention(
    parts: tuple[Tensor, Tensor],
    further: tuple[Tensor, Tensor] | None,
    sinks: Tensor | None,
    out: Tensor,
    sums: Tensor | None = None,
) -> None:
    """Merge the attention of the same queries over two parts of their keys, and over sinks.

    parts, further: attention, contiguous [n, heads, value_dim], and the natural logarithms of its
    softmax sums, float32 [heads, n]. sinks: float32 [heads]. out: contiguous [n, heads, value_dim],
    which may be that of `parts`; sums: where to write the logarithms of the merged sums.
    """
    attended, logarithms = parts
    count, heads, width = attended.shape
    _merge_attention[(count,)](
        out,
        sums,
        attended,
        logarithms,
        None if further is None else further[0],
        None if further is None else further[1],
        sinks,
        count,
        heads,
        width,
        power_of_two(heads),
        power_of_two(width),
        num_warps=8,
    )


@triton.jit(do_not_specialize=["table", "first", "count"])  # type: ignore[untyped-decorator]
def _gather_tokens(
    out: tl.tensor,
    pages: tl.tensor,
    exponents: tl.tensor,
    table: tl.tensor,
    first: tl.tensor,
    count: tl.tensor,
    page_size: tl.constexpr,
    page_stride: tl.constexpr,
    width: tl.constexpr,
    columns: tl.constexpr,
    tile_tokens: tl.constexpr,
    tile_columns: tl.constexpr,
) -> None:
    """Copy some columns of some tokens."""
    number = tl.program_id(0) * tile_tokens + tl.arange(0, tile_tokens)
    column = tl.program_id(1) * tile_columns + tl.arange(0, tile_columns)[None, :]
    is_token = number < count
    token = first + number
    page = tl.load(table + token // page_size, mask=is_token, other=0)
    begin = page.to(tl.int64)[:, None] * page_stride
    within = (token % page_size)[:, None]
    mask = is_token[:, None] & (column < columns)
    copied = tl.load(pages + begin + within * columns + column, mask=mask, other=0.0)
    if exponents is not None:
        places = begin + page_size * columns + column // width * page_size + within
        exponent = tl.load(exponents + places, mask=mask, other=0).to(tl.int32)
        copied = copied.to(tl.float32) * (exponent << 23).to(tl.float32, bitcast=True)
    place = out + number.to(tl.int64)[:, None] * columns + column
    tl.store(place, copied.to(out.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["count"])  # type: ignore[untyped-decorator]
def _merge_attention(
    out: tl.tensor,
    sums: tl.tensor,
    left: tl.tensor,
    left_sums: tl.tensor,
    right: tl.tensor,
    right_sums: tl.tensor,
    sinks: tl.tensor,
    count: tl.tensor,
    heads: tl.constexpr,
    width: tl.constexpr,
    padded_heads: tl.constexpr,
    padded_width: tl.constexpr,
) -> None:
    """Merge the parts of one query, all heads."""
    row = tl.program_id(0).to(tl.int64)
    head = tl.arange(0, padded_heads)
    column = tl.arange(0, padded_width)[None, :]
    is_head = head < heads
    mask = is_head[:, None] & (column < width)
    place = row * heads * width + head[:, None] * width + column
    first = tl.load(left_sums + head * count + row, mask=is_head, other=0.0)
    peak = first
    second = first
    if right is not None:
        second = tl.load(right_sums + head * count + row, mask=is_head, other=0.0)
        peak = tl.maximum(peak, second)
    sink = first
    if sinks is not None:
        sink = tl.load(sinks + head, mask=is_head, other=0.0)
        peak = tl.maximum(peak, sink)
    share = tl.exp(first - peak)
    total = share
    merged = tl.load(left + place, mask=mask, other=0.0).to(tl.float32) * share[:, None]
    if right is not None:
        share = tl.exp(second - peak)
        total += share
        merged += tl.load(right + place, mask=mask, other=0.0).to(tl.float32) * share[:, None]
    if sinks is not None:
        total += tl.exp(sink - peak)
    tl.store(out + place, (merged / total[:, None]).to(out.dtype.element_ty), mask=mask)
    if sums is not None:
        tl.store(sums + head * count + row, peak + tl.log(total), mask=is_head)
