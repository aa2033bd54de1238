"""Triton kernels of FP8 products: rounding of activations, and products with scales of groups."""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from services.engine.model.operators.fp8_weights import FP8, LARGEST, Fp8Weight

__all__ = ["multiply_groups", "multiply_row", "round_groups", "round_rows"]

_COLUMNS = 1024
"""Number of columns that a program of `round_rows` reads at a time"""
_GROUPS = 8
"""Number of groups that a program of `round_groups` rounds"""
_ROW_OUTPUTS, _ROW_INPUTS = 4, 1024
"""Outputs and inputs whose weights a program of `multiply_row` reads at a time"""
_WIDE = 16384
"""Least number of outputs with which large tiles occupy a GPU"""


@dataclass(frozen=True, slots=True)
class _Tile:
    """The tile that one program multiplies at a time, tuned on an H200."""

    rows: int
    outputs: int
    warps: int
    stages: int
    """Depth of the pipeline that loads rows and weights"""


_TILES = (
    _Tile(rows=16, outputs=32, warps=4, stages=4),
    _Tile(rows=32, outputs=64, warps=4, stages=4),
    _Tile(rows=64, outputs=128, warps=8, stages=3),
    _Tile(rows=128, outputs=128, warps=8, stages=3),
)
_NARROW_TILES = (
    _Tile(rows=16, outputs=16, warps=2, stages=6),
    _Tile(rows=64, outputs=64, warps=4, stages=4),
    _Tile(rows=128, outputs=128, warps=8, stages=3),
)
"""Tiles for weights with fewer than `_WIDE` outputs"""


def round_rows(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Round `rows` [n, width] to FP8 with a scale for each row.

    Returns float8_e4m3fn [n, width] and float32 [n, 1]. A row with NaN or infinity becomes NaN.
    """
    count, width = rows.shape
    numbers = torch.empty((count, width), dtype=FP8, device=rows.device)
    scales = torch.empty((count, 1), dtype=torch.float32, device=rows.device)
    _round_rows[(count,)](
        numbers.view(torch.uint8), scales, rows, width=width, largest=LARGEST, tile=_COLUMNS
    )
    return numbers, scales


def round_groups(rows: Tensor, group: int) -> tuple[Tensor, Tensor]:
    """Round `rows` [n, width] to FP8 with a scale for each `group` (a power of two) of a row.

    Returns float8_e4m3fn [n, width] and float32 [n, groups]. NaN stays in its group.
    """
    count, width = rows.shape
    groups = triton.cdiv(width, group)
    numbers = torch.empty((count, width), dtype=FP8, device=rows.device)
    scales = torch.empty((count, groups), dtype=torch.float32, device=rows.device)
    _round_groups[(count, triton.cdiv(groups, _GROUPS))](
        numbers.view(torch.uint8),
        scales,
        rows,
        width=width,
        groups=groups,
        largest=LARGEST,
        group=group,
        tile=_GROUPS,
    )
    return numbers, scales


def multiply_groups(
    rows: tuple[Tensor, Tensor],
    weight: Fp8Weight,
    bias: Tensor | None,
    group: int,
    out: Tensor,
    *,
    adds: bool,
) -> None:
    """Write rows @ weight.T + bias to `out` [n, outputs], or add it.

    rows: result of `round_groups`; `group` inputs share a scale there and in `weight`.
    """
    numbers, row_scales = rows
    count, inputs = numbers.shape
    groups, outputs = weight.scales.shape
    tiles = _TILES if outputs >= _WIDE else _NARROW_TILES
    tile = next((tile for tile in tiles if tile.rows >= count), tiles[-1])
    # Programs that read the same weights follow each other.
    _multiply_groups[(triton.cdiv(count, tile.rows), triton.cdiv(outputs, tile.outputs))](
        out,
        numbers,
        row_scales,
        weight.numbers,
        weight.scales,
        bias,
        count,
        inputs=inputs,
        outputs=outputs,
        groups=groups,
        group=group,
        adds=adds,
        tile_rows=tile.rows,
        tile_outputs=tile.outputs,
        num_warps=tile.warps,
        num_stages=tile.stages,
    )


def multiply_row(
    row: Tensor, weight: Fp8Weight, bias: Tensor | None, group: int, out: Tensor, *, adds: bool
) -> None:
    """Write row @ weight.T + bias to `out` [1, outputs], or add it, while weights are read.

    row: [1, inputs], which is not rounded; group: number of inputs that share a scale in `weight`.
    """
    inputs = row.shape[1]
    groups, outputs = weight.scales.shape
    tile_inputs = _ROW_INPUTS if groups == 1 else group
    _multiply_row[(triton.cdiv(outputs, _ROW_OUTPUTS),)](
        out,
        row,
        weight.numbers,
        weight.scales,
        bias,
        inputs=inputs,
        outputs=outputs,
        groups=groups,
        adds=adds,
        tile_outputs=_ROW_OUTPUTS,
        tile_groups=_ROW_INPUTS // tile_inputs,
        tile_inputs=tile_inputs,
    )


@triton.jit  # type: ignore[untyped-decorator]
def _round_rows(
    numbers: tl.tensor,
    scales: tl.tensor,
    rows: tl.tensor,
    width: tl.constexpr,
    largest: tl.constexpr,
    tile: tl.constexpr,
) -> None:
    """Round one row. The second reading comes from the cache."""
    row = tl.program_id(0).to(tl.int64)
    most = tl.zeros((tile,), tl.float32)
    for first in range(0, width, tile):
        column = first + tl.arange(0, tile)
        part = tl.load(rows + row * width + column, mask=column < width, other=0.0)
        most = tl.maximum(most, tl.abs(part.to(tl.float32)))
    scale = _scale(tl.max(most, axis=0), largest)
    tl.store(scales + row, scale)
    for first in range(0, width, tile):
        column = first + tl.arange(0, tile)
        part = tl.load(rows + row * width + column, mask=column < width, other=0.0)
        coded = _encode(part.to(tl.float32) / scale)
        tl.store(numbers + row * width + column, coded, mask=column < width)


@triton.jit  # type: ignore[untyped-decorator]
def _round_groups(
    numbers: tl.tensor,
    scales: tl.tensor,
    rows: tl.tensor,
    width: tl.constexpr,
    groups: tl.constexpr,
    largest: tl.constexpr,
    group: tl.constexpr,
    tile: tl.constexpr,
) -> None:
    """Round some groups of one row."""
    row = tl.program_id(0).to(tl.int64)
    number = tl.program_id(1) * tile + tl.arange(0, tile)
    column = number[:, None] * group + tl.arange(0, group)[None, :]
    place = row * width + column
    part = tl.load(rows + place, mask=column < width, other=0.0).to(tl.float32)
    scale = _scale(tl.max(tl.abs(part), axis=1), largest)
    tl.store(scales + row * groups + number, scale, mask=number < groups)
    tl.store(numbers + place, _encode(part / scale[:, None]), mask=column < width)


@triton.jit  # type: ignore[untyped-decorator]
def _scale(most: tl.tensor, largest: tl.constexpr) -> tl.tensor:
    """Return the scale of numbers up to `most`; the scale of zeros is 1."""
    return tl.where(most > 1e-30, most / largest, 1.0)


@triton.jit  # type: ignore[untyped-decorator]
def _encode(values: tl.tensor) -> tl.tensor:
    """Return the bits of float32 values up to 448 in E4M3, rounded to the nearest, ties to even.

    It uses integers, because the conversion of Triton's interpreter does not round to the nearest.
    """
    bits = values.to(tl.int32, bitcast=True)
    magnitude = bits & 0x7FFFFFFF
    # Adding 2^14 leaves the multiples of 2^-9, E4M3's smallest number, in the lowest bits.
    small = (magnitude.to(tl.float32, bitcast=True) + 16384.0).to(tl.int32, bitcast=True)
    rounded = magnitude + 0x7FFFF + ((magnitude >> 20) & 1)
    coded = tl.where(magnitude < 0x3C800000, small - 0x46800000, (rounded >> 20) - (120 << 3))
    coded = tl.where(magnitude > 0x43E80000, 0x7F, coded)
    return (coded | ((bits >> 24) & 0x80)).to(tl.uint8)


@triton.jit(do_not_specialize=["count"])  # type: ignore[untyped-decorator]
def _multiply_groups(
    out: tl.tensor,
    rows: tl.tensor,
    row_scales: tl.tensor,
    weight: tl.tensor,
    scales: tl.tensor,
    bias: tl.tensor,
    count: tl.tensor,
    inputs: tl.constexpr,
    outputs: tl.constexpr,
    groups: tl.constexpr,
    group: tl.constexpr,
    adds: tl.constexpr,
    tile_rows: tl.constexpr,
    tile_outputs: tl.constexpr,
) -> None:
    """Multiply some rows with some outputs, a group of inputs at a time."""
    row = tl.program_id(0).to(tl.int64) * tile_rows + tl.arange(0, tile_rows)
    output = tl.program_id(1) * tile_outputs + tl.arange(0, tile_outputs)
    is_row, is_output = row < count, output < outputs
    weight_rows = weight + output.to(tl.int64) * inputs
    product = tl.zeros((tile_rows, tile_outputs), tl.float32)
    for number in range(groups):
        column = number * group + tl.arange(0, group)
        is_column = column < inputs
        part = tl.load(
            rows + row[:, None] * inputs + column[None, :],
            mask=is_row[:, None] & is_column[None, :],
            other=0.0,
        )
        numbers = tl.load(
            weight_rows[None, :] + column[:, None],
            mask=is_output[None, :] & is_column[:, None],
            other=0.0,
        )
        row_scale = tl.load(row_scales + row * groups + number, mask=is_row, other=0.0)
        scale = tl.load(scales + number * outputs + output, mask=is_output, other=0.0)
        product += tl.dot(part, numbers) * row_scale[:, None] * scale[None, :]
    if bias is not None:
        product += tl.load(bias + output, mask=is_output, other=0.0).to(tl.float32)[None, :]
    place = out + row[:, None] * outputs + output[None, :]
    is_place = is_row[:, None] & is_output[None, :]
    if adds:
        product += tl.load(place, mask=is_place, other=0.0).to(tl.float32)
    tl.store(place, product.to(out.dtype.element_ty), mask=is_place)


@triton.jit  # type: ignore[untyped-decorator]
def _multiply_row(
    out: tl.tensor,
    row: tl.tensor,
    weight: tl.tensor,
    scales: tl.tensor,
    bias: tl.tensor,
    inputs: tl.constexpr,
    outputs: tl.constexpr,
    groups: tl.constexpr,
    adds: tl.constexpr,
    tile_outputs: tl.constexpr,
    tile_groups: tl.constexpr,
    tile_inputs: tl.constexpr,
) -> None:
    """Multiply a row with some outputs, `tile_groups` times `tile_inputs` inputs at a time."""
    output = tl.program_id(0) * tile_outputs + tl.arange(0, tile_outputs)
    is_output = output < outputs
    weight_rows = weight + output.to(tl.int64)[:, None, None] * inputs
    product = tl.zeros((tile_outputs, tile_groups, tile_inputs), tl.float32)
    for first in range(0, inputs, tile_groups * tile_inputs):
        place = tl.arange(0, tile_groups)[:, None] * tile_inputs + tl.arange(0, tile_inputs)
        column = (first + place)[None, :, :]
        is_column = column < inputs
        part = tl.load(row + column, mask=is_column, other=0.0).to(tl.float32)
        if groups > 1:
            number = first // tile_inputs + tl.arange(0, tile_groups)
            is_scale = is_output[:, None] & (number < groups)[None, :]
            place_of_scale = scales + number[None, :] * outputs + output[:, None]
            part *= tl.load(place_of_scale, mask=is_scale, other=0.0)[:, :, None]
        is_weight = is_output[:, None, None] & is_column
        numbers = tl.load(weight_rows + column, mask=is_weight, other=0.0)
        product += numbers.to(tl.float32) * part
    total = tl.sum(tl.sum(product, axis=2), axis=1)
    if groups == 1:
        total *= tl.load(scales + output, mask=is_output, other=0.0)
    if bias is not None:
        total += tl.load(bias + output, mask=is_output, other=0.0).to(tl.float32)
    if adds:
        total += tl.load(out + output, mask=is_output, other=0.0).to(tl.float32)
    tl.store(out + output, total.to(out.dtype.element_ty), mask=is_output)
