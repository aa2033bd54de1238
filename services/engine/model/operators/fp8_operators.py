"""Operators of a GPU that multiplies FP8."""

from collections.abc import Iterable

import torch
from torch import Tensor

from services.engine.model.architecture.activation import Activation
from services.engine.model.operators.fp8_products import TILES, Fp8Matrix, count_parts, multiply
from services.engine.model.operators.fp8_rounding import RoundedRows, round_rows
from services.engine.model.operators.fp8_weights import Fp8Rounding
from services.engine.model.operators.grouped_mixture import GroupedMixture
from services.engine.model.operators.interface import ExpertWeights, Mixture, Operators, Projection
from services.engine.model.operators.triton_operators import TritonOperators

__all__ = ["Fp8Operators"]

_MULTIPLE = 16
"""Number that must divide both widths of a product in FP8"""
_FEW_ROWS = 64
"""Most rows with which our kernel reads weights faster than torch's product does"""
_MULTIPROCESSORS = 132
"""Number of multiprocessors of an H100, for which tests on a CPU compute"""


class Fp8Operators(TritonOperators):
    """TritonOperators with weights in FP8, half the bytes of bfloat16.

    Products round their rows to FP8, too, with a scale for each row or group, by one rule for all
    numbers of rows. The rows of experts are not rounded.
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
        return Fp8Projection(Fp8Matrix.of(rounded, own_bias, self._rounding.group))

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


class Fp8Projection(Projection):
    """A projection that owns an FP8 weight.

    Our kernel multiplies few rows, and all rows if groups of inputs have scales; torch does the
    rest.
    """

    def __init__(self, matrix: Fp8Matrix) -> None:
        self.matrix = matrix
        weight = matrix.weight
        self.weight_bytes = weight.numbers.nbytes + weight.scales.nbytes
        device = weight.numbers.device
        multiprocessors = _MULTIPROCESSORS
        if device.type == "cuda":
            multiprocessors = torch.cuda.get_device_properties(device).multi_processor_count
        self._parts = count_parts(matrix, TILES[0], multiprocessors)

    def into(self, rows: Tensor, out: Tensor) -> None:
        self._multiply(rows, out, adds=False)

    def add_to(self, rows: Tensor, out: Tensor) -> None:
        self._multiply(rows, out, adds=True)

    def _multiply(self, rows: Tensor, out: Tensor, *, adds: bool) -> None:
        count, group = len(rows), self.matrix.group
        rounded = round_rows(rows, group)
        if group is not None or count <= _FEW_ROWS:
            tile = next((tile for tile in TILES if tile.rows >= count), TILES[-1])
            parts = self._parts if count <= _FEW_ROWS else 1
            multiply(rounded, self.matrix, tile, parts, out, adds=adds)
        elif adds or out.dtype != rows.dtype:
            product = torch.empty_like(out, dtype=rows.dtype)
            self._multiply_by_torch(rounded, product)
            out.copy_(product) if not adds else out.add_(product)
        else:
            self._multiply_by_torch(rounded, out)

    def _multiply_by_torch(self, rows: RoundedRows, out: Tensor) -> None:
        torch._scaled_mm(
            rows.numbers,
            self.matrix.weight.numbers.T,
            scale_a=rows.scales,
            scale_b=self.matrix.weight.scales,
            bias=self.matrix.bias,
            out_dtype=out.dtype,
            use_fast_accum=True,
            out=out,
        )
