"""Packed weights of a mixture on a GPU: the same products of all experts, side by side."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from services.engine.model.architecture.activation import Activation
from services.engine.model.operators.expert_kernels import Blocks, activate
from services.engine.model.operators.packed_kernels import expert_tiles
from services.engine.model.operators.packed_products import sum_tiles
from services.engine.model.operators.packed_weights import TILE, PackedWeight, StoredCodes

__all__ = ["PackedExperts"]

_ORDERED_COLUMNS = 128
"""Columns of a block of rows that a program orders"""


@dataclass(frozen=True, slots=True)
class PackedExperts:
    """The same products of all experts, in one form."""

    weight: PackedWeight
    """A stack of the experts' weights, each with the outputs of all products"""
    bias: Tensor | None
    """[experts, outputs of all products]"""
    columns: Tensor | None
    """int32 [experts, inputs], the input of each column of codes; None = in order"""

    @staticmethod
    def of(
        weights: Sequence[Sequence[StoredCodes]],
        biases: Sequence[Tensor | None],
        dtype: torch.dtype,
        device: torch.device,
    ) -> "PackedExperts":
        """Pack the products of each expert, all of one form. An expert's have one order of inputs.

        biases: of all products of each expert; dtype: that of activations.
        """
        stack = PackedWeight.stack(weights[0], len(weights), dtype, device)
        for number, products in enumerate(weights):
            stack.part(number).put(products)
        held = [bias for bias in biases if bias is not None]
        bias = torch.stack(held).to(device, dtype) if held else None
        return PackedExperts(stack, bias, _columns(weights, device))

    @property
    def nbytes(self) -> int:
        return self.weight.nbytes

    @property
    def most_rows(self) -> int:
        """Most rows of a block that `multiply` accepts."""
        return expert_tiles(self.weight.form, self.weight.codes.device)[-1].rows

    def multiply(
        self,
        rows: Tensor,
        blocks: Blocks,
        per_row: int,
        activation: Activation | None,
        out: Tensor,
    ) -> None:
        """Write each choice's product with its expert to `out`, as `multiply_experts` does."""
        if self.columns is not None:
            rows, per_row = self._ordered(rows, blocks, per_row), 1
        weight, outputs = self.weight, out.shape[1]
        every = expert_tiles(weight.form, rows.device)
        tile = next(tile for tile in every if tile.rows == blocks.tile.rows)
        inputs = rows.shape[1]
        _multiply_experts[(blocks.limit, triton.cdiv(outputs, tile.outputs))](
            out,
            rows,
            weight.codes,
            weight.numbers,
            None if weight.values is None else weight.values.terms,
            self.bias,
            blocks.order,
            blocks.experts,
            blocks.count,
            blocks.choices,
            inputs,
            outputs,
            weight.codes.shape[1],
            weight.codes.stride(0),
            weight.numbers.stride(0),
            per_row=per_row,
            nonlinearity=None if activation is None else activation.nonlinearity.value,
            alpha=0.0 if activation is None else activation.alpha,
            limit=0.0 if activation is None else activation.limit,
            whole=inputs % TILE == 0,
            form=weight.form,
            terms=0 if weight.values is None else weight.values.num_terms,
            tile=tile,
            num_warps=tile.warps,
            num_stages=tile.stages,
        )

    def _ordered(self, rows: Tensor, blocks: Blocks, per_row: int) -> Tensor:
        """Return each choice's row, its inputs in the order of its expert's columns."""
        inputs = rows.shape[1]
        out = rows.new_empty((blocks.choices, inputs))
        _order_inputs[(blocks.limit, triton.cdiv(inputs, _ORDERED_COLUMNS))](
            out,
            rows,
            self.columns,
            blocks.order,
            blocks.experts,
            blocks.count,
            blocks.choices,
            inputs,
            per_row=per_row,
            tile_rows=blocks.tile.rows,
            tile_columns=_ORDERED_COLUMNS,
        )
        return out


def _columns(weights: Sequence[Sequence[StoredCodes]], device: torch.device) -> Tensor | None:
    """Return the inputs of the columns of each expert; None if all are in order."""
    orders = [products[0].weight.order for products in weights]
    if all(order is None for order in orders):
        return None
    whole = torch.arange(weights[0][0].shape[1])
    columns = [whole if order is None else order.argsort() for order in orders]
    return torch.stack(columns).to(device, torch.int32)


@triton.jit(  # type: ignore[untyped-decorator]
    do_not_specialize=["order", "block_experts", "block_count", "choices"]
)
def _order_inputs(
    out: tl.tensor,
    rows: tl.tensor,
    columns: tl.tensor,
    order: tl.tensor,
    block_experts: tl.tensor,
    block_count: tl.tensor,
    choices: tl.tensor,
    inputs: tl.tensor,
    per_row: tl.constexpr,
    tile_rows: tl.constexpr,
    tile_columns: tl.constexpr,
) -> None:
    """Copy some columns of a block of rows, each from the input that its expert's codes state."""
    block = tl.program_id(0)
    if block < tl.load(block_count):
        choice = tl.load(order + block * tile_rows + tl.arange(0, tile_rows))
        column = tl.program_id(1) * tile_columns + tl.arange(0, tile_columns)
        is_column = column < inputs
        expert = tl.load(block_experts + block).to(tl.int64)
        source = tl.load(columns + expert * inputs + column, mask=is_column, other=0)
        is_cell = (choice < choices)[:, None] & is_column[None, :]
        places = rows + (choice // per_row).to(tl.int64)[:, None] * inputs + source[None, :]
        targets = out + choice.to(tl.int64)[:, None] * inputs + column[None, :]
        tl.store(targets, tl.load(places, mask=is_cell, other=0.0), mask=is_cell)


@triton.jit(  # type: ignore[untyped-decorator]
    do_not_specialize=["order", "block_experts", "block_count", "choices", "tiles"]
)
def _multiply_experts(
    out: tl.tensor,
    rows: tl.tensor,
    codes: tl.tensor,
    numbers: tl.tensor,
    values: tl.tensor,
    biases: tl.tensor,
    order: tl.tensor,
    block_experts: tl.tensor,
    block_count: tl.tensor,
    choices: tl.tensor,
    inputs: tl.tensor,
    outputs: tl.tensor,
    tiles: tl.tensor,
    code_stride: tl.tensor,
    number_stride: tl.tensor,
    per_row: tl.constexpr,
    nonlinearity: tl.constexpr,
    alpha: tl.constexpr,
    limit: tl.constexpr,
    whole: tl.constexpr,
    form: tl.constexpr,
    terms: tl.constexpr,
    tile: tl.constexpr,
) -> None:
    """Multiply a block of rows with some outputs of its expert, of one product or of two."""
    products: tl.constexpr = 1 if nonlinearity is None else 2
    block = tl.program_id(0)
    if block < tl.load(block_count):
        choice = tl.load(order + block * tile.rows + tl.arange(0, tile.rows))
        is_choice = choice < choices
        expert = tl.load(block_experts + block).to(tl.int64)
        output = tl.program_id(1) * tile.outputs + tl.arange(0, tile.outputs)
        is_output = output < outputs
        stored = tl.minimum(output, outputs - 1)
        places = rows + (choice // per_row).to(tl.int64) * inputs
        own_codes = codes + expert * code_stride
        own_numbers = numbers + expert * number_stride
        product = sum_tiles(
            places,
            is_choice,
            own_codes,
            own_numbers,
            values,
            stored,
            0,
            tiles,
            inputs,
            products * outputs,
            whole,
            form,
            terms,
            tile,
        )
        bias = biases
        if biases is not None:
            bias = biases + expert * products * outputs + output
            product += tl.load(bias, mask=is_output, other=0.0).to(tl.float32)[:, None]
        if products == 2:
            second = sum_tiles(
                places,
                is_choice,
                own_codes,
                own_numbers,
                values,
                stored + outputs,
                0,
                tiles,
                inputs,
                products * outputs,
                whole,
                form,
                terms,
                tile,
            )
            if biases is not None:
                addend = tl.load(bias + outputs, mask=is_output, other=0.0)
                second += addend.to(tl.float32)[:, None]
            product = activate(product, second, nonlinearity, alpha, limit)
        target = out + choice.to(tl.int64)[None, :] * outputs + output[:, None]
        is_target = is_choice[None, :] & is_output[:, None]
        tl.store(target, product.to(out.dtype.element_ty), mask=is_target)
