"""Triton kernels of low-rank additions: two launches for the rows of any number of adapters.

The kernels find each adapter's weights by addresses in a table. An adapter that is loaded later
needs no other launch, so a CUDA graph holds them.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from services.engine.model.attention.multiprocessors import count_multiprocessors
from services.engine.model.operators.low_rank import SortedRows

__all__ = ["FIELDS", "SPLITS", "add_low_rank"]

FIELDS = 6
"""Numbers of a part in the table: addresses of `LowRank.down`, `up` and `bias`, 0 = no bias; the
rank, 0 = no part; the number of its first output, and of its outputs"""
_RANKS = 16
"""Ranks that a program multiplies at once"""
_FEW_ROWS = 256
"""Most rows of a step whose programs have small tiles of rows"""
SPLITS = {16: (16, 4, 1), 64: (4, 1)}
"""Numbers of programs that may share the inputs of a tile, by its rows: a program adds their sums
in registers"""
_LEAST_SPAN = 256
"""Fewest inputs of such a program"""
_PROGRAMS = 2
"""Most programs of a launch for each multiprocessor, if several share the inputs"""


@triton.jit(do_not_specialize=["count", "turns", "most_rank"])  # type: ignore[untyped-decorator]
def _shrink(  # type: ignore[no-untyped-def]
    low,
    rows,
    numbers,
    order,
    table,
    count,
    inputs,
    row_stride,
    turns,
    most_rank,
    parts: tl.constexpr,
    fields: tl.constexpr,
    tile_rows: tl.constexpr,
    tile_ranks: tl.constexpr,
    tile_inputs: tl.constexpr,
):
    """Multiply a tile of rows by `down`, over a part of the inputs. Grid: tiles, spans, parts."""
    part = tl.program_id(2)
    first = tl.program_id(1) * turns * tile_inputs
    last = tl.minimum(first + turns * tile_inputs, inputs)
    cell = tl.program_id(0) * tile_rows + tl.arange(0, tile_rows)
    number = tl.load(numbers + cell, mask=cell < count, other=0)
    at = tl.load(order + cell, mask=cell < count, other=0)[:, None] * row_stride
    place = ((tl.program_id(1) * count + cell).to(tl.int64)[:, None] * parts + part) * most_rank
    left = tl.max(number, 0)
    while left > 0:
        is_mine = (number == left)[:, None]
        record = table + (left * parts + part) * fields
        down = tl.load(record).to(tl.pointer_type(rows.dtype.element_ty))
        down = tl.multiple_of(down, 16)
        rank = tl.load(record + 3).to(tl.int32)
        for first_rank in range(0, rank, tile_ranks):
            ranks = first_rank + tl.arange(0, tile_ranks)
            is_rank = (ranks < rank)[None, :]
            total = tl.zeros((tile_rows, tile_ranks), tl.float32)
            for begin in range(first, last, tile_inputs):
                column = begin + tl.arange(0, tile_inputs)
                is_column = column < last
                mask = is_mine & is_column[None, :]
                some = tl.load(rows + at + column[None, :], mask=mask, other=0.0)
                offsets = ranks[None, :] * inputs + column[:, None]
                weights = tl.load(down + offsets, mask=is_column[:, None] & is_rank, other=0.0)
                total += tl.dot(some, weights, input_precision="ieee")
            tl.store(low + place + ranks[None, :], total, mask=is_mine & is_rank)
        number = tl.where(number == left, 0, number)
        left = tl.max(number, 0)


@triton.jit(do_not_specialize=["count", "most_rank"])  # type: ignore[untyped-decorator]
def _expand(  # type: ignore[no-untyped-def]
    out,
    low,
    numbers,
    order,
    table,
    count,
    out_stride,
    most_rank,
    splits: tl.constexpr,
    dtype: tl.constexpr,
    parts: tl.constexpr,
    fields: tl.constexpr,
    tile_rows: tl.constexpr,
    tile_ranks: tl.constexpr,
    tile_outputs: tl.constexpr,
):
    """Add a tile of rows' products with `up` to outputs. Grid: tiles, tiles of outputs, parts."""
    part = tl.program_id(2)
    column = tl.program_id(1) * tile_outputs + tl.arange(0, tile_outputs)
    cell = tl.program_id(0) * tile_rows + tl.arange(0, tile_rows)
    number = tl.load(numbers + cell, mask=cell < count, other=0)
    at = tl.load(order + cell, mask=cell < count, other=0)[:, None] * out_stride
    left = tl.max(number, 0)
    while left > 0:
        is_mine = (number == left)[:, None]
        record = table + (left * parts + part) * fields
        up = tl.load(record + 1).to(tl.pointer_type(dtype))
        up = tl.multiple_of(up, 16)
        bias_address = tl.load(record + 2)
        bias = bias_address.to(tl.pointer_type(dtype))
        rank = tl.load(record + 3).to(tl.int32)
        first_output = tl.load(record + 4).to(tl.int32)
        outputs = tl.load(record + 5).to(tl.int32)
        is_column = (column < outputs)[None, :]
        total = tl.zeros((tile_rows, tile_outputs), tl.float32)
        for first_rank in range(0, rank, tile_ranks):
            ranks = first_rank + tl.arange(0, tile_ranks)
            is_rank = ranks < rank
            # All spans at once: a loop would wait for one load after the other.
            cells = tl.arange(0, splits)[:, None] * count + cell[None, :]
            offsets = (cells.to(tl.int64) * parts + part)[:, :, None] * most_rank
            known = is_mine[None, :, :] & is_rank[None, None, :]
            spans = tl.load(low + offsets + ranks[None, None, :], mask=known, other=0.0)
            some = tl.sum(spans, 0)
            added = tl.load(bias + ranks, mask=is_rank & (bias_address != 0), other=0.0)
            some += tl.where(is_mine, added.to(tl.float32)[None, :], 0.0)
            places = ranks[:, None] * outputs + column[None, :]
            weights = tl.load(up + places, mask=is_rank[:, None] & is_column, other=0.0)
            total += tl.dot(some.to(dtype), weights, input_precision="ieee")
        target = out + at + first_output + column[None, :]
        # A part without ranks adds nothing, not even 0: -0 + 0 is another number.
        mask = is_mine & is_column & (rank > 0)
        present = tl.load(target, mask=mask, other=0.0).to(tl.float32)
        rounded = total.to(out.dtype.element_ty).to(tl.float32)
        tl.store(target, (present + rounded).to(out.dtype.element_ty), mask=mask)
        number = tl.where(number == left, 0, number)
        left = tl.max(number, 0)


def add_low_rank(
    rows: Tensor, out: Tensor, order: SortedRows, table: Tensor, widest: int, most_rank: int
) -> None:
    """Add up.T @ (down @ row + bias) of all parts of each row's adapter to its row of `out`.

    rows: [n, inputs], out: [n, outputs], the rows contiguous; their dtypes may differ. order: the
    rows by adapter; those without one are neither read nor written. table: int64 [adapters, parts,
    `FIELDS`], by number; the weights have the dtype of `rows`. widest: most outputs of a part.
    most_rank: upper bound of the ranks. Launches depend on shapes and on these two numbers alone.
    """
    count, inputs = rows.shape
    if not count:
        return
    parts = table.shape[1]
    tile_rows = 16 if count <= _FEW_ROWS else 64
    tiles = triton.cdiv(count, tile_rows)
    most = _PROGRAMS * count_multiprocessors(rows.device) // (tiles * parts)
    most = min(most, inputs // _LEAST_SPAN)
    splits = next((splits for splits in SPLITS[tile_rows] if splits <= most), 1)
    tile_inputs = count_inputs(tile_rows)
    turns = triton.cdiv(inputs, splits * tile_inputs)
    low = torch.empty((splits, count, parts, most_rank), device=rows.device)
    shape = {
        "parts": parts,
        "fields": FIELDS,
        "tile_rows": tile_rows,
        "tile_ranks": _RANKS,
        "num_warps": count_warps(tile_rows),
    }
    _shrink[(tiles, splits, parts)](
        low,
        rows,
        order.numbers,
        order.rows,
        table,
        count,
        inputs,
        rows.stride(0),
        turns,
        most_rank,
        tile_inputs=tile_inputs,
        **shape,
    )
    tile_outputs = count_outputs(tile_rows)
    _expand[(tiles, triton.cdiv(widest, tile_outputs), parts)](
        out,
        low,
        order.numbers,
        order.rows,
        table,
        count,
        out.stride(0),
        most_rank,
        splits=splits,
        dtype=_DTYPES[rows.dtype],
        tile_outputs=tile_outputs,
        **shape,
    )


def count_inputs(tile_rows: int) -> int:
    """Return the number of inputs that a program multiplies at once."""
    return 128 if tile_rows == 16 else 64


def count_outputs(tile_rows: int) -> int:
    """Return the number of outputs that a program adds to."""
    return 128 if tile_rows == 16 else 64


def count_warps(tile_rows: int) -> int:
    """Return the number of warps of a program."""
    return 4 if tile_rows == 16 else 8


_DTYPES = {torch.float32: tl.float32, torch.float16: tl.float16, torch.bfloat16: tl.bfloat16}
