"""Triton kernels of products in int8: rows with a scale each, and weights with one for each output.

Sums of int8 products are exact in int32, so a row's numbers depend on no other row.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from services.engine.kernels.dependent_launch import launch_options
from services.engine.kernels.grid_waits import wait_for_writes
from services.engine.model.attention.multiprocessors import count_multiprocessors
from services.engine.model.checkpoint.quantized import GroupNumbers, QuantizedWeight
from services.engine.model.operators.interface import Projection
from services.engine.model.operators.product_tiles import MOST_DIVIDED, ProductTile, count_parts

__all__ = ["ByteProjection", "has_bytes", "multiply", "round_to_bytes"]

_INPUTS = 128
"""Inputs of a tile"""
_MULTIPLE = 16
"""Number that must divide the inputs, so that loads are wide"""
_COLUMNS = 1024
"""Number of columns that a program of `round_to_bytes` reads at a time"""


TILES = (
    ProductTile(rows=16, outputs=64, warps=4, stages=5),
    ProductTile(rows=32, outputs=64, warps=4, stages=5),
    ProductTile(rows=64, outputs=128, warps=8, stages=4),
    ProductTile(rows=128, outputs=128, warps=8, stages=3),
)
"""Tiles by number of rows, within an L4's 99 KiB of shared memory"""


@dataclass(frozen=True, slots=True)
class ByteMatrix:
    """The weight of a product and its bias."""

    numbers: Tensor
    """int8 [outputs, inputs]"""
    scales: Tensor
    """float32 [outputs]"""
    bias: Tensor | None
    """[outputs]"""
    arrivals: Tensor
    """int32 [tiles], numbers of programs whose sums are complete; zeros between launches"""


class ByteProjection(Projection):
    """A product that rounds its rows to int8, by one rule for all numbers of rows."""

    def __init__(
        self, weights: Sequence[QuantizedWeight], bias: Tensor | None, device: torch.device
    ) -> None:
        """weights: for which `has_bytes` is true; bias: on the device."""
        numbers = torch.cat([_numbers(weight) for weight in weights]).to(device)
        scales = torch.cat([weight.scales.float()[:, 0] for weight in weights]).to(device)
        tiles = -(-len(numbers) // min(tile.outputs for tile in TILES))
        arrivals = torch.zeros(tiles, dtype=torch.int32, device=device)
        self.matrix = ByteMatrix(numbers, scales, bias, arrivals)
        self.weight_bytes = numbers.nbytes + scales.nbytes

    def into(self, rows: Tensor, out: Tensor) -> None:
        multiply(*round_to_bytes(rows), self.matrix, out, adds=False)

    def add_to(self, rows: Tensor, out: Tensor) -> None:
        multiply(*round_to_bytes(rows), self.matrix, out, adds=True)


def has_bytes(weight: QuantizedWeight) -> bool:
    """Return whether a quantized weight is int8 with one scale for each output."""
    has_one_scale = isinstance(weight.scales, GroupNumbers) and weight.scales.count == 1
    is_plain = weight.offsets is None and weight.order is None
    return weight.bits == 8 and has_one_scale and is_plain and not weight.shape[1] % _MULTIPLE


def _numbers(weight: QuantizedWeight) -> Tensor:
    codes = weight.codes if isinstance(weight.codes, Tensor) else weight.codes.decode()
    return (codes ^ 128).view(torch.int8)


def round_to_bytes(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Round `rows` [n, width] to int8 [n, width] with scales float32 [n].

    The largest number of a row becomes 127. A row with NaN or infinity gets a scale like that.
    """
    count, width = rows.shape
    numbers = torch.empty((count, width), dtype=torch.int8, device=rows.device)
    scales = torch.empty(count, dtype=torch.float32, device=rows.device)
    _round_to_bytes[(count,)](
        numbers, scales, rows, width, tile=_COLUMNS, **launch_options(rows.device)
    )
    return numbers, scales


def multiply(
    rows: Tensor, row_scales: Tensor, matrix: ByteMatrix, out: Tensor, *, adds: bool
) -> None:
    """Write rows @ weight.T + bias to `out` [n, outputs], or add it.

    rows, row_scales: result of `round_to_bytes`.
    """
    count, inputs = rows.shape
    outputs = len(matrix.numbers)
    tile = next((tile for tile in TILES if tile.rows >= count), TILES[-1])
    row_tiles, tiles = triton.cdiv(count, tile.rows), triton.cdiv(outputs, tile.outputs)
    parts, sums = 1, None
    if count <= MOST_DIVIDED:
        parts = count_parts(tiles, inputs // _INPUTS, count_multiprocessors(rows.device))
    if parts > 1:
        size = parts * tiles * tile.outputs * tile.rows
        sums = torch.empty(size, dtype=torch.int32, device=rows.device)
    # Programs that read the same weights follow each other.
    _multiply_bytes[(row_tiles, tiles, parts)](
        out,
        rows,
        row_scales,
        matrix.numbers,
        matrix.scales,
        matrix.bias,
        sums,
        matrix.arrivals,
        count,
        inputs,
        outputs,
        _INPUTS * triton.cdiv(triton.cdiv(inputs, _INPUTS), parts),
        adds=adds,
        whole=inputs % _INPUTS == 0,
        tile_rows=tile.rows,
        tile_outputs=tile.outputs,
        tile_inputs=_INPUTS,
        num_warps=tile.warps,
        num_stages=tile.stages,
        **launch_options(rows.device),
    )


@triton.jit  # type: ignore[untyped-decorator]
def _round_to_bytes(
    numbers: tl.tensor,
    scales: tl.tensor,
    rows: tl.tensor,
    width: tl.tensor,
    tile: tl.constexpr,
    is_dependent: tl.constexpr,
) -> None:
    """Round one row. The second reading comes from the cache."""
    wait_for_writes(is_dependent)
    row = tl.program_id(0).to(tl.int64)
    most = tl.zeros((tile,), tl.float32)
    for first in range(0, width, tile):
        column = first + tl.arange(0, tile)
        part = tl.load(rows + row * width + column, mask=column < width, other=0.0)
        size = tl.abs(part.to(tl.float32))
        most = tl.where(size <= most, most, size)  # NaN is kept
    largest = tl.max(tl.where(most == most, most, float("inf")), axis=0)
    inverse = tl.where(largest > 0.0, 127.0 / largest, 0.0)
    tl.store(scales + row, largest / 127.0)
    for first in range(0, width, tile):
        column = first + tl.arange(0, tile)
        part = tl.load(rows + row * width + column, mask=column < width, other=0.0)
        # This sum has no bits for fractions: it is rounded to the nearest, ties to even.
        rounded = (part.to(tl.float32) * inverse + 12582912.0) - 12582912.0
        coded = tl.where(largest < float("inf"), rounded, 1.0).to(tl.int8)
        tl.store(numbers + row * width + column, coded, mask=column < width)


@triton.jit(do_not_specialize=["count"])  # type: ignore[untyped-decorator]
def _multiply_bytes(
    out: tl.tensor,
    rows: tl.tensor,
    row_scales: tl.tensor,
    numbers: tl.tensor,
    scales: tl.tensor,
    bias: tl.tensor,
    sums: tl.tensor,
    arrivals: tl.tensor,
    count: tl.tensor,
    inputs: tl.tensor,
    outputs: tl.tensor,
    span: tl.tensor,
    adds: tl.constexpr,
    whole: tl.constexpr,
    tile_rows: tl.constexpr,
    tile_outputs: tl.constexpr,
    tile_inputs: tl.constexpr,
    is_dependent: tl.constexpr,
) -> None:
    """Multiply a tile over `span` inputs. Grid: tiles of rows, tiles of outputs, parts.

    Outputs are the rows of the tensor cores' instructions, so that few rows waste no part of them.
    Each program stores its sums; the last one to arrive adds them.
    """
    wait_for_writes(is_dependent)
    row = tl.program_id(0) * tile_rows + tl.arange(0, tile_rows)
    output = tl.program_id(1) * tile_outputs + tl.arange(0, tile_outputs)
    is_row, is_output = row < count, output < outputs
    row_inputs = rows + tl.minimum(row, count - 1).to(tl.int64)[:, None] * inputs
    weight_inputs = numbers + tl.minimum(output, outputs - 1).to(tl.int64)[:, None] * inputs
    part, parts = tl.program_id(2), tl.num_programs(2)
    product = tl.zeros((tile_outputs, tile_rows), tl.int32)
    for first in range(part * span, tl.minimum((part + 1) * span, inputs), tile_inputs):
        column = first + tl.arange(0, tile_inputs)[None, :]
        if whole:
            weight, some = tl.load(weight_inputs + column), tl.load(row_inputs + column)
        else:
            is_input = column < inputs
            weight = tl.load(weight_inputs + column, mask=is_input, other=0)
            some = tl.load(row_inputs + column, mask=is_input, other=0)
        product = tl.dot(weight, tl.trans(some), product, out_dtype=tl.int32)
    is_last = True
    if sums is not None:
        size: tl.constexpr = tile_outputs * tile_rows
        cell = tl.arange(0, tile_outputs)[:, None] * tile_rows + tl.arange(0, tile_rows)[None, :]
        cells = sums + tl.program_id(1).to(tl.int64) * (parts * size) + cell
        tl.store(cells + part * size, product)
        tl.debug_barrier()  # all threads have stored before one of them says so
        arrived = tl.atomic_add(arrivals + tl.program_id(1), 1, sem="acq_rel", scope="gpu")
        is_last = arrived == parts - 1
        if is_last:
            product = tl.zeros((tile_outputs, tile_rows), tl.int32)
            for number in range(parts):
                product += tl.load(cells + number * size, cache_modifier=".cg")
            tl.store(arrivals + tl.program_id(1), 0)
    if is_last:
        row_scale = tl.load(row_scales + row, mask=is_row, other=0.0)
        scale = tl.load(scales + output, mask=is_output, other=0.0)
        result = product.to(tl.float32) * row_scale[None, :] * scale[:, None]
        if bias is not None:
            own = tl.load(bias + output, mask=is_output, other=0.0)
            result += own.to(tl.float32)[:, None]
        place = out + row.to(tl.int64)[None, :] * outputs + output[:, None]
        is_place = is_output[:, None] & is_row[None, :]
        if adds:
            result += tl.load(place, mask=is_place, other=0.0).to(tl.float32)
        tl.store(place, result.to(out.dtype.element_ty), mask=is_place)
