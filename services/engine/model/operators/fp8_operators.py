"""Operators of a GPU that multiplies FP8."""

from collections.abc import Iterable

import torch
from torch import Tensor

from services.engine.model.architecture.activation import Activation
from services.engine.model.operators.fp8_plan import Fp8Plan
from services.engine.model.operators.fp8_products import Fp8Matrix
from services.engine.model.operators.fp8_rounding import RoundedRows, round_rows
from services.engine.model.operators.fp8_weights import Fp8Rounding
from services.engine.model.operators.fused_kernels import activate, can_round, norm_rows
from services.engine.model.operators.grouped_mixture import GroupedMixture
from services.engine.model.operators.interface import (
    ExpertWeights,
    LayerNorm,
    Mixture,
    Operators,
    Projection,
)
from services.engine.model.operators.triton_operators import TritonOperators

__all__ = ["Fp8Operators"]

_MULTIPLE = 16
"""Number that must divide both widths of a product in FP8"""


class Fp8Operators(TritonOperators):
    """TritonOperators with weights in FP8, half the bytes of bfloat16.

    Products round their rows to FP8, too, with a scale for each row or group, by one rule for all
    numbers of rows. Kernels of norms and activations round what they write, so that products which
    read it launch no kernel for that. The rows of experts are not rounded.
    """

    def __init__(self, dtype: torch.dtype, device: torch.device, rounding: Fp8Rounding) -> None:
        super().__init__(dtype, device)
        self._rounding = rounding
        self._plans: dict[tuple[int, int, bool], tuple[Fp8Plan, list[Fp8Matrix]]] = {}
        """Kernels and weights by outputs, inputs and whether there is no bias"""
        self._newest: tuple[Tensor, RoundedRows] | None = None
        """Output of the newest norm or activation, which nothing else has written since, in both
        forms"""
        self.groups_experts = True

    def projection(self, weight: Tensor, bias: Tensor | None) -> Projection:
        if any(width % _MULTIPLE for width in weight.shape):
            return super().projection(weight, bias)
        rounded = self._rounding.round(weight.to(self._device))
        own_bias = None if bias is None else self._own(bias)
        matrix = Fp8Matrix.of(rounded, own_bias, self._rounding.group)
        key = (*matrix.shape, bias is None)
        if key not in self._plans:
            self._plans[key] = Fp8Plan(matrix, self._dtype), []
        plan, matrices = self._plans[key]
        matrices.append(matrix)
        return Fp8Projection(matrix, plan, self)

    def choose_kernels(self) -> None:
        for plan, matrices in self._plans.values():
            plan.measure(matrices)

    def rounded(self, rows: Tensor) -> RoundedRows:
        """Return `rows` [n, width] of a product's input in FP8."""
        if self._newest is not None:
            output, rounded = self._newest
            if output.data_ptr() == rows.data_ptr() and output.shape == rows.shape:
                return rounded
            self._newest = None  # this product may write where the norm has
        return round_rows(rows, self._rounding.group)

    def rms_norm(self, rows: Tensor, weight: Tensor, epsilon: float, out: Tensor) -> None:
        rounded, group = self._round_with(out), self._rounding.group
        norm_rows(rows, weight, epsilon, out, rounded=rounded, group=group)

    def activate(self, product: Tensor, activation: Activation, out: Tensor) -> None:
        rounded, group = self._round_with(out), self._rounding.group
        activate(product, activation, out, rounded=rounded, group=group)

    def add_rms_norm(self, rows: Tensor, weight: Tensor, epsilon: float, out: Tensor) -> None:
        self._newest = None
        super().add_rms_norm(rows, weight, epsilon, out)

    def layer_norm(
        self, rows: Tensor, norm: LayerNorm, epsilon: float, out: Tensor, *, replaces: bool = False
    ) -> None:
        self._newest = None
        super().layer_norm(rows, norm, epsilon, out, replaces=replaces)

    def arrange(self, rows: Tensor, out: Tensor) -> None:
        self._newest = None
        super().arrange(rows, out)

    def _round_with(self, out: Tensor) -> RoundedRows | None:
        """Allocate the rounded form of `out` if its kernel can write both."""
        self._newest = None
        if not can_round(out.shape[1], self._rounding.group):
            return None
        rounded = RoundedRows.empty(out, self._rounding.group)
        self._newest = out, rounded
        return rounded

    def exact_projection(self, weight: Tensor, bias: Tensor | None) -> Projection:
        return super().projection(weight, bias)

    def mixture(
        self, experts: Iterable[ExpertWeights], count: int, per_row: int, activation: Activation
    ) -> Mixture:
        if not activation.gated:
            return super().mixture(experts, count, per_row, activation)
        return GroupedMixture.of(
            experts, count, per_row, activation, self._dtype, self._device, self._rounding
        )

    def without_fp8(self) -> Operators:
        return TritonOperators(self._dtype, self._device)


class Fp8Projection(Projection):
    """A projection that owns an FP8 weight."""

    def __init__(self, matrix: Fp8Matrix, plan: Fp8Plan, operators: Fp8Operators) -> None:
        self.matrix = matrix
        self._plan = plan
        self._operators = operators
        weight = matrix.weight
        self.weight_bytes = weight.numbers.nbytes + weight.scales.nbytes

    def into(self, rows: Tensor, out: Tensor) -> None:
        self._multiply(rows, out, adds=False)

    def add_to(self, rows: Tensor, out: Tensor) -> None:
        self._multiply(rows, out, adds=True)

    def _multiply(self, rows: Tensor, out: Tensor, *, adds: bool) -> None:
        rounded = self._operators.rounded(rows)
        self._plan.product(len(rows)).multiply(rounded, self.matrix, out, adds=adds)
