"""Triton kernels of a packed weight: its product with a few rows, and its decoding for many."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from services.engine.kernels.dependent_launch import launch_options
from services.engine.kernels.grid_waits import prefetch, wait_for_writes
from services.engine.model.attention.multiprocessors import count_multiprocessors
from services.engine.model.operators.packed_products import decoded_block, sum_tiles
from services.engine.model.operators.packed_weights import TILE, PackedForm, PackedWeight
from services.engine.model.operators.product_tiles import ProductTile

__all__ = [
    "MOST_PARTS",
    "MOST_ROWS",
    "PackedMatrix",
    "count_parts",
    "decode",
    "expert_tiles",
    "multiply",
    "tiles_of",
]

MOST_ROWS = 256
"""Most rows that are multiplied from codes; for more, decoding first takes less time"""
MOST_PARTS = 16
"""Most programs among which the inputs of an output are divided"""
_LEAST_STEPS = 4
"""Fewest tiles of an output that a program multiplies, so that loading ahead pays off"""
_PROGRAMS = 4
"""Number of programs on a multiprocessor that keep its share of the memory busy"""
_DECODED_OUTPUTS = 32
"""Outputs of a tile that a program of `decode` decodes"""


_TILES = (
    ProductTile(rows=8, outputs=64, warps=2, stages=4),
    ProductTile(rows=16, outputs=64, warps=2, stages=3),
    ProductTile(rows=32, outputs=64, warps=2, stages=2),
)
"""Tiles within an L4's 99 KiB of shared memory. With 4 warps or more, a program on Hopper would
multiply by instructions of four warps"""
_LARGE_TILES = (
    ProductTile(rows=32, outputs=128, warps=8, stages=2),
    ProductTile(rows=64, outputs=128, warps=8, stages=2),
)
"""Further tiles for GPUs with enough registers, and tensor cores that read operands from them"""
_HOPPER = (9, 0)
_WITH_LARGE_TILES = ((8, 0), _HOPPER)
"""Compute capabilities of these GPUs"""
_VALUE_TILES = (
    ProductTile(rows=8, outputs=32, warps=2, stages=1),
    ProductTile(rows=16, outputs=32, warps=2, stages=1),
    ProductTile(rows=32, outputs=32, warps=2, stages=1),
)
"""Tiles for codes whose numbers are looked up"""
_EXPERT_TILES = (
    ProductTile(rows=16, outputs=64, warps=2, stages=3),
    ProductTile(rows=32, outputs=32, warps=2, stages=2),
)
"""Tiles for experts, whose programs hold the sums of two products"""


@dataclass(frozen=True, slots=True)
class PackedMatrix:
    """The weight of a product and its bias."""

    weight: PackedWeight
    bias: Tensor | None
    """[outputs]"""
    arrivals: Tensor
    """int32, numbers of programs of each tile whose sums are complete; zeros between launches"""

    @staticmethod
    def of(weight: PackedWeight, bias: Tensor | None) -> "PackedMatrix":
        device = weight.codes.device
        tiles = tiles_of(weight.form, device)
        most = max(
            -(-MOST_ROWS // tile.rows) * -(-weight.outputs // tile.outputs) for tile in tiles
        )
        return PackedMatrix(weight, bias, torch.zeros(most, dtype=torch.int32, device=device))


def tiles_of(form: PackedForm, device: torch.device) -> Sequence[ProductTile]:
    """Return the tiles for weights of a form, in the order of their rows."""
    if form.values:
        return _VALUE_TILES
    return (*_TILES, *_LARGE_TILES) if _capability(device) in _WITH_LARGE_TILES else _TILES


def expert_tiles(form: PackedForm, device: torch.device) -> Sequence[ProductTile]:
    """Return the tiles for experts of a form, in the order of their rows."""
    if form.values:
        return _VALUE_TILES[1:]
    is_hopper = _capability(device) == _HOPPER
    return (*_EXPERT_TILES, _LARGE_TILES[-1]) if is_hopper else _EXPERT_TILES


def _capability(device: torch.device) -> tuple[int, int]:
    """Return a GPU's compute capability; Triton's interpreter stands for an H100."""
    return torch.cuda.get_device_capability(device) if device.type == "cuda" else _HOPPER


def count_parts(weight: PackedWeight) -> int:
    """Return the number of programs that divide the inputs of an output, so that the GPU is full.

    It is a power of two, and the same for all numbers of rows: they sum in one order.
    """
    wanted = _PROGRAMS * count_multiprocessors(weight.codes.device)
    programs, tiles = -(-weight.outputs // _TILES[0].outputs), weight.codes.shape[0]
    parts = 1
    while 2 * parts * programs <= wanted and tiles // (2 * parts) >= _LEAST_STEPS:
        parts *= 2
    return min(parts, MOST_PARTS)


def multiply(
    rows: Tensor, matrix: PackedMatrix, tile: ProductTile, parts: int, out: Tensor, *, adds: bool
) -> None:
    """Write rows @ weight.T + bias to `out` [n, outputs], or add it; n is at most `MOST_ROWS`.

    parts: number of programs that divide the inputs of an output. `out` may have gaps between rows.
    """
    weight = matrix.weight
    count, inputs = rows.shape
    outputs, tiles = weight.outputs, weight.codes.shape[0]
    row_tiles, output_tiles = triton.cdiv(count, tile.rows), triton.cdiv(outputs, tile.outputs)
    sums = None
    if parts > 1:
        size = parts * row_tiles * output_tiles * tile.rows * tile.outputs
        sums = torch.empty(size, dtype=torch.float32, device=rows.device)
    # Programs that read the same codes follow each other.
    _multiply_packed[(row_tiles, output_tiles, parts)](
        out,
        rows,
        weight.codes,
        weight.numbers,
        None if weight.values is None else weight.values.terms,
        matrix.bias,
        sums,
        matrix.arrivals,
        count,
        inputs,
        outputs,
        out.stride(0),
        tiles,
        triton.cdiv(tiles, parts),
        adds=adds,
        whole=inputs % TILE == 0,
        form=weight.form,
        terms=0 if weight.values is None else weight.values.num_terms,
        tile=tile,
        num_warps=tile.warps,
        num_stages=tile.stages,
        **launch_options(rows.device),
    )


def decode(weight: PackedWeight, first: int, out: Tensor) -> None:
    """Write the weights of the outputs from `first` on to `out` [outputs, inputs], rounded."""
    outputs, inputs = out.shape
    tiles = weight.codes.shape[0]
    _decode_packed[(tiles, triton.cdiv(outputs, _DECODED_OUTPUTS))](
        out,
        weight.codes,
        weight.numbers,
        None if weight.values is None else weight.values.terms,
        first,
        inputs,
        outputs,
        weight.outputs,
        form=weight.form,
        terms=0 if weight.values is None else weight.values.num_terms,
        tile_outputs=_DECODED_OUTPUTS,
    )


@triton.jit(  # type: ignore[untyped-decorator]
    do_not_specialize=["count", "out_stride", "tiles", "span"]
)
def _multiply_packed(
    out: tl.tensor,
    rows: tl.tensor,
    codes: tl.tensor,
    numbers: tl.tensor,
    values: tl.tensor,
    bias: tl.tensor,
    sums: tl.tensor,
    arrivals: tl.tensor,
    count: tl.tensor,
    inputs: tl.tensor,
    outputs: tl.tensor,
    out_stride: tl.tensor,
    tiles: tl.tensor,
    span: tl.tensor,
    adds: tl.constexpr,
    whole: tl.constexpr,
    form: tl.constexpr,
    terms: tl.constexpr,
    tile: tl.constexpr,
    is_dependent: tl.constexpr,
) -> None:
    """Multiply a tile over `span` tiles of inputs. Grid: tiles of rows, tiles of outputs, parts.

    Each program stores its sums; the last one to arrive adds them in the order of the inputs.
    """
    row = tl.program_id(0) * tile.rows + tl.arange(0, tile.rows)
    output = tl.program_id(1) * tile.outputs + tl.arange(0, tile.outputs)
    is_row, is_output = row < count, output < outputs
    first = tl.program_id(2) * span
    if is_dependent:
        stored = tl.minimum(output, outputs - 1)
        for ahead in tl.static_range(2):
            number = tl.minimum(first + ahead, tiles - 1)
            prefetch(codes + (number * outputs + stored).to(tl.int64) * form.integers)
    wait_for_writes(is_dependent)
    product = sum_tiles(
        rows + row.to(tl.int64) * inputs,
        is_row,
        codes,
        numbers,
        values,
        tl.minimum(output, outputs - 1),
        first,
        tl.minimum(first + span, tiles),
        inputs,
        outputs,
        whole,
        form,
        terms,
        tile,
    )
    is_last = True
    if sums is not None:
        parts = tl.num_programs(2)
        number = tl.program_id(1) * tl.num_programs(0) + tl.program_id(0)
        size: tl.constexpr = tile.rows * tile.outputs
        cell = tl.arange(0, tile.outputs)[:, None] * tile.rows + tl.arange(0, tile.rows)[None, :]
        cells = sums + number.to(tl.int64) * (parts * size) + cell
        tl.store(cells + tl.program_id(2) * size, product)
        tl.debug_barrier()  # all threads have stored before one of them says so
        is_last = tl.atomic_add(arrivals + number, 1, sem="acq_rel", scope="gpu") == parts - 1
        if is_last:
            product = tl.zeros((tile.outputs, tile.rows), tl.float32)
            for first_part in range(0, parts, 4):
                for further in tl.static_range(4):  # four loads wait for memory together
                    part = first_part + further
                    place = cells + part * size
                    addend = tl.load(place, mask=part < parts, other=0.0, cache_modifier=".cg")
                    product += addend
            tl.store(arrivals + number, 0)
    if is_last:
        if bias is not None:
            product += tl.load(bias + output, mask=is_output, other=0.0).to(tl.float32)[:, None]
        target = out + row.to(tl.int64)[None, :] * out_stride + output[:, None]
        is_target = is_row[None, :] & is_output[:, None]
        if adds:
            product += tl.load(target, mask=is_target, other=0.0).to(tl.float32)
        tl.store(target, product.to(out.dtype.element_ty), mask=is_target)


@triton.jit(do_not_specialize=["first"])  # type: ignore[untyped-decorator]
def _decode_packed(
    out: tl.tensor,
    codes: tl.tensor,
    numbers: tl.tensor,
    values: tl.tensor,
    first: tl.tensor,
    inputs: tl.tensor,
    outputs: tl.tensor,
    stored_outputs: tl.tensor,
    form: tl.constexpr,
    terms: tl.constexpr,
    tile_outputs: tl.constexpr,
) -> None:
    """Decode a tile of some outputs, and round it to the type of `out`."""
    blocks: tl.constexpr = form.blocks
    dtype: tl.constexpr = out.dtype.element_ty
    number = tl.program_id(0)
    output = tl.program_id(1) * tile_outputs + tl.arange(0, tile_outputs)
    is_output = output < outputs
    stored = first + tl.minimum(output, outputs - 1)
    for block in tl.static_range(blocks):
        weight = decoded_block(
            codes, numbers, values, stored, number, stored_outputs, block, form, terms, dtype
        )
        column = number * 256 + block * form.width + tl.arange(0, form.width)
        target = out + output.to(tl.int64)[:, None] * inputs + column[None, :]
        is_target = is_output[:, None] & (column < inputs)[None, :]
        tl.store(target, weight.to(dtype), mask=is_target)
