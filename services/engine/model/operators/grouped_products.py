"""Products with weights in groups on the portable kernels."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from services.engine.kernels.library import DTYPES, Kernel, Native
from services.engine.kernels.memory import Arena
from services.engine.kernels.structures import GroupedCall
from services.engine.model.checkpoint.quantized import QuantizedWeight
from services.engine.model.operators.native_gate import GateProduct
from services.engine.model.operators.stored_groups import (
    STRIP,
    StoredGroups,
    alike_runs,
    mapped_call,
    pack_groups,
)

__all__ = ["GroupedProjection"]


class GroupedProjection(GateProduct):
    """A product with packed weights: a call for each run of outputs that are stored alike."""

    def __init__(
        self, native: Native, weights: Sequence[QuantizedWeight], bias: Tensor | None, arena: Arena
    ) -> None:
        self._bias = None if bias is None else bias.float().contiguous()
        self._runs: list[tuple[int, _Run]] = []
        """Runs, each with the number of its first output"""
        first = 0
        for stored in alike_runs(weights):
            run = _Run(native, stored, None if self._bias is None else self._bias[first:], arena)
            self._runs.append((first, run))
            first += run.outputs
        self.outputs = first
        self.weight_bytes = sum(run.num_bytes for _, run in self._runs)

    def into(self, rows: Tensor, out: Tensor) -> None:
        target = _Target(out.data_ptr(), out.stride(0), DTYPES[out.dtype])
        for first, run in self._runs:
            run.multiply(rows, target, first, adds=False)

    def add_to(self, rows: Tensor, out: Tensor) -> None:
        target = _Target(out.data_ptr(), out.stride(0), DTYPES[out.dtype])
        for first, run in self._runs:
            run.multiply(rows, target, first, adds=True)

    def part(self, first: int, outputs: int) -> GroupedCall | None:
        """Return a call for some outputs that lacks rows and out, valid while this product lives.

        Return None if the outputs are not whole strips of one run.
        """
        for begin, run in self._runs:
            if begin <= first and first + outputs <= begin + run.outputs:
                return run.part(first - begin, outputs)
        return None

    def into_gate(self, rows: Tensor) -> None:
        target = _Target(None, self.outputs, DTYPES[rows.dtype])
        for first, run in self._runs:
            run.multiply(rows, target, first, adds=False)


class _Target(NamedTuple):
    """The place that products go to."""

    place: int | None
    """Address of the first row; None = where `Kernel.GATE_ROWS` reads it"""
    stride: int
    """Numbers between two rows"""
    dtype: int
    """Number of the type in enum tw_dtype"""


class _Run:
    """Packed weights that are stored alike, and the reused call that multiplies by them."""

    def __init__(
        self, native: Native, weights: Sequence[StoredGroups], bias: Tensor | None, arena: Arena
    ) -> None:
        self._native = native
        self.outputs = sum(weight.codes.shape[0] for weight in weights)
        if weights[0].is_mapped:
            call, self.num_bytes = mapped_call(weights, self.outputs)
        else:
            call = weights[0].call(self.outputs)
            self.num_bytes = native.grouped_bytes(call)
            self._packed = pack_groups(native, arena, weights, call)
            call.packed = self._packed.data_ptr()
        call.bias = None if bias is None else bias.data_ptr()
        self._call = call

    def part(self, first: int, outputs: int) -> GroupedCall | None:
        if first % STRIP:
            return None
        call = GroupedCall.from_buffer_copy(self._call)
        call.outputs = outputs
        call.first_strip = first // STRIP
        if first and call.bias is not None:
            call.bias += first * torch.float32.itemsize
        return call

    def multiply(self, rows: Tensor, out: _Target, first: int, *, adds: bool) -> None:
        """Write or add the products to the outputs from `first` on."""
        call = self._call
        call.rows, call.num_rows, call.dtype = rows.data_ptr(), rows.shape[0], DTYPES[rows.dtype]
        call.out, call.out_stride, call.out_dtype = out
        call.first_output, call.adds = first, adds
        self._native.run(Kernel.GROUPED_LINEAR, call)
