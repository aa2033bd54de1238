"""Triton kernel of FP8 products with few rows: weights are read once, at the speed of memory.

A tile's outputs are the rows of the tensor cores' instructions, and its activations the columns, so
that 1 to 16 activations waste no part of an instruction. Programs divide the inputs among them;
the last program of a tile adds their sums in one order, so that results don't depend on timing.
"""

from dataclasses import dataclass, replace

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from services.engine.kernels.dependent_launch import launch_options
from services.engine.kernels.grid_waits import prefetch, wait_for_writes
from services.engine.model.operators.fp8_rounding import RoundedRows
from services.engine.model.operators.fp8_weights import Fp8Weight
from services.engine.model.operators.product_tiles import MOST_DIVIDED, ProductTile, count_parts

__all__ = ["TILES", "Fp8Matrix", "Tile", "multiply", "parts_of"]

_INPUTS = 128
"""Inputs of a tile, the same for all numbers of rows: all sum in the same order"""


@dataclass(frozen=True, slots=True)
class Tile(ProductTile):
    """The tile that one program multiplies at a time. Its rows are activations."""

    by_descriptor: bool = False
    """True if the tensor memory accelerator loads weights, from compute capability 9.0 on"""

    def with_descriptor(self) -> "Tile":
        return replace(self, by_descriptor=True)


TILES = (
    Tile(rows=16, outputs=64, warps=4, stages=6),
    Tile(rows=32, outputs=64, warps=4, stages=5),
    Tile(rows=64, outputs=128, warps=8, stages=4),
    Tile(rows=128, outputs=128, warps=8, stages=3),
)
"""Tiles by number of rows, within an L4's 99 KiB of shared memory"""
_LEAST_OUTPUTS = min(tile.outputs for tile in TILES)


@dataclass(frozen=True, slots=True)
class Fp8Matrix:
    """The weight of a product and its bias."""

    weight: Fp8Weight
    bias: Tensor | None
    """[outputs]"""
    group: int | None
    """Number of inputs that share a scale, 32 to 128; None: all inputs of an output"""
    arrivals: Tensor
    """int32 [tiles], number of programs whose sums are complete; zeros between launches"""

    @staticmethod
    def of(weight: Fp8Weight, bias: Tensor | None, group: int | None) -> "Fp8Matrix":
        tiles = triton.cdiv(weight.numbers.shape[0], _LEAST_OUTPUTS)
        arrivals = torch.zeros(tiles, dtype=torch.int32, device=weight.numbers.device)
        return Fp8Matrix(weight, bias, group, arrivals)

    @property
    def shape(self) -> tuple[int, int]:
        """Numbers of outputs and inputs."""
        outputs, inputs = self.weight.numbers.shape
        return outputs, inputs


def parts_of(matrix: Fp8Matrix, tile: Tile, multiprocessors: int) -> int:
    """Return the number of programs that divide a tile's inputs, so that the GPU is full."""
    outputs, inputs = matrix.shape
    tiles = triton.cdiv(outputs, tile.outputs)
    return count_parts(tiles, inputs // (matrix.group or _INPUTS), multiprocessors)


def multiply(
    rows: RoundedRows, matrix: Fp8Matrix, tile: Tile, parts: int, out: Tensor, *, adds: bool
) -> None:
    """Write rows @ weight.T + bias to `out` [n, outputs], or add it.

    parts: number of programs that divide a tile's inputs; 1 if there are more rows than the tile's,
    or more than `MOST_DIVIDED`.
    """
    numbers, weight = rows.numbers, matrix.weight
    count, inputs = numbers.shape
    outputs, _ = matrix.shape
    tile_inputs = matrix.group or _INPUTS
    tiles = triton.cdiv(outputs, tile.outputs)
    row_tiles = triton.cdiv(count, tile.rows)
    assert parts == 1 or count <= min(tile.rows, MOST_DIVIDED), "only one tile of rows is divided"
    sums = numbers.new_empty(parts * tiles * tile.outputs * tile.rows, dtype=torch.float32)
    descriptor: TensorDescriptor | None = None
    if tile.by_descriptor:
        descriptor = TensorDescriptor.from_tensor(weight.numbers, [tile.outputs, tile_inputs])
    # Programs that read the same weights follow each other.
    _multiply_fp8[(row_tiles, tiles, parts)](
        out,
        sums,
        matrix.arrivals,
        numbers,
        rows.scales,
        weight.numbers,
        descriptor,
        weight.scales,
        matrix.bias,
        count,
        inputs,
        outputs,
        tile_inputs * triton.cdiv(triton.cdiv(inputs, tile_inputs), parts),
        int(adds),
        is_grouped=matrix.group is not None,
        is_even=inputs % tile_inputs == 0 and outputs % tile.outputs == 0,
        most_divided=MOST_DIVIDED,
        tile_rows=tile.rows,
        tile_outputs=tile.outputs,
        tile_inputs=tile_inputs,
        num_warps=tile.warps,
        num_stages=tile.stages,
        **launch_options(numbers.device),
    )


@triton.jit(do_not_specialize=["count", "adds"])  # type: ignore[untyped-decorator]
def _multiply_fp8(
    out: tl.tensor,
    sums: tl.tensor,
    arrivals: tl.tensor,
    rows: tl.tensor,
    row_scales: tl.tensor,
    weight: tl.tensor,
    descriptor: tl.tensor,
    scales: tl.tensor,
    bias: tl.tensor,
    count: tl.tensor,
    inputs: tl.tensor,
    outputs: tl.tensor,
    span: tl.tensor,
    adds: tl.tensor,
    is_grouped: tl.constexpr,
    is_even: tl.constexpr,
    most_divided: tl.constexpr,
    tile_rows: tl.constexpr,
    tile_outputs: tl.constexpr,
    tile_inputs: tl.constexpr,
    is_dependent: tl.constexpr,
) -> None:
    """Multiply a tile over `span` inputs. Grid: tiles of rows, tiles of outputs, parts of inputs.

    The products of a tile of inputs are summed apart and then added in float32, because Hopper's
    tensor cores sum FP8 with 14 bits. With `is_grouped`, a tile of inputs is a group.
    descriptor: that of `weight`, which the tensor memory accelerator loads; None: threads load it.
    """
    first_output = tl.program_id(1) * tile_outputs
    part, parts = tl.program_id(2), tl.num_programs(2)
    row = tl.program_id(0) * tile_rows + tl.arange(0, tile_rows)
    output = first_output + tl.arange(0, tile_outputs)
    is_row, is_output = row < count, output < outputs
    if is_dependent:
        line = weight + tl.minimum(output, outputs - 1).to(tl.int64) * inputs
        for ahead in tl.static_range(4):  # as much as a pipeline holds
            prefetch(line + tl.minimum(part * span + ahead * tile_inputs, inputs - 1))
    wait_for_writes(is_dependent)
    # Rows behind the last one repeat it: loads without masks are wider.
    row_inputs = rows + tl.minimum(row, count - 1).to(tl.int64)[:, None] * inputs
    groups = tl.cdiv(inputs, tile_inputs)
    product = tl.zeros((tile_outputs, tile_rows), tl.float32)
    for first in range(part * span, tl.minimum((part + 1) * span, inputs), tile_inputs):
        column = first + tl.arange(0, tile_inputs)[None, :]
        if is_even:
            factors = tl.load(row_inputs + column)
        else:
            factors = tl.load(row_inputs + column, mask=column < inputs, other=0.0)
        if descriptor is not None:
            numbers = descriptor.load([first_output, first])
        else:
            place = weight + output.to(tl.int64)[:, None] * inputs + column
            if is_even:
                numbers = tl.load(place)
            else:
                is_weight = is_output[:, None] & (column < inputs)
                numbers = tl.load(place, mask=is_weight, other=0.0)
        addend = tl.dot(numbers, tl.trans(factors))
        if is_grouped:
            number = first // tile_inputs
            row_scale = tl.load(row_scales + row * groups + number, mask=is_row, other=0.0)
            scale = tl.load(scales + number * outputs + output, mask=is_output, other=0.0)
            addend = addend * row_scale[None, :] * scale[:, None]
        product += addend

    is_last = True
    if tile_rows <= most_divided and parts > 1:
        size: tl.constexpr = tile_outputs * tile_rows
        cell = tl.arange(0, tile_outputs)[:, None] * tile_rows + tl.arange(0, tile_rows)[None, :]
        cells = sums + tl.program_id(1).to(tl.int64) * (parts * size) + cell
        tl.store(cells + part * size, product)
        tl.debug_barrier()  # all threads have stored before one of them says so
        arrived = tl.atomic_add(arrivals + tl.program_id(1), 1, sem="acq_rel", scope="gpu")
        is_last = arrived == parts - 1
        if is_last:
            product = tl.zeros((tile_outputs, tile_rows), tl.float32)
            for number in range(0, parts, 4):
                for further in tl.static_range(4):  # four loads wait for memory together
                    each = number + further
                    addend = tl.load(cells + each * size, mask=each < parts, cache_modifier=".cg")
                    product += tl.where(each < parts, addend, 0.0)
            tl.store(arrivals + tl.program_id(1), 0)
    if is_last:
        if not is_grouped:
            row_scale = tl.load(row_scales + row, mask=is_row, other=0.0)
            scale = tl.load(scales + output, mask=is_output, other=0.0)
            product = product * row_scale[None, :] * scale[:, None]
        if bias is not None:
            own = tl.load(bias + output, mask=is_output, other=0.0)
            product += own.to(tl.float32)[:, None]
        place = out + row.to(tl.int64)[None, :] * outputs + output[:, None]
        is_place = is_output[:, None] & is_row[None, :]
        if adds:
            product += tl.load(place, mask=is_place, other=0.0).to(tl.float32)
        tl.store(place, product.to(out.dtype.element_ty), mask=is_place)
