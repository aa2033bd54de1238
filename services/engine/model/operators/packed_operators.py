"""Operators of a GPU that multiply by a checkpoint's codes."""

import logging
from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import Tensor

from services.engine.model.architecture.activation import SWIGLU, Activation
from services.engine.model.checkpoint.quantized import QuantizedWeight, Weight
from services.engine.model.operators.byte_products import ByteProjection, has_bytes
from services.engine.model.operators.grouped_mixture import (
    GroupedMixture,
    MixtureShape,
    first_of,
    plain,
)
from services.engine.model.operators.grouped_weights import GroupedWeights
from services.engine.model.operators.interface import ExpertWeights, Gate, Mixture, Projection
from services.engine.model.operators.packed_experts import PackedExperts
from services.engine.model.operators.packed_kernels import PackedMatrix
from services.engine.model.operators.packed_plan import PackedPlan
from services.engine.model.operators.packed_weights import (
    PackedForm,
    PackedWeight,
    StoredCodes,
    alike_runs,
    have_one_order,
    in_one_form,
)
from services.engine.model.operators.torch_operators import join_biases
from services.engine.model.operators.triton_operators import TritonOperators

__all__ = ["PackedOperators", "PackedProjection", "PackedRun"]

_LOG = logging.getLogger("engine")


class PackedRun:
    """Neighbouring outputs that have one form and read their inputs in one order."""

    def __init__(self, matrix: PackedMatrix, plan: PackedPlan, order: Tensor | None) -> None:
        """order: int64 [inputs], the input of each column of codes; None = in order."""
        self.matrix = matrix
        self._plan = plan
        self._order = order

    def multiply(self, rows: Tensor, out: Tensor, *, adds: bool) -> None:
        """Write the product to `out` [n, outputs], or add it."""
        ordered = rows if self._order is None else rows.index_select(1, self._order)
        self._plan.product(len(rows)).multiply(ordered, self.matrix, out, adds=adds)


class PackedProjection(Projection):
    """A product with packed weights: a launch for each run of outputs that have one form."""

    def __init__(self, runs: Sequence[tuple[slice, PackedRun]]) -> None:
        """runs: each with its outputs."""
        self.runs = runs
        self.weight_bytes = sum(run.matrix.weight.nbytes for _, run in runs)

    def into(self, rows: Tensor, out: Tensor) -> None:
        for outputs, run in self.runs:
            run.multiply(rows, out[:, outputs], adds=False)

    def add_to(self, rows: Tensor, out: Tensor) -> None:
        for outputs, run in self.runs:
            run.multiply(rows, out[:, outputs], adds=True)


class PackedOperators(TritonOperators):
    """TritonOperators that keep the codes of quantized weights in memory.

    Products of few rows decode them in registers, without rounding; those of many rows decode them
    first, rounded to the model's dtype.
    """

    keeps_groups = True

    def __init__(
        self, dtype: torch.dtype, device: torch.device, *, rounds_rows: bool = False
    ) -> None:
        """rounds_rows: products with weights in int8 round their rows to int8, too."""
        super().__init__(dtype, device)
        self._rounds_rows = rounds_rows
        self._announced: set[str] = set()
        self._plans: dict[tuple[PackedForm, int, int], tuple[PackedPlan, list[PackedMatrix]]] = {}
        """Ways to multiply, and weights, by form, outputs and inputs"""

    def grouped_projection(
        self, weights: Sequence[QuantizedWeight], bias: Tensor | None
    ) -> Projection:
        if self._rounds_rows and all(map(has_bytes, weights)):
            own_bias = None if bias is None else self._own(bias)
            return ByteProjection(weights, own_bias, self._device)
        stored = [StoredCodes.of(weight, self._device) for weight in weights]
        packed = [each for each in stored if each is not None]
        if len(packed) < len(weights):
            self._announce(weights[stored.index(None)])
            return super().grouped_projection(weights, bias)
        own_bias = None if bias is None else self._own(bias)
        return PackedProjection(list(self._runs(packed, own_bias)))

    def choose_kernels(self) -> None:
        for plan, matrices in self._plans.values():
            plan.measure(matrices)

    def _runs(
        self, weights: Sequence[StoredCodes], bias: Tensor | None
    ) -> Iterator[tuple[slice, PackedRun]]:
        """Pack weights; yield the runs of outputs that have one form."""
        first = 0
        for stored in alike_runs(weights):
            weight = PackedWeight.of(stored, self._dtype, self._device)
            outputs = slice(first, first + weight.outputs)
            matrix = PackedMatrix.of(weight, None if bias is None else bias[outputs])
            key = weight.form, weight.outputs, weight.inputs
            if key not in self._plans:
                self._plans[key] = PackedPlan(matrix, self._dtype), []
            plan, matrices = self._plans[key]
            matrices.append(matrix)
            order = stored[0].weight.order
            own_order = None if order is None else order.argsort().to(self._device)
            yield outputs, PackedRun(matrix, plan, own_order)
            first = outputs.stop

    def grouped_gate(
        self,
        gate: QuantizedWeight,
        up: QuantizedWeight | None,
        gate_bias: Tensor | None,
        up_bias: Tensor | None,
        activation: Activation = SWIGLU,
    ) -> Gate:
        bias = join_biases(gate_bias, up_bias)
        product = self.grouped_projection([gate] if up is None else [gate, up], bias)
        return self.activated(product, activation)

    def mixture(
        self, experts: Iterable[ExpertWeights], count: int, per_row: int, activation: Activation
    ) -> Mixture:
        if not activation.gated:
            return super().mixture(experts, count, per_row, activation)
        first, rest = first_of(experts)
        if not isinstance(first.gate, QuantizedWeight) and not isinstance(
            first.down, QuantizedWeight
        ):
            return super().mixture(rest, count, per_row, activation)
        every = list(rest)
        gate = self._experts(
            [[w for w in (each.gate, each.up) if w is not None] for each in every],
            [(each.gate_bias, each.up_bias) for each in every],
        )
        down = self._experts(
            [(each.down,) for each in every], [(each.down_bias, None) for each in every]
        )
        shape = MixtureShape.of(first, count, per_row)
        return GroupedMixture(gate, down, shape, activation, self._dtype, self._device)

    def _experts(
        self,
        weights: Sequence[Sequence[Weight]],
        biases: Sequence[tuple[Tensor | None, Tensor | None]],
    ) -> PackedExperts | GroupedWeights:
        """Pack the same products of all experts, or decode them where no form has them all."""
        products = len(weights[0])
        stored = [self._stored(weight) for each in weights for weight in each]
        packed = [each for each in stored if each is not None]
        alike = in_one_form(packed) if len(packed) == len(stored) else None
        every = alike or ()
        parts = [every[n : n + products] for n in range(0, len(every), products)]
        if parts and all(have_one_order(each[0], each[-1]) for each in parts):
            whole = [join_biases(*both) for both in biases]
            return PackedExperts.of(parts, whole, self._dtype, self._device)
        for weight in weights[0]:
            if isinstance(weight, QuantizedWeight):
                self._announce(weight)
        decoded = GroupedWeights.allocate(
            plain(*weights[0]), biases[0][0], len(weights), self._dtype, self._device, None
        )
        for number, (some, both) in enumerate(zip(weights, biases, strict=True)):
            decoded.put(number, plain(*some), both[: len(some)])
        return decoded

    def _stored(self, weight: Weight) -> StoredCodes | None:
        if not isinstance(weight, QuantizedWeight):
            return None
        return StoredCodes.of(weight, self._device)

    def _announce(self, weight: QuantizedWeight) -> None:
        """Log once that weights of some form are decoded at loading."""
        order = " in an order of their own" if weight.order is not None else ""
        form = f"{weight.bits} bits in groups of {weight.group}{order}"
        if form not in self._announced:
            self._announced.add(form)
            _LOG.warning("decoding weights of %s, which the GPU's kernels lack", form)
