"""Decode attention over pages at equal and mixed contexts, and at wide block tables."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial

import torch
from torch import Tensor

from benchmarks.gpu.context import Context, Row, Rows
from benchmarks.gpu.timing import case
from services.engine.model.attention.fp8_pages import rounded_pages
from services.engine.model.attention.paged_kernels import PagedRows, PagedShape, attend_pages

__all__ = ["measure_decode_attention"]

_PAGE = 64
_WITH_FP8 = (8, 9)
"""Least compute capability of caches in FP8"""
_BATCHES: Mapping[str, tuple[Sequence[int], int]] = {
    "1 of 400": ([400], 16),
    "1 of 120,000": ([120000], 4096),
    "8 of 1,000": ([1000] * 8, 16),
    "8 of 30,000": ([30000] * 8, 1024),
    "64 of 400": ([400] * 64, 16),
    "64 of 8,000": ([8000] * 64, 256),
    "256 of 400": ([400] * 256, 16),
    "256 of 400, tables for 16,000": ([400] * 256, 256),
    "256 of 400, tables for 64,000": ([400] * 256, 1024),
    "255 of 400 and 1 of 20,000": ([400] * 255 + [20000], 1024),
    "1,024 of 400": ([400] * 1024, 16),
    "1,024 of 100 to 1,500": ([100 + 1400 * row // 1023 for row in range(1024)], 64),
}
"""Tokens of each context, and columns of the block tables"""


def measure_decode_attention(context: Context) -> Rows:
    """Yield the time of one layer of Llama 3.1 8B and the rate at which it reads."""
    heads, kv_heads, head_dim = context.size((32, 8, 128), (4, 2, 16))
    shape = PagedShape(heads, kv_heads, head_dim, head_dim, _PAGE, head_dim**-0.5, 0.0, 0)
    has_fp8 = not context.on_gpu or torch.cuda.get_device_capability() >= _WITH_FP8
    batches = context.size(_BATCHES, {"2 of 70 and 3": ([70, 3], 16)})
    for name, (lengths, columns) in batches.items():
        rows = _rows(context, lengths, columns)
        pages = int(rows.tables.max()) + 1
        keys, values = (
            torch.randn(pages, _PAGE, kv_heads, head_dim, device=context.device).to(context.dtype)
            for _ in range(2)
        )
        queries = torch.randn(len(lengths), heads, head_dim, device=context.device).to(
            context.dtype
        )
        out = queries.new_empty(len(lengths), heads * head_dim)

        def attend(keys: Tensor, values: Tensor) -> None:
            attend_pages(shape, rows, queries, keys, values, None, out)  # noqa: B023

        numbers = 2 * sum(lengths) * kv_heads
        calls = {"16 bits": (numbers * head_dim * keys.itemsize, partial(attend, keys, values))}
        if has_fp8:
            narrow = partial(attend, *rounded_pages(keys, values))
            calls["fp8"] = numbers * (head_dim + 1), narrow
        for kind, (read, call) in calls.items():
            names: Row = {"decodes": name, "KV type": kind}
            yield case(context, names, lambda: [call] * 4, bytes_moved=read)  # noqa: B023


def _rows(context: Context, lengths: Sequence[int], columns: int) -> PagedRows:
    """Return one row of each context; the pages lie in any order."""
    counts = [-(-length // _PAGE) for length in lengths]
    order = iter(torch.randperm(sum(counts)).tolist())
    tables = torch.zeros(len(lengths), columns, dtype=torch.int32)
    for row, count in enumerate(counts):
        tables[row, :count] = torch.tensor([next(order) for _ in range(count)])
    device = context.device
    return PagedRows(
        torch.arange(len(lengths) + 1, dtype=torch.int32, device=device),
        torch.tensor(lengths, dtype=torch.int32, device=device),
        tables.to(device),
        None,
        longest=1,
    )
