"""Kernels of experts in Triton: choice, grouped products, and sums.

Launches depend on no content. Rows are sorted by expert into blocks, as in MegaBlocks (Gale et al.
2022, arXiv:2211.15841): all rows of a block belong to one expert.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from services.engine.model.architecture.activation import Activation
from services.engine.model.operators.grouped_weights import PACKED_INPUTS, GroupedWeights

__all__ = [
    "TILES",
    "Blocks",
    "Tile",
    "activate",
    "add_sums",
    "choose_experts",
    "choose_tile",
    "multiply_experts",
    "sort_choices",
]

_CHUNK = 1024
"""Number of choices that a program of the sorting kernels reads at a time"""
_COLUMNS = 1024
"""Number of columns that a program of the summing kernel adds"""


@dataclass(frozen=True, slots=True)
class Tile:
    """The tile that one program multiplies at a time, and its schedule.

    A run on a GPU tunes these figures.
    """

    rows: int
    outputs: int
    """Number of outputs of all products of the tile together"""
    inputs: int
    """Number of inputs multiplied at a time, except in MXFP4"""
    warps: int
    stages: int
    """Depth of the pipeline that loads rows and weights"""


TILES = (
    Tile(rows=16, outputs=128, inputs=64, warps=4, stages=4),
    Tile(rows=32, outputs=128, inputs=64, warps=4, stages=4),
    Tile(rows=64, outputs=128, inputs=64, warps=4, stages=3),
    Tile(rows=128, outputs=128, inputs=64, warps=8, stages=3),
)


def choose_tile(choices: int, experts: int, tiles: Sequence[Tile] = TILES) -> Tile:
    """Return the tile whose rows the average expert fills, else the largest."""
    average = choices // experts
    return next((tile for tile in tiles if tile.rows >= average), tiles[-1])


@dataclass(frozen=True, slots=True)
class Blocks:
    """Choices in the order of their experts, in blocks of `tile.rows`. A choice is row * k + j."""

    tile: Tile
    order: Tensor
    """int32 [limit * tile.rows], the choices of each block; `choices` in places without one"""
    experts: Tensor
    """int32 [limit], the expert of each block"""
    count: Tensor
    """int32 [1], number of blocks in use; the others are uninitialised"""
    limit: int
    """Upper bound of the number of blocks"""
    choices: int


def choose_experts(scores: Tensor, per_row: int, *, normalized: bool) -> tuple[Tensor, Tensor]:
    """Choose experts as `Operators.choose` does. Factors of a row that has NaN are NaN."""
    count, experts = scores.shape
    chosen = torch.empty((count, per_row), dtype=torch.int64, device=scores.device)
    factors = torch.empty((count, per_row), dtype=torch.float32, device=scores.device)
    _choose[(count,)](
        chosen,
        factors,
        scores,
        experts=experts,
        per_row=per_row,
        normalized=normalized,
        padded_experts=triton.next_power_of_2(experts),
        num_warps=1,
    )
    return chosen, factors


def sort_choices(chosen: Tensor, experts: int, tile: Tile) -> Blocks:
    """Sort the choices by their experts, and keep the order of each expert's choices."""
    choices = chosen.numel()
    # An expert with choices has at most one partial block.
    limit = (choices + min(choices, experts) * (tile.rows - 1)) // tile.rows
    integers = torch.empty(
        experts + 1 + limit + limit * tile.rows, dtype=torch.int32, device=chosen.device
    )
    counts, count, numbers, order = integers.split_with_sizes(
        (experts, 1, limit, limit * tile.rows)
    )
    _count_choices[(experts,)](counts, chosen, choices, chunk=_CHUNK)
    _place_choices[(experts,)](
        order,
        numbers,
        count,
        counts,
        chosen,
        choices,
        experts=experts,
        padded_experts=triton.next_power_of_2(experts),
        tile_rows=tile.rows,
        chunk=_CHUNK,
    )
    return Blocks(tile, order, numbers, count, limit, choices)


def multiply_experts(
    rows: Tensor,
    weights: GroupedWeights,
    blocks: Blocks,
    per_row: int,
    activation: Activation | None,
    out: Tensor,
) -> None:
    """Write each choice's product with its expert to `out` [choices, outputs].

    rows: [choices / per_row, inputs]. activation: joins two products; None: there is one product.
    """
    products = 1 if activation is None else 2
    tile, outputs = blocks.tile, out.shape[1]
    tile_outputs = tile.outputs // products
    _multiply[(blocks.limit, triton.cdiv(outputs, tile_outputs))](
        out,
        rows,
        weights.weight,
        weights.scales,
        weights.bias,
        blocks.order,
        blocks.experts,
        blocks.count,
        blocks.choices,
        per_row=per_row,
        inputs=rows.shape[1],
        outputs=outputs,
        nonlinearity=None if activation is None else activation.nonlinearity.value,
        alpha=0.0 if activation is None else activation.alpha,
        limit=0.0 if activation is None else activation.limit,
        tile_rows=tile.rows,
        tile_outputs=tile_outputs,
        groups=weights.fp8_groups,
        group_inputs=weights.group_inputs,
        tile_inputs=PACKED_INPUTS if weights.weight.dtype == torch.uint8 else tile.inputs,
        num_warps=tile.warps,
        num_stages=tile.stages,
    )


def add_sums(products: Tensor, factors: Tensor, out: Tensor) -> None:
    """Add to `out` [n, outputs] each row's products, times their factors.

    products: [n, k, outputs] or [n * k, outputs]; factors: float32 [n, k].
    """
    (rows, per_row), outputs = factors.shape, out.shape[1]
    _add_sums[(rows, triton.cdiv(outputs, _COLUMNS))](
        out, products, factors, per_row=per_row, outputs=outputs, tile=_COLUMNS
    )


@triton.jit  # type: ignore[untyped-decorator]
def _choose(
    chosen: tl.tensor,
    factors: tl.tensor,
    scores: tl.tensor,
    experts: tl.constexpr,
    per_row: tl.constexpr,
    normalized: tl.constexpr,
    padded_experts: tl.constexpr,
) -> None:
    """Choose one row's experts, of equal ones the first."""
    row = tl.program_id(0).to(tl.int64)
    number = tl.arange(0, padded_experts)
    is_expert = number < experts
    score = tl.load(scores + row * experts + number, mask=is_expert, other=float("-inf"))
    factor = tl.exp(score - tl.max(score, axis=0))
    factor = factor / tl.sum(factor, axis=0)
    # This is above minus infinity, so that a row of NaN has experts too, and no expert twice.
    left = tl.where(score > -3e38, score, -3e38)
    left = tl.where(is_expert, left, float("-inf"))
    ordinal = tl.zeros((padded_experts,), tl.int32) + per_row
    for choice in tl.static_range(per_row):
        is_best = left == tl.max(left, axis=0)
        best = tl.min(tl.where(is_best, number, padded_experts), axis=0)
        ordinal = tl.where(number == best, choice, ordinal)
        left = tl.where(number == best, float("-inf"), left)
    is_chosen = ordinal < per_row
    if normalized:
        factor = factor / tl.sum(tl.where(is_chosen, factor, 0.0), axis=0)
    tl.store(factors + row * per_row + ordinal, factor, mask=is_chosen)
    tl.store(chosen + row * per_row + ordinal, number.to(tl.int64), mask=is_chosen)


@triton.jit(do_not_specialize=["choices"])  # type: ignore[untyped-decorator]
def _count_choices(
    counts: tl.tensor, chosen: tl.tensor, choices: tl.tensor, chunk: tl.constexpr
) -> None:
    """Count one expert's choices."""
    expert = tl.program_id(0)
    found = tl.zeros((chunk,), tl.int32)
    for first in range(0, choices, chunk):
        index = first + tl.arange(0, chunk)
        found += (tl.load(chosen + index, mask=index < choices, other=-1) == expert).to(tl.int32)
    tl.store(counts + expert, tl.sum(found, axis=0))


# Parts of one buffer begin at any multiple of 4 bytes: without alignment in its key, a kernel is
# compiled once and not again in the middle of a run.
@triton.jit(  # type: ignore[untyped-decorator]
    do_not_specialize=["order", "block_experts", "block_count", "choices"]
)
def _place_choices(
    order: tl.tensor,
    block_experts: tl.tensor,
    block_count: tl.tensor,
    counts: tl.tensor,
    chosen: tl.tensor,
    choices: tl.tensor,
    experts: tl.constexpr,
    padded_experts: tl.constexpr,
    tile_rows: tl.constexpr,
    chunk: tl.constexpr,
) -> None:
    """Write one expert's choices to its blocks, which follow those of the experts before it."""
    expert = tl.program_id(0)
    numbers = tl.arange(0, padded_experts)
    counts_of_all = tl.load(counts + numbers, mask=numbers < experts, other=0)
    blocks_of_all = (counts_of_all + tile_rows - 1) // tile_rows
    first_block = tl.sum(tl.where(numbers < expert, blocks_of_all, 0), axis=0)
    blocks = tl.sum(tl.where(numbers == expert, blocks_of_all, 0), axis=0)
    place = order + first_block * tile_rows
    done = tl.full((), 0, tl.int32)
    for first in range(0, choices, chunk):
        index = first + tl.arange(0, chunk)
        is_own = tl.load(chosen + index, mask=index < choices, other=-1) == expert
        ordinal = done + tl.cumsum(is_own.to(tl.int32), axis=0) - 1
        tl.store(place + ordinal, index, mask=is_own)
        done += tl.sum(is_own.to(tl.int32), axis=0)
    unused = done + tl.arange(0, tile_rows)
    none = tl.zeros((tile_rows,), tl.int32) + choices
    tl.store(place + unused, none, mask=unused < blocks * tile_rows)
    for first in range(0, blocks, chunk):
        block = first + tl.arange(0, chunk)
        number = tl.zeros((chunk,), tl.int32) + expert
        tl.store(block_experts + first_block + block, number, mask=block < blocks)
    tl.store(block_count, first_block + blocks, mask=expert == experts - 1)


@triton.jit(  # type: ignore[untyped-decorator]
    do_not_specialize=["order", "block_experts", "block_count", "choices"]
)
def _multiply(
    out: tl.tensor,
    rows: tl.tensor,
    weights: tl.tensor,
    scales: tl.tensor,
    biases: tl.tensor,
    order: tl.tensor,
    block_experts: tl.tensor,
    block_count: tl.tensor,
    choices: tl.tensor,
    per_row: tl.constexpr,
    inputs: tl.constexpr,
    outputs: tl.constexpr,
    nonlinearity: tl.constexpr,
    alpha: tl.constexpr,
    limit: tl.constexpr,
    groups: tl.constexpr,
    group_inputs: tl.constexpr,
    tile_rows: tl.constexpr,
    tile_outputs: tl.constexpr,
    tile_inputs: tl.constexpr,
) -> None:
    """Multiply a block of rows with some outputs of its expert, of one product or of two."""
    products: tl.constexpr = 1 if nonlinearity is None else 2
    block = tl.program_id(0)
    if block < tl.load(block_count):
        choice = tl.load(order + block * tile_rows + tl.arange(0, tile_rows))
        is_choice = choice < choices
        row = (choice // per_row).to(tl.int64)
        expert = tl.load(block_experts + block).to(tl.int64)
        output = tl.program_id(1) * tile_outputs + tl.arange(0, tile_outputs)
        is_output = output < outputs
        first_output = expert * products * outputs
        product = tl.zeros((tile_rows, tile_outputs), tl.float32)
        second = tl.zeros((tile_rows, tile_outputs), tl.float32)
        row_start = rows + row[:, None] * inputs
        stride: tl.constexpr = products * outputs
        if scales is None or groups > 0:
            weight_rows = weights + (first_output + output.to(tl.int64)) * inputs
            if groups > 0:
                factors = scales + expert * (groups * stride) + output
            for first in range(0, inputs, tile_inputs):
                column = first + tl.arange(0, tile_inputs)
                is_column = column < inputs
                is_part = is_choice[:, None] & is_column[None, :]
                part = tl.load(row_start + column[None, :], mask=is_part, other=0.0)
                place = weight_rows[None, :] + column[:, None]
                is_weight = is_output[None, :] & is_column[:, None]
                weight = tl.load(place, mask=is_weight, other=0.0).to(part.dtype)
                if groups > 1:
                    place_of_factor = factors + first // group_inputs * stride
                    factor = tl.load(place_of_factor, mask=is_output, other=0.0)
                    product += tl.dot(part, weight, input_precision="ieee") * factor[None, :]
                else:
                    product = tl.dot(part, weight, product, input_precision="ieee")
                if products == 2:
                    weight = tl.load(place + outputs * inputs, mask=is_weight, other=0.0)
                    weight = weight.to(part.dtype)
                    if groups > 1:
                        factor = tl.load(place_of_factor + outputs, mask=is_output, other=0.0)
                        second += tl.dot(part, weight, input_precision="ieee") * factor[None, :]
                    else:
                        second = tl.dot(part, weight, second, input_precision="ieee")
            if groups == 1:
                product *= tl.load(factors, mask=is_output, other=0.0)[None, :]
                if products == 2:
                    second *= tl.load(factors + outputs, mask=is_output, other=0.0)[None, :]
        else:
            # The inputs of a step are two groups; the lower halves of bytes hold the first.
            group: tl.constexpr = tile_inputs // 2
            row_bytes: tl.constexpr = (inputs + tile_inputs - 1) // tile_inputs * group
            weight_rows = weights + (first_output + output.to(tl.int64)) * row_bytes
            exponents = scales + expert * (row_bytes // group * 2 * stride) + output
            for first in range(0, inputs, tile_inputs):
                column = first + tl.arange(0, group)
                is_part = is_choice[:, None] & (column < inputs)[None, :]
                part = tl.load(row_start + column[None, :], mask=is_part, other=0.0)
                is_next = is_choice[:, None] & (column + group < inputs)[None, :]
                next_part = tl.load(row_start + column[None, :] + group, mask=is_next, other=0.0)
                place = weight_rows[None, :] + (first // 2 + tl.arange(0, group))[:, None]
                codes = tl.load(place, mask=is_output[None, :], other=0)
                exponent = exponents + first // group * stride
                scale = tl.load(exponent, mask=is_output, other=0)
                next_scale = tl.load(exponent + stride, mask=is_output, other=0)
                weight = _decode(codes & 15, scale).to(part.dtype)
                product = tl.dot(part, weight, product, input_precision="ieee")
                weight = _decode(codes >> 4, next_scale).to(part.dtype)
                product = tl.dot(next_part, weight, product, input_precision="ieee")
                if products == 2:
                    codes = tl.load(place + outputs * row_bytes, mask=is_output[None, :], other=0)
                    scale = tl.load(exponent + outputs, mask=is_output, other=0)
                    next_scale = tl.load(exponent + outputs + stride, mask=is_output, other=0)
                    weight = _decode(codes & 15, scale).to(part.dtype)
                    second = tl.dot(part, weight, second, input_precision="ieee")
                    weight = _decode(codes >> 4, next_scale).to(part.dtype)
                    second = tl.dot(next_part, weight, second, input_precision="ieee")
        if biases is not None:
            bias = biases + first_output + output
            product += tl.load(bias, mask=is_output, other=0.0).to(tl.float32)[None, :]
            if products == 2:
                bias_of_second = tl.load(bias + outputs, mask=is_output, other=0.0)
                second += bias_of_second.to(tl.float32)[None, :]
        if products == 2:
            product = activate(product, second, nonlinearity, alpha, limit)
        tl.store(
            out + choice.to(tl.int64)[:, None] * outputs + output[None, :],
            product.to(out.dtype.element_ty),
            mask=is_choice[:, None] & is_output[None, :],
        )


@triton.jit  # type: ignore[untyped-decorator]
def _decode(codes: tl.tensor, scales: tl.tensor) -> tl.tensor:
    """Return float32 numbers of MXFP4 codes [group, outputs] and scales [outputs].

    The three lower bits of a code, as the lowest of a float32's exponent and the highest of its
    mantissa, are the number times 2^-126; 0.5 is then subnormal.
    """
    bits = codes.to(tl.int32)
    numbers = (((bits & 8) << 28) | ((bits & 7) << 22)).to(tl.float32, bitcast=True)
    factors = (scales.to(tl.int32) << 23).to(tl.float32, bitcast=True)
    return numbers * 8.507059173023462e37 * factors[None, :]


@triton.jit  # type: ignore[untyped-decorator]
def activate(
    gate: tl.tensor,
    up: tl.tensor,
    nonlinearity: tl.constexpr,
    alpha: tl.constexpr,
    limit: tl.constexpr,
) -> tl.tensor:
    """Return the result of Activation.apply for one of the values of Nonlinearity."""
    if nonlinearity == "clamped_swiglu":
        gate = tl.minimum(gate, limit)
        up = tl.minimum(tl.maximum(up, -limit), limit)
        activated = gate * tl.sigmoid(alpha * gate) * (up + 1.0)
    elif nonlinearity == "clamped_silu":
        gate = tl.minimum(gate, limit)
        activated = gate * tl.sigmoid(gate) * tl.minimum(tl.maximum(up, -limit), limit)
    elif nonlinearity == "relu2":
        positive = tl.maximum(gate, 0.0)
        activated = positive * positive * up
    elif nonlinearity == "silu":
        activated = gate * tl.sigmoid(gate) * up
    elif nonlinearity == "gelu":
        activated = 0.5 * gate * (1.0 + tl.erf(gate * 0.7071067811865476)) * up
    else:
        inner = 0.7978845608028654 * (gate + 0.044715 * gate * gate * gate)
        activated = gate * tl.sigmoid(2.0 * inner) * up
    return activated


@triton.jit  # type: ignore[untyped-decorator]
def _add_sums(
    out: tl.tensor,
    products: tl.tensor,
    factors: tl.tensor,
    per_row: tl.constexpr,
    outputs: tl.constexpr,
    tile: tl.constexpr,
) -> None:
    """Add a row's products, times their factors, in the order of its choices."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * tile + tl.arange(0, tile)
    is_column = column < outputs
    total = tl.zeros((tile,), tl.float32)
    for choice in range(per_row):
        place = row * per_row + choice
        product = tl.load(products + place * outputs + column, mask=is_column, other=0.0)
        total += tl.load(factors + place) * product.to(tl.float32)
    sums = out + row * outputs + column
    total += tl.load(sums, mask=is_column, other=0.0).to(tl.float32)
    tl.store(sums, total.to(out.dtype.element_ty), mask=is_column)
