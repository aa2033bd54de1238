"""Operators on CPUs without the tiled kernels, with weights in groups of 4- or 8-bit codes."""

import torch
from torch import Tensor

from services.engine.kernels.library import DTYPES, GroupedCall, Native
from services.engine.kernels.memory import Arena
from services.engine.model.architecture.activation import SWIGLU, Activation
from services.engine.model.checkpoint.quantized import QuantizedWeight, joined, rounded
from services.engine.model.operators.interface import Gate, Operators, Projection
from services.engine.model.operators.native_operators import NativeGate, NativeOperators
from services.engine.model.operators.torch_operators import TorchGate, join_biases

__all__ = ["GroupedOperators", "RoundedOperators"]

_BLOCK = 32
"""Inputs that share a scale of a row, which the kernel rounds to 8 bits"""
_SMALL_GROUP = 16


class GroupedOperators(NativeOperators):
    """NativeOperators that keep a quantized checkpoint's codes in memory.

    Products round their rows to 8 bits, with a scale for each 32 inputs. Other weights are those of
    NativeOperators.
    """

    keeps_groups = True

    def __init__(self, native: Native, dtype: torch.dtype) -> None:
        super().__init__(native, dtype)
        self._arena = Arena()

    def grouped_projection(self, weight: QuantizedWeight, bias: Tensor | None) -> Projection:
        if not _has_kernel(weight):
            return super().projection(weight.decode(), bias)
        # Torch multiplies little now, so its threads don't compete with the pool's.
        self._native.use_pool(torch.get_num_threads())
        return _GroupedProjection(self._native, weight, bias, self._arena)

    def grouped_gate(
        self,
        gate: QuantizedWeight,
        up: QuantizedWeight | None,
        gate_bias: Tensor | None,
        up_bias: Tensor | None,
        activation: Activation = SWIGLU,
    ) -> Gate:
        both = joined([gate] if up is None else [gate, up])
        bias = join_biases(gate_bias, up_bias)
        if isinstance(both, QuantizedWeight):
            product = self.grouped_projection(both, bias)
        else:
            product = super().projection(both, bias)
        if activation != SWIGLU:
            return TorchGate(product, 1 if up is None else 2, activation, self)
        return NativeGate(self._native, product, self._code)


class RoundedOperators(GroupedOperators):
    """GroupedOperators that round every weight to codes, but a router's."""

    def __init__(self, native: Native, dtype: torch.dtype, bits: int) -> None:
        """bits: 4 or 8. With 4, the product that computes the logits has 8."""
        super().__init__(native, dtype)
        self._bits = bits

    def projection(self, weight: Tensor, bias: Tensor | None) -> Projection:
        if weight.shape[1] % _BLOCK:
            return super().projection(weight, bias)
        return self.grouped_projection(rounded(weight, self._bits, _BLOCK), bias)

    def exact_projection(self, weight: Tensor, bias: Tensor | None) -> Projection:
        return NativeOperators.projection(self, weight, bias)

    def for_logits(self) -> Operators:
        return self if self._bits == 8 else RoundedOperators(self._native, self._dtype, 8)


class _GroupedProjection(Projection):
    """A packed weight and the reused call that multiplies by it."""

    def __init__(
        self, native: Native, weight: QuantizedWeight, bias: Tensor | None, arena: Arena
    ) -> None:
        self._native = native
        outputs, inputs = weight.shape
        codes, offsets = _as_packed(weight)
        numbers = [weight.scales] if offsets is None else [weight.scales, offsets]
        has_offsets = offsets is not None
        halves = [each.half() for each in numbers]
        has_halves = all(map(torch.equal, numbers, [each.float() for each in halves]))
        numbers = [each.contiguous() for each in (halves if has_halves else numbers)]
        self._bias = None if bias is None else bias.float().contiguous()
        self._call = GroupedCall(
            bias=None if self._bias is None else self._bias.data_ptr(),
            inputs=inputs,
            outputs=outputs,
            group=weight.group,
            bits=weight.bits,
            has_halves=has_halves,
            has_offsets=has_offsets,
        )
        self._packed = arena.take(native.grouped_bytes(self._call), torch.uint8)
        native.grouped_pack(
            self._call,
            codes.data_ptr(),
            numbers[0].data_ptr(),
            numbers[1].data_ptr() if has_offsets else None,
            self._packed.data_ptr(),
        )
        self._call.packed = self._packed.data_ptr()
        self.weight_bytes = self._packed.nbytes

    def into(self, rows: Tensor, out: Tensor) -> None:
        self._multiply(rows, out, adds=False)

    def add_to(self, rows: Tensor, out: Tensor) -> None:
        self._multiply(rows, out, adds=True)

    def _multiply(self, rows: Tensor, out: Tensor, *, adds: bool) -> None:
        call = self._call
        call.rows, call.out = rows.data_ptr(), out.data_ptr()
        call.num_rows = rows.shape[0]
        call.dtype, call.out_dtype = DTYPES[rows.dtype], DTYPES[out.dtype]
        call.adds = adds
        self._native.grouped_linear(call)


def _as_packed(weight: QuantizedWeight) -> tuple[Tensor, Tensor | None]:
    """Return the codes as the kernel wants them, and the offsets; None if the codes suffice.

    Codes of 4 bits mean 0 at 8. Codes of 8 bits get a sign.
    """
    codes, scales, offsets = weight.codes.contiguous(), weight.scales, weight.offsets
    if weight.bits == 4:
        return codes, None if torch.equal(offsets, -8 * scales) else offsets
    largest = scales.abs().argmax()
    zero = int(-(offsets.flatten()[largest] / scales.flatten()[largest]).nan_to_num().round())
    least, most = (int(each) for each in codes.aminmax())
    fits = least - zero >= -128 and most - zero <= 127
    if fits and torch.equal(offsets, -zero * scales):
        return codes - zero, None
    return codes ^ 128, offsets + 128 * scales


def _has_kernel(weight: QuantizedWeight) -> bool:
    fits = weight.group % _BLOCK == 0 or (weight.group == _SMALL_GROUP and weight.bits == 8)
    return fits and weight.order is None and weight.shape[1] % _BLOCK == 0
