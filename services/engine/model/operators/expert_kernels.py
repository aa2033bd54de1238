"""Mixtures of experts on a GPU: grouped products in Triton, whose launches depend on no content.

Rows are sorted by expert into blocks, as in MegaBlocks (Gale et al. 2022, arXiv:2211.15841): all
rows of a block belong to one expert.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import chain

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn.functional import pad

from services.engine.model.architecture.activation import Activation
from services.engine.model.checkpoint.mxfp4 import GROUP_SIZE, Mxfp4Weight
from services.engine.model.checkpoint.quantized import QuantizedWeight, Weight
from services.engine.model.operators.deltas import Delta, ExpertDeltas
from services.engine.model.operators.fp8_weights import FP8, Fp8Rounding
from services.engine.model.operators.interface import ExpertWeights, Mixture

__all__ = ["GroupedMixture", "choose_experts"]

_CHUNK = 1024
"""Choices that a program of the sorting kernels reads at a time"""
_PACKED = 2 * GROUP_SIZE
"""Inputs that _pack arranges together, and that a program multiplies at a time"""
_COLUMNS = 1024
"""Columns that a program of the summing kernel adds"""


@dataclass(frozen=True, slots=True)
class _Tile:
    """The tile that one program multiplies at a time, and its schedule.

    A run on a GPU tunes these figures.
    """

    rows: int
    outputs: int
    """Outputs of all its products together"""
    inputs: int
    """Inputs of a step, but for MXFP4"""
    warps: int
    stages: int
    """Depth of the pipeline that loads rows and weights"""


_TILES = (
    _Tile(rows=16, outputs=128, inputs=64, warps=4, stages=4),
    _Tile(rows=32, outputs=128, inputs=64, warps=4, stages=4),
    _Tile(rows=64, outputs=128, inputs=64, warps=4, stages=3),
    _Tile(rows=128, outputs=128, inputs=64, warps=8, stages=3),
)


def _choose_tile(choices: int, experts: int) -> _Tile:
    """Return the tile whose rows the average expert fills, else the largest."""
    average = choices // experts
    return next((tile for tile in _TILES if tile.rows >= average), _TILES[-1])


@dataclass(frozen=True, slots=True)
class _Blocks:
    """Choices in the order of their experts, in blocks of `tile.rows`. A choice is row * k + j."""

    tile: _Tile
    order: Tensor
    """int32 [limit * tile.rows], the choices of each block; their count where there is none"""
    experts: Tensor
    """int32 [limit], the expert of each block"""
    count: Tensor
    """int32 [1], blocks that there are; all others are left uninitialised"""
    limit: int
    """Upper bound of the blocks"""
    choices: int


@dataclass(frozen=True, slots=True)
class _Weights:
    """The same products of all experts."""

    weight: Tensor
    """[experts, products * outputs, inputs]; uint8 as _pack returns it for MXFP4"""
    scales: Tensor | None
    """[experts, groups, products * outputs]: exponents of 2 plus 127 in uint8 for MXFP4, float32
    for FP8; None: there are none"""
    bias: Tensor | None
    """[experts, products * outputs]"""
    rounding: Fp8Rounding | None
    """Rounding to FP8 of weights that are not MXFP4"""

    @staticmethod
    def allocate(
        weights: Sequence[Tensor | Mxfp4Weight],
        bias: Tensor | None,
        count: int,
        dtype: torch.dtype,
        device: torch.device,
        rounding: Fp8Rounding | None,
    ) -> "_Weights":
        """Allocate space for `count` experts like the one with these products."""
        first = weights[0]
        outputs, inputs = sum(weight.shape[0] for weight in weights), first.shape[1]
        weight_dtype, scales = dtype, None
        if isinstance(first, Mxfp4Weight):
            chunks = triton.cdiv(inputs, _PACKED)
            weight_dtype, inputs = torch.uint8, chunks * _PACKED // 2
            groups = chunks * _PACKED // GROUP_SIZE
            scales = torch.empty((count, groups, outputs), dtype=torch.uint8, device=device)
        elif rounding is not None:
            weight_dtype, groups = FP8, triton.cdiv(inputs, rounding.group_inputs(inputs))
            scales = torch.empty((count, groups, outputs), dtype=torch.float32, device=device)
        return _Weights(
            torch.empty((count, outputs, inputs), dtype=weight_dtype, device=device),
            scales,
            None if bias is None else torch.empty((count, outputs), dtype=dtype, device=device),
            rounding,
        )

    def put(
        self,
        number: int,
        weights: Sequence[Tensor | Mxfp4Weight],
        biases: Sequence[Tensor | None],
    ) -> None:
        """Copy one expert's products."""
        first = 0
        for weight, bias in zip(weights, biases, strict=True):
            part = slice(first, first + weight.shape[0])
            numbers, scales = self._converted(weight)
            self.weight[number, part] = numbers
            if self.scales is not None and scales is not None:
                self.scales[number, :, part] = scales
            if self.bias is not None and bias is not None:
                self.bias[number, part] = bias.to(self.bias.device, self.bias.dtype)
            first = part.stop

    def _converted(self, weight: Tensor | Mxfp4Weight) -> tuple[Tensor, Tensor | None]:
        """Return numbers [outputs, inputs] and scales [groups, outputs] as they are stored."""
        device = self.weight.device
        if not isinstance(weight, Tensor):
            return _pack(weight, device)
        if self.rounding is None:
            return weight.to(device, self.weight.dtype), None
        rounded = self.rounding.round(weight.to(device))
        return rounded.numbers, rounded.scales

    @property
    def fp8_groups(self) -> int:
        """FP8 scales of an output; 0: the weights are not FP8."""
        return self.scales.shape[1] if self.scales is not None and self.weight.dtype == FP8 else 0

    @property
    def group_inputs(self) -> int:
        """Inputs that share an FP8 scale."""
        inputs = self.weight.shape[2]
        return inputs if self.rounding is None else self.rounding.group_inputs(inputs)

    @property
    def nbytes(self) -> int:
        return self.weight.nbytes + (0 if self.scales is None else self.scales.nbytes)


def _pack(weight: Mxfp4Weight, device: torch.device) -> tuple[Tensor, Tensor]:
    """Arrange MXFP4 for the kernel, whose loads are then contiguous.

    A byte of the result [outputs, inputs / 2] holds an input of one group and the same of the next.
    The scales become [groups, outputs]. Inputs are padded to pairs of groups with zeros.
    """
    blocks, scales = weight.blocks.to(device), weight.scales.to(device)
    outputs, groups = scales.shape
    codes = torch.stack((blocks & 15, blocks >> 4), dim=3).flatten(1)
    codes = pad(codes, (0, -groups * GROUP_SIZE % _PACKED)).view(outputs, -1, 2, GROUP_SIZE)
    packed = (codes[:, :, 0] | codes[:, :, 1] << 4).flatten(1)
    return packed, pad(scales, (0, groups % 2)).T


class GroupedMixture(Mixture):
    """Experts in one product per half, without a word to the host. float16 and bfloat16.

    Encoded weights are decoded in registers; rows keep their dtype.
    """

    def __init__(
        self,
        experts: Iterable[ExpertWeights],
        count: int,
        per_row: int,
        activation: Activation,
        dtype: torch.dtype,
        device: torch.device,
        rounding: Fp8Rounding | None = None,
    ) -> None:
        """Copy the weights to the device, an expert at a time, and compile the kernels.

        per_row: experts that the router chooses for a row. rounding: to FP8, of weights that are
        not MXFP4; None: they get `dtype`.
        """
        first, rest = _first(experts)
        inputs, outputs = first.gate.shape[1], first.down.shape[0]
        self._gate = _Weights.allocate(
            _plain(first.gate, first.up), first.gate_bias, count, dtype, device, rounding
        )
        self._down = _Weights.allocate(
            _plain(first.down), first.down_bias, count, dtype, device, rounding
        )
        for number, each in enumerate(rest):
            self._gate.put(number, _plain(each.gate, each.up), (each.gate_bias, each.up_bias))
            self._down.put(number, _plain(each.down), (each.down_bias,))
        self.weight_bytes = self._gate.nbytes + self._down.nbytes
        self._width = first.gate.shape[0]
        self._activation = activation
        self._count = count
        self._deltas: ExpertDeltas | None = None
        row, out = (
            torch.zeros((1, width), dtype=dtype, device=device) for width in (inputs, outputs)
        )
        chosen = torch.arange(per_row, device=device)[None]
        # Else the first step of some size would wait for the compiler.
        for tile in _TILES:
            self._add_to(row, chosen, chosen.float(), out, tile)

    def adapt(self, deltas: ExpertDeltas) -> None:
        self._deltas = deltas

    def add_to(self, rows: Tensor, chosen: Tensor, factors: Tensor, out: Tensor) -> None:
        tile = _choose_tile(chosen.numel(), self._count)
        self._add_to(rows, chosen, factors, out, tile)

    def _add_to(
        self, rows: Tensor, chosen: Tensor, factors: Tensor, out: Tensor, tile: _Tile
    ) -> None:
        choices, per_row = chosen.numel(), chosen.shape[1]
        outputs = out.shape[1]
        blocks = _sort(chosen, self._count, tile)
        deltas = self._deltas if self._deltas is not None and self._deltas.is_active else None
        products = rows.new_empty((choices, outputs))
        if deltas is None:
            hidden = rows.new_empty((choices, self._width))
            _multiply_all(rows, self._gate, blocks, per_row, self._activation, hidden)
        else:
            both = rows.new_empty((choices, 2 * self._width))
            _multiply_all(rows, self._gate, blocks, per_row, None, both)
            _adapt(deltas, deltas.gates, rows, chosen, both)
            hidden = self._activation.apply(both)
        _multiply_all(hidden, self._down, blocks, 1, None, products)
        if deltas is not None:
            _adapt(deltas, deltas.downs, hidden, chosen, products)
        if self.returns_rows:
            has_weights = chosen[..., None] < self._count
            own = products.view(*chosen.shape, outputs)
            products = torch.where(has_weights, own, rows[:, None])
        _add_sums[(len(rows), triton.cdiv(outputs, _COLUMNS))](
            out, products, factors, per_row=per_row, outputs=outputs, tile=_COLUMNS
        )


def _adapt(
    deltas: ExpertDeltas, parts: Sequence[Delta], rows: Tensor, chosen: Tensor, out: Tensor
) -> None:
    """Add to each choice's product what its row's adapter adds to its expert.

    The host waits for the choices: steps with adapters run without CUDA graphs anyway. parts: one
    for each expert; rows: of the step, or of its choices; out: [choices, outputs].
    """
    per_row, flat = chosen.shape[1], chosen.flatten()
    for number in sorted(set(flat.tolist())):
        if number >= len(parts):
            break  # experts without weights
        choices = torch.where(flat == number)[0]
        with deltas.routed(choices // per_row):
            if parts[number].is_active:
                product = out[choices]
                parts[number].add_to(rows[choices * len(rows) // len(out)], product)
                out[choices] = product


def choose_experts(scores: Tensor, per_row: int, *, normalized: bool) -> tuple[Tensor, Tensor]:
    """Return what Operators.choose does. Experts of a row that has NaN have NaN as factors."""
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


def _first(experts: Iterable[ExpertWeights]) -> tuple[ExpertWeights, Iterable[ExpertWeights]]:
    """Return the first expert, and all of them."""
    iterator = iter(experts)
    first = next(iterator)
    return first, chain((first,), iterator)


def _sort(chosen: Tensor, experts: int, tile: _Tile) -> _Blocks:
    """Sort the choices by their experts; those of an expert stay in their order."""
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
    return _Blocks(tile, order, numbers, count, limit, choices)


def _multiply_all(
    rows: Tensor,
    weights: _Weights,
    blocks: _Blocks,
    per_row: int,
    activation: Activation | None,
    out: Tensor,
) -> None:
    """Write each choice's product with its expert to `out` [choices, outputs].

    rows: [choices / per_row, inputs]. activation: joins two products into one; None: there is one.
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
        tile_inputs=_PACKED if weights.weight.dtype == torch.uint8 else tile.inputs,
        num_warps=tile.warps,
        num_stages=tile.stages,
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
    # Above minus infinity, so that a row of NaN has experts, too, and no expert twice.
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
            product = _activate(product, second, nonlinearity, alpha, limit)
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
def _activate(
    gate: tl.tensor,
    up: tl.tensor,
    nonlinearity: tl.constexpr,
    alpha: tl.constexpr,
    limit: tl.constexpr,
) -> tl.tensor:
    """Return what Activation.apply does for one of the values of Nonlinearity."""
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


def _plain(*weights: Weight | None) -> list[Tensor | Mxfp4Weight]:
    """Decode what no kernel here reads, and leave out what is None."""
    found = (each for each in weights if each is not None)
    return [each.decode() if isinstance(each, QuantizedWeight) else each for each in found]
