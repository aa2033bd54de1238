"""Operators on CPUs without the tiled kernels, with weights in groups of codes."""

import ctypes
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from services.engine.kernels.library import (
    DTYPES,
    CodesCall,
    GroupedCall,
    Kernel,
    Native,
    Numbers,
    NumbersCall,
    PlaneCall,
)
from services.engine.kernels.memory import Arena
from services.engine.model.architecture.activation import SWIGLU, Activation
from services.engine.model.checkpoint.quantized import (
    BlockCodes,
    GroupNumbers,
    QuantizedWeight,
    rounded,
)
from services.engine.model.operators.interface import Delta, Gate, Operators, Projection
from services.engine.model.operators.native_operators import NativeGate, NativeOperators
from services.engine.model.operators.recording import Recording
from services.engine.model.operators.torch_operators import TorchGate, join_biases

__all__ = ["GroupedOperators", "RoundedOperators"]

_BLOCK = 32
"""Inputs that share a scale of a row, which the kernel rounds to 8 bits"""
_SMALL_GROUP = 16
_STRIP = 8
"""Outputs that are packed together"""
_BYTE = 8


class GroupedOperators(NativeOperators):
    """NativeOperators that keep a quantized checkpoint's codes in memory.

    Products round their rows to 8 bits, with a scale for each 32 inputs. Other weights are those of
    NativeOperators.
    """

    keeps_groups = True

    def __init__(self, native: Native, dtype: torch.dtype) -> None:
        super().__init__(native, dtype)
        self._arena = Arena()

    def grouped_projection(
        self, weights: Sequence[QuantizedWeight], bias: Tensor | None
    ) -> Projection:
        if not all(map(_has_kernel, weights)):
            return super().grouped_projection(weights, bias)
        # Torch multiplies little now, so its threads don't compete with the pool's.
        self._native.use_pool(torch.get_num_threads())
        return _GroupedProjection(self._native, weights, bias, self._arena)

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
        if activation != SWIGLU:
            return TorchGate(product, 1 if up is None else 2, activation, self)
        if isinstance(product, _GroupedProjection):
            return _GroupedGate(self._native, product, self._code)
        return NativeGate(self._native, product, self._code)

    def recording(self) -> Recording:
        return Recording(self._native, only_decodes=True)


class RoundedOperators(GroupedOperators):
    """GroupedOperators that round every weight to codes, but a router's."""

    def __init__(self, native: Native, dtype: torch.dtype, bits: int) -> None:
        """bits: 4 or 8. With 4, the product that computes the logits has 8."""
        super().__init__(native, dtype)
        self._bits = bits

    def projection(self, weight: Tensor, bias: Tensor | None) -> Projection:
        if weight.shape[1] % _BLOCK:
            return super().projection(weight, bias)
        return self.grouped_projection([rounded(weight, self._bits, _BLOCK)], bias)

    def gate(
        self,
        gate: Tensor,
        up: Tensor | None,
        gate_bias: Tensor | None,
        up_bias: Tensor | None,
        activation: Activation = SWIGLU,
    ) -> Gate:
        if gate.shape[1] % _BLOCK:
            return super().gate(gate, up, gate_bias, up_bias, activation)
        first = rounded(gate, self._bits, _BLOCK)
        second = None if up is None else rounded(up, self._bits, _BLOCK)
        return self.grouped_gate(first, second, gate_bias, up_bias, activation)

    def exact_projection(self, weight: Tensor, bias: Tensor | None) -> Projection:
        return NativeOperators.projection(self, weight, bias)

    def for_logits(self) -> Operators:
        return self if self._bits == 8 else RoundedOperators(self._native, self._dtype, 8)


class _GroupedProjection(Projection):
    """Packed weights, and a call for each run of outputs that are stored alike."""

    def __init__(
        self, native: Native, weights: Sequence[QuantizedWeight], bias: Tensor | None, arena: Arena
    ) -> None:
        self._bias = None if bias is None else bias.float().contiguous()
        self._runs: list[tuple[int, _Run]] = []
        """The first output of each, and it"""
        first = 0
        for stored in _runs(map(_stored, weights)):
            run = _Run(native, stored, None if self._bias is None else self._bias[first:], arena)
            self._runs.append((first, run))
            first += run.outputs
        self.weight_bytes = sum(run.num_bytes for _, run in self._runs)

    def into(self, rows: Tensor, out: Tensor) -> None:
        target = _Target(out.data_ptr(), out.stride(0), DTYPES[out.dtype])
        for first, run in self._runs:
            run.multiply(rows, target, first, adds=False)

    def add_to(self, rows: Tensor, out: Tensor) -> None:
        target = _Target(out.data_ptr(), out.stride(0), DTYPES[out.dtype])
        for first, run in self._runs:
            run.multiply(rows, target, first, adds=True)

    def into_gate(self, rows: Tensor) -> None:
        """Write the product where `Kernel.GATE` reads it."""
        width = sum(run.outputs for _, run in self._runs)
        target = _Target(None, width, DTYPES[rows.dtype])
        for first, run in self._runs:
            run.multiply(rows, target, first, adds=False)


class _GroupedGate(NativeGate):
    """A SwiGLU of one grouped product, which needs no tensor of its own without an adapter."""

    def __init__(self, native: Native, product: _GroupedProjection, code: int) -> None:
        super().__init__(native, product, code)
        self._grouped = product
        self._delta: Delta | None = None

    def adapt(self, delta: Delta) -> None:
        super().adapt(delta)
        self._delta = delta

    def into(self, rows: Tensor, out: Tensor) -> None:
        if self._delta is not None and self._delta.is_active:
            super().into(rows, out)
            return
        self._grouped.into_gate(rows)
        self._run(None, out)


class _Target(NamedTuple):
    """The place that products go to."""

    place: int | None
    """Address of the first row; None = where `Kernel.GATE` reads it"""
    stride: int
    """Numbers between two rows"""
    dtype: int
    """enum tw_dtype"""


@dataclass(frozen=True, slots=True)
class _Stored:
    """A weight as the kernel wants it."""

    codes: Tensor | BlockCodes
    bits: int
    group: int
    numbers: Numbers
    scales: GroupNumbers
    offsets: GroupNumbers | None

    @property
    def format(self) -> tuple[object, ...]:
        """Weights of a run have this in common."""
        return self.codes.shape[1], self.bits, self.group, self.numbers, self.offsets is None


class _Run:
    """Packed weights that are stored alike, and the reused call that multiplies by them."""

    def __init__(
        self, native: Native, weights: Sequence[_Stored], bias: Tensor | None, arena: Arena
    ) -> None:
        self._native = native
        self.outputs = sum(weight.codes.shape[0] for weight in weights)
        one = weights[0]
        call = self._call = GroupedCall(
            bias=None if bias is None else bias.data_ptr(),
            inputs=one.codes.shape[1],
            outputs=self.outputs,
            group=one.group,
            bits=one.bits,
            numbers=one.numbers,
            has_offsets=one.offsets is not None,
        )
        self.num_bytes = native.grouped_bytes(call)
        self._packed = arena.take(self.num_bytes, torch.uint8)
        call.packed = self._packed.data_ptr()
        packed = call.packed
        for weight in weights:
            call.outputs = weight.codes.shape[0]
            offsets = None if weight.offsets is None else _numbers_call(weight.offsets)
            codes, scales = _codes_call(weight.codes), _numbers_call(weight.scales)
            native.grouped_pack(call, codes, scales, offsets, packed)
            packed += native.grouped_bytes(call)
        call.outputs = self.outputs

    def multiply(self, rows: Tensor, out: _Target, first: int, *, adds: bool) -> None:
        """Write the products, or add them, to the outputs from `first` on."""
        call = self._call
        call.rows, call.num_rows, call.dtype = rows.data_ptr(), rows.shape[0], DTYPES[rows.dtype]
        call.out, call.out_stride, call.out_dtype = out
        call.first_output, call.adds = first, adds
        self._native.run(Kernel.GROUPED, call)


def _runs(weights: Iterable[_Stored]) -> Iterator[Sequence[_Stored]]:
    """Join neighbours that are stored alike. A run of several has whole strips of each."""
    run: list[_Stored] = []
    for weight in weights:
        if run and (run[-1].format != weight.format or run[-1].codes.shape[0] % _STRIP):
            yield run
            run = []
        run.append(weight)
    yield run


def _stored(weight: QuantizedWeight) -> _Stored:
    scales, offsets = weight.scales, weight.offsets
    if offsets is not None and weight.bits == _BYTE:  # the kernel's codes have a sign
        offsets = GroupNumbers(offsets.float() + 2 ** (_BYTE - 1) * scales.float())
    kind, (scales, *further) = _alike([scales] if offsets is None else [scales, offsets])
    codes = weight.codes.contiguous() if isinstance(weight.codes, Tensor) else weight.codes
    return _Stored(codes, weight.bits, weight.group, kind, scales, further[0] if further else None)


def _alike(numbers: Sequence[GroupNumbers]) -> tuple[Numbers, Sequence[GroupNumbers]]:
    """Return scales, and offsets if there are any, in the smallest form that holds all of them."""
    if all(each.factors is not None for each in numbers):
        return Numbers.LEVELS, [each.contiguous() for each in numbers]
    if all(each.each.dtype == torch.float16 for each in numbers):
        return Numbers.HALVES, [each.contiguous() for each in numbers]
    floats = [each.float().contiguous() for each in numbers]
    halves = [each.half() for each in floats]
    if all(torch.equal(half.float(), each) for half, each in zip(halves, floats, strict=True)):
        return Numbers.HALVES, list(map(GroupNumbers, halves))
    return Numbers.FLOATS, list(map(GroupNumbers, floats))


def _codes_call(codes: Tensor | BlockCodes) -> CodesCall:
    """Return a call's argument, which is valid as long as `codes` is."""
    if isinstance(codes, Tensor):
        return CodesCall(rows=codes.data_ptr(), row_bytes=codes.stride(0))
    layout = codes.layout
    planes = [PlaneCall(*plane) for plane in layout.planes]
    call = CodesCall(
        rows=codes.rows.data_ptr(),
        row_bytes=codes.rows.stride(0),
        order=None if codes.order is None else codes.order.data_ptr(),
        planes=(PlaneCall * len(planes))(*planes),
        num_planes=len(planes),
        block_bytes=layout.num_bytes,
        block_codes=layout.num_codes,
    )
    call.table = ctypes.create_string_buffer(bytes(layout.values))  # kept with the call
    call.values = ctypes.addressof(call.table) if layout.values else None
    return call


def _numbers_call(numbers: GroupNumbers) -> NumbersCall:
    factors = None if numbers.factors is None else numbers.factors.data_ptr()
    return NumbersCall(numbers.each.data_ptr(), factors)


def _has_kernel(weight: QuantizedWeight) -> bool:
    fits = weight.group % _BLOCK == 0 or weight.group == _SMALL_GROUP
    return fits and weight.order is None and weight.shape[1] % _BLOCK == 0
