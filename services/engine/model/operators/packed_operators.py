"""Operators of a GPU that multiply by a checkpoint's codes."""

import logging
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from services.engine.model.architecture.activation import SWIGLU, Activation
from services.engine.model.checkpoint.quantized import QuantizedWeight, Weight
from services.engine.model.operators.grouped_mixture import (
    GroupedMixture,
    MixtureShape,
    first_of,
    plain,
)
from services.engine.model.operators.grouped_weights import GroupedWeights
from services.engine.model.operators.interface import ExpertWeights, Gate, Mixture, Projection
from services.engine.model.operators.packed_experts import PackedExperts
from services.engine.model.operators.packed_kernels import (
    MOST_ROWS,
    arrivals_of,
    decode,
    multiply,
)
from services.engine.model.operators.packed_weights import (
    PackedWeight,
    StoredCodes,
    alike_runs,
    in_one_form,
)
from services.engine.model.operators.torch_operators import (
    add_product,
    join_biases,
    multiply_into,
)
from services.engine.model.operators.triton_operators import TritonOperators

__all__ = ["PackedOperators", "PackedProjection"]

_LOG = logging.getLogger("engine")
_DECODED_BYTES = 32 << 20
"""Bytes of weights that are decoded at a time, so that a product finds them in the cache"""


class PackedOperators(TritonOperators):
    """TritonOperators that keep the codes of quantized weights in memory.

    Products of up to `MOST_ROWS` rows decode them in registers, without rounding; those of more
    rows decode them first, rounded to the model's dtype.
    """

    keeps_groups = True

    def __init__(self, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__(dtype, device)
        self._announced: set[str] = set()

    def grouped_projection(
        self, weights: Sequence[QuantizedWeight], bias: Tensor | None
    ) -> Projection:
        stored = [StoredCodes.of(weight, self._device) for weight in weights]
        packed = [each for each in stored if each is not None]
        if len(packed) < len(weights):
            self._announce(weights[stored.index(None)])
            return super().grouped_projection(weights, bias)
        own_bias = None if bias is None else self._own(bias)
        return PackedProjection(packed, own_bias, self._dtype, self._device)

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
        if alike is not None:
            parts = [alike[n : n + products] for n in range(0, len(alike), products)]
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
        if not isinstance(weight, QuantizedWeight) or weight.order is not None:
            return None
        return StoredCodes.of(weight, self._device)

    def _announce(self, weight: QuantizedWeight) -> None:
        """Log once that weights of some form are decoded at loading."""
        order = " in an order of their own" if weight.order is not None else ""
        form = f"{weight.bits} bits in groups of {weight.group}{order}"
        if form not in self._announced:
            self._announced.add(form)
            _LOG.warning("decoding weights of %s, which the GPU's kernels lack", form)


class PackedProjection(Projection):
    """A product with packed weights: a launch for each run of outputs that have one form."""

    def __init__(
        self,
        weights: Sequence[StoredCodes],
        bias: Tensor | None,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        """dtype: that of activations. bias: on the device."""
        self._runs: list[tuple[slice, _Run]] = []
        first = 0
        for stored in alike_runs(weights):
            packed = PackedWeight.of(stored, dtype, device)
            outputs = slice(first, first + packed.outputs)
            order = stored[0].weight.order
            own_bias = None if bias is None else bias[outputs]
            own_order = None if order is None else order.argsort().to(device)
            self._runs.append((outputs, _Run(packed, own_bias, own_order)))
            first = outputs.stop
        self.weight_bytes = sum(run.weight.nbytes for _, run in self._runs)

    @property
    def num_launches(self) -> int:
        """Number of launches of a product with few rows, whose inputs are in order."""
        return len(self._runs)

    def into(self, rows: Tensor, out: Tensor) -> None:
        for outputs, run in self._runs:
            run.multiply(rows, out[:, outputs], adds=False)

    def add_to(self, rows: Tensor, out: Tensor) -> None:
        for outputs, run in self._runs:
            run.multiply(rows, out[:, outputs], adds=True)


class _Run:
    """Neighbouring outputs that have one form and read their inputs in one order."""

    def __init__(self, weight: PackedWeight, bias: Tensor | None, order: Tensor | None) -> None:
        """order: int64 [inputs], the input of each column of codes; None = in order."""
        self.weight = weight
        self._bias = bias
        self._order = order
        count = arrivals_of(weight)
        self._arrivals = torch.zeros(count, dtype=torch.int32, device=weight.codes.device)

    def multiply(self, rows: Tensor, out: Tensor, *, adds: bool) -> None:
        """Write the product to `out` [n, outputs], or add it."""
        ordered = rows if self._order is None else rows.index_select(1, self._order)
        if len(rows) <= MOST_ROWS:
            multiply(ordered, self.weight, self._bias, self._arrivals, out, adds=adds)
        else:
            self._decode_and_multiply(ordered, out, adds=adds)

    def _decode_and_multiply(self, rows: Tensor, out: Tensor, *, adds: bool) -> None:
        """Do `multiply`, some outputs at a time."""
        outputs, inputs = out.shape[1], rows.shape[1]
        most = min(outputs, max(1, _DECODED_BYTES // (inputs * rows.itemsize)))
        decoded = rows.new_empty((most, inputs))
        for first in range(0, outputs, most):
            part = slice(first, min(first + most, outputs))
            weight = decoded[: part.stop - first]
            decode(self.weight, first, weight)
            bias = None if self._bias is None else self._bias[part]
            compute = add_product if adds else multiply_into
            compute(rows, weight.T, bias, out[:, part])
