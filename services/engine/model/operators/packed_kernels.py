"""Triton kernels of a packed weight: its product with a few rows, and its decoding for many."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from services.engine.model.operators.packed_products import decoded_block, sum_tiles
from services.engine.model.operators.packed_weights import TILE, PackedForm, PackedWeight

__all__ = ["MOST_ROWS", "Tile", "arrivals_of", "decode", "multiply", "tiles_of"]

MOST_ROWS = 256
"""Most rows that are multiplied from codes; for more, decoding first takes less time"""
_LEAST_TILES = 4
"""Fewest tiles of an output that a program multiplies, so that loading ahead pays off"""
_PROGRAMS = 4
"""Number of programs that a multiprocessor runs side by side"""
_INTERPRETED_PROCESSORS = 4
"""Number of multiprocessors that Triton's interpreter stands for"""
_DECODED_OUTPUTS = 32
"""Outputs of a tile that a program of `decode` decodes"""


@dataclass(frozen=True, slots=True)
class Tile:
    """Rows and outputs that one program multiplies, and its schedule. A run on a GPU tunes it."""

    rows: int
    outputs: int
    warps: int
    """With 4 or more of them, a program takes the products of Hopper's groups of warps"""
    stages: int
    """Depth of the pipeline that loads codes and rows"""


_FEW_ROWS = (
    Tile(rows=8, outputs=64, warps=2, stages=4),
    Tile(rows=16, outputs=64, warps=2, stages=3),
)
_TILES = (*_FEW_ROWS, Tile(rows=32, outputs=64, warps=2, stages=2))
_LARGE_TILES = (
    *_FEW_ROWS,
    Tile(rows=32, outputs=128, warps=8, stages=2),
    Tile(rows=64, outputs=128, warps=8, stages=2),
)
"""Tiles for GPUs whose registers and tensor cores suit them"""
_WITH_LARGE_TILES = ((8, 0), (9, 0))
"""Compute capabilities of these GPUs"""
_VALUE_TILES = (
    Tile(rows=8, outputs=32, warps=2, stages=1),
    Tile(rows=16, outputs=32, warps=2, stages=1),
    Tile(rows=32, outputs=64, warps=4, stages=1),
)
"""Tiles for codes whose numbers are looked up"""


def tiles_of(form: PackedForm, device: torch.device) -> Sequence[Tile]:
    """Return the tiles for weights of a form, in the order of their rows."""
    if form.values:
        return _VALUE_TILES
    return _LARGE_TILES if _capability(device) in _WITH_LARGE_TILES else _TILES


def arrivals_of(weight: PackedWeight) -> int:
    """Return the number of `arrivals` that products with a weight need."""
    tiles = tiles_of(weight.form, weight.codes.device)
    least = min(tile.outputs for tile in tiles)
    return -(-MOST_ROWS // tiles[-1].rows) * -(-weight.outputs // least)


def multiply(
    rows: Tensor,
    weight: PackedWeight,
    bias: Tensor | None,
    arrivals: Tensor,
    out: Tensor,
    *,
    adds: bool,
) -> None:
    """Write rows @ weight.T + bias to `out` [n, outputs], or add it; n is at most `MOST_ROWS`.

    How an output's inputs are divided for summing depends on the weight's shape alone. arrivals:
    int32 zeros, as many as `arrivals_of` says, which are zeros again afterwards. The rows of `out`
    may have gaps.
    """
    count, inputs = rows.shape
    outputs, tiles = weight.outputs, weight.codes.shape[0]
    every = tiles_of(weight.form, rows.device)
    tile = next((tile for tile in every if tile.rows >= count), every[-1])
    row_tiles, output_tiles = triton.cdiv(count, tile.rows), triton.cdiv(outputs, tile.outputs)
    parts, partials = _parts(outputs, tiles, rows.device), None
    if parts > 1:
        size = parts * row_tiles * output_tiles * tile.rows * tile.outputs
        partials = torch.empty(size, dtype=torch.float32, device=rows.device)
    # Programs that read the same codes follow each other.
    _multiply[(row_tiles, output_tiles, parts)](
        out,
        rows,
        weight.codes,
        weight.numbers,
        None if weight.values is None else weight.values.terms,
        bias,
        partials,
        arrivals,
        count,
        inputs,
        outputs,
        out.stride(0),
        tiles,
        parts,
        adds=adds,
        whole=inputs % TILE == 0,
        form=weight.form,
        terms=0 if weight.values is None else weight.values.num_terms,
        tile=tile,
        num_warps=tile.warps,
        num_stages=tile.stages,
    )


def decode(weight: PackedWeight, first: int, out: Tensor) -> None:
    """Write the weights of the outputs from `first` on to `out` [outputs, inputs], rounded."""
    outputs, inputs = out.shape
    tiles = weight.codes.shape[0]
    _decode[(tiles, triton.cdiv(outputs, _DECODED_OUTPUTS))](
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


def _parts(outputs: int, tiles: int, device: torch.device) -> int:
    """Return the number of programs among which the inputs of an output are divided."""
    wanted = _PROGRAMS * _processors(device)
    programs = triton.cdiv(outputs, _FEW_ROWS[0].outputs)
    parts = 1
    while 2 * parts * programs <= wanted and tiles // (2 * parts) >= _LEAST_TILES:
        parts *= 2
    return parts


def _capability(device: torch.device) -> tuple[int, int]:
    """Return the compute capability; Triton's interpreter stands for a Hopper."""
    return torch.cuda.get_device_capability(device) if device.type == "cuda" else (9, 0)


def _processors(device: torch.device) -> int:
    if device.type != "cuda":
        return _INTERPRETED_PROCESSORS
    return torch.cuda.get_device_properties(device).multi_processor_count


@triton.jit(  # type: ignore[untyped-decorator]
    do_not_specialize=["count", "tiles", "parts", "out_stride"]
)
def _multiply(
    out: tl.tensor,
    rows: tl.tensor,
    codes: tl.tensor,
    numbers: tl.tensor,
    values: tl.tensor,
    bias: tl.tensor,
    partials: tl.tensor,
    arrivals: tl.tensor,
    count: tl.tensor,
    inputs: tl.tensor,
    outputs: tl.tensor,
    out_stride: tl.tensor,
    tiles: tl.tensor,
    parts: tl.tensor,
    adds: tl.constexpr,
    whole: tl.constexpr,
    form: tl.constexpr,
    terms: tl.constexpr,
    tile: tl.constexpr,
) -> None:
    """Multiply some rows with a part of the inputs of some outputs; the last program adds parts."""
    row = tl.program_id(0) * tile.rows + tl.arange(0, tile.rows)
    output = tl.program_id(1) * tile.outputs + tl.arange(0, tile.outputs)
    is_row, is_output = row < count, output < outputs
    first = tl.program_id(2) * tl.cdiv(tiles, parts)
    product = sum_tiles(
        rows + row.to(tl.int64) * inputs,
        is_row,
        codes,
        numbers,
        values,
        tl.minimum(output, outputs - 1),
        first,
        tl.minimum(first + tl.cdiv(tiles, parts), tiles),
        inputs,
        outputs,
        whole,
        form,
        terms,
        tile,
    )
    is_last = True
    if partials is not None:
        number = tl.program_id(1) * tl.num_programs(0) + tl.program_id(0)
        size: tl.constexpr = tile.rows * tile.outputs
        place = tl.arange(0, tile.outputs)[:, None] * tile.rows + tl.arange(0, tile.rows)[None, :]
        own = partials + number * parts * size + place
        tl.store(own + tl.program_id(2) * size, product)
        tl.debug_barrier()  # all warps have stored their numbers
        is_last = tl.atomic_add(arrivals + number, 1, sem="acq_rel") == parts - 1
        if is_last:
            tl.store(arrivals + number, 0)
            product = tl.zeros((tile.outputs, tile.rows), tl.float32)
            for part in range(parts):
                product += tl.load(own + part * size, cache_modifier=".cg")
    if is_last:
        if bias is not None:
            product += tl.load(bias + output, mask=is_output, other=0.0).to(tl.float32)[:, None]
        target = out + row.to(tl.int64)[None, :] * out_stride + output[:, None]
        is_target = is_row[None, :] & is_output[:, None]
        if adds:
            product += tl.load(target, mask=is_target, other=0.0).to(tl.float32)
        tl.store(target, product.to(out.dtype.element_ty), mask=is_target)


@triton.jit(do_not_specialize=["first"])  # type: ignore[untyped-decorator]
def _decode(
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
