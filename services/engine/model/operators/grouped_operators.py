"""Operators on CPUs without the tiled kernels, with weights in groups of codes."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from services.engine.kernels.library import DTYPES, Kernel, Native
from services.engine.kernels.memory import Arena
from services.engine.model.architecture.activation import SWIGLU, Activation
from services.engine.model.checkpoint.quantized import QuantizedWeight
from services.engine.model.operators.interface import Delta, Gate, Projection
from services.engine.model.operators.native_operators import NativeGate, NativeOperators
from services.engine.model.operators.recording import Recording
from services.engine.model.operators.stored_groups import StoredGroups, alike_runs, has_kernel
from services.engine.model.operators.torch_operators import TorchGate, join_biases

__all__ = ["GroupedOperators"]


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
        if not all(map(has_kernel, weights)):
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


class _GroupedProjection(Projection):
    """Packed weights, and a call for each run of outputs that are stored alike."""

    def __init__(
        self, native: Native, weights: Sequence[QuantizedWeight], bias: Tensor | None, arena: Arena
    ) -> None:
        self._bias = None if bias is None else bias.float().contiguous()
        self._runs: list[tuple[int, _Run]] = []
        """The first output of each, and it"""
        first = 0
        for stored in alike_runs(weights):
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


class _Run:
    """Packed weights that are stored alike, and the reused call that multiplies by them."""

    def __init__(
        self, native: Native, weights: Sequence[StoredGroups], bias: Tensor | None, arena: Arena
    ) -> None:
        self._native = native
        self.outputs = sum(weight.codes.shape[0] for weight in weights)
        call = self._call = weights[0].call(self.outputs)
        call.bias = None if bias is None else bias.data_ptr()
        self.num_bytes = native.grouped_bytes(call)
        self._packed = arena.take(self.num_bytes, torch.uint8)
        call.packed = place = self._packed.data_ptr()
        for weight in weights:
            weight.pack(native, place)
            place += native.grouped_bytes(weight.call())

    def multiply(self, rows: Tensor, out: _Target, first: int, *, adds: bool) -> None:
        """Write the products, or add them, to the outputs from `first` on."""
        call = self._call
        call.rows, call.num_rows, call.dtype = rows.data_ptr(), rows.shape[0], DTYPES[rows.dtype]
        call.out, call.out_stride, call.out_dtype = out
        call.first_output, call.adds = first, adds
        self._native.run(Kernel.GROUPED, call)
