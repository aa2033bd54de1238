"""Operators of a GPU that multiplies FP8."""

from collections.abc import Iterable

import torch
from torch import Tensor

from services.engine.model.architecture.activation import Activation
from services.engine.model.operators.fp8_kernels import (
    multiply_groups,
    multiply_row,
    round_groups,
    round_rows,
)
from services.engine.model.operators.fp8_weights import Fp8Rounding, Fp8Weight
from services.engine.model.operators.grouped_mixture import GroupedMixture
from services.engine.model.operators.interface import ExpertWeights, Mixture, Operators, Projection
from services.engine.model.operators.triton_operators import TritonOperators

__all__ = ["Fp8Operators"]

_MULTIPLE = 16
"""Number that must divide both widths of a product in FP8"""


class Fp8Operators(TritonOperators):
    """TritonOperators with weights in FP8, half the bytes of bfloat16.

    Products of several rows round these to FP8, too, with a scale for each row or group. A single
    row is not rounded, and neither are the rows of experts.
    """

    def __init__(self, dtype: torch.dtype, device: torch.device, rounding: Fp8Rounding) -> None:
        super().__init__(dtype, device)
        self._rounding = rounding
        self.groups_experts = True

    def projection(self, weight: Tensor, bias: Tensor | None) -> Projection:
        if any(width % _MULTIPLE for width in weight.shape):
            return super().projection(weight, bias)
        rounded = self._rounding.round(weight.to(self._device))
        own_bias = None if bias is None else self._own(bias)
        if self._rounding.group is None:
            return _RowScaledProjection(rounded, own_bias)
        return _GroupScaledProjection(rounded, own_bias, self._rounding.group)

    def exact_projection(self, weight: Tensor, bias: Tensor | None) -> Projection:
        return super().projection(weight, bias)

    def mixture(
        self, experts: Iterable[ExpertWeights], count: int, per_row: int, activation: Activation
    ) -> Mixture:
        if not activation.gated:
            return super().mixture(experts, count, per_row, activation)
        return GroupedMixture(
            experts, count, per_row, activation, self._dtype, self._device, self._rounding
        )

    def without_fp8(self) -> Operators:
        return TritonOperators(self._dtype, self._device)


class _ScaledProjection(Projection):
    """A projection that owns an FP8 weight."""

    def __init__(self, weight: Fp8Weight, bias: Tensor | None) -> None:
        self.weight = weight
        self._bias = bias
        self.weight_bytes = weight.numbers.nbytes + weight.scales.nbytes


class _RowScaledProjection(_ScaledProjection):
    """A product with a scale for each row and each output, by torch."""

    def into(self, rows: Tensor, out: Tensor) -> None:
        if len(rows) == 1:
            multiply_row(rows, self.weight, self._bias, rows.shape[1], out, adds=False)
        elif out.dtype == rows.dtype:
            self._multiply(rows, out)
        else:
            out.copy_(self._product(rows, out))

    def add_to(self, rows: Tensor, out: Tensor) -> None:
        if len(rows) == 1:
            multiply_row(rows, self.weight, self._bias, rows.shape[1], out, adds=True)
        else:
            out += self._product(rows, out)

    def _product(self, rows: Tensor, out: Tensor) -> Tensor:
        product = torch.empty_like(out, dtype=rows.dtype)
        self._multiply(rows, product)
        return product

    def _multiply(self, rows: Tensor, out: Tensor) -> None:
        numbers, scales = round_rows(rows)
        torch._scaled_mm(
            numbers,
            self.weight.numbers.T,
            scale_a=scales,
            scale_b=self.weight.scales,
            bias=self._bias,
            out_dtype=out.dtype,
            use_fast_accum=True,
            out=out,
        )


class _GroupScaledProjection(_ScaledProjection):
    """A product with a scale for each group of inputs of a row and of an output."""

    def __init__(self, weight: Fp8Weight, bias: Tensor | None, group: int) -> None:
        super().__init__(weight, bias)
        self._group = group

    def into(self, rows: Tensor, out: Tensor) -> None:
        self._multiply(rows, out, adds=False)

    def add_to(self, rows: Tensor, out: Tensor) -> None:
        self._multiply(rows, out, adds=True)

    def _multiply(self, rows: Tensor, out: Tensor, *, adds: bool) -> None:
        if len(rows) == 1:
            multiply_row(rows, self.weight, self._bias, self._group, out, adds=adds)
        else:
            rounded = round_groups(rows, self._group)
            multiply_groups(rounded, self.weight, self._bias, self._group, out, adds=adds)
