"""Products with weights in floating point, as they are stored, on the portable kernels."""

import torch
from torch import Tensor

from services.engine.kernels.library import DTYPES, Kernel, Native
from services.engine.kernels.memory import Arena
from services.engine.kernels.structures import FloatCall
from services.engine.model.operators.native_gate import GateProduct

__all__ = ["FloatProjection"]

_PANEL = 32
"""Number of outputs that are packed together"""


class FloatProjection(GateProduct):
    """A product with a packed weight, which the kernel widens to float32."""

    def __init__(self, native: Native, weight: Tensor, bias: Tensor | None, arena: Arena) -> None:
        """weight: [outputs, inputs] in float32, bfloat16 or float16; it is copied."""
        self._native = native
        outputs, inputs = weight.shape
        self.outputs = outputs
        code = DTYPES[weight.dtype]
        weight = weight if weight.stride(1) == 1 else weight.contiguous()
        self._packed = arena.take(native.float_packed_elements(outputs, inputs), weight.dtype)
        places = weight.data_ptr(), weight.stride(0), self._packed.data_ptr()
        native.float_pack(code, *places, outputs, inputs)
        self._bias = None if bias is None else bias.to(torch.float32, copy=True)
        self.weight_bytes = weight.nbytes
        self._call = FloatCall(
            packed=self._packed.data_ptr(),
            bias=None if self._bias is None else self._bias.data_ptr(),
            inputs=inputs,
            outputs=outputs,
            weight_dtype=code,
        )

    def into(self, rows: Tensor, out: Tensor) -> None:
        self._multiply(rows, out.data_ptr(), out.stride(0), out.dtype, adds=False)

    def add_to(self, rows: Tensor, out: Tensor) -> None:
        self._multiply(rows, out.data_ptr(), out.stride(0), out.dtype, adds=True)

    def into_gate(self, rows: Tensor) -> None:
        self._multiply(rows, None, self._call.outputs, rows.dtype, adds=False)

    def part(self, first: int, outputs: int) -> FloatCall | None:
        """Return a call for some outputs that lacks rows and out, valid while this product lives.

        Return None if the outputs don't begin with a panel.
        """
        if first % _PANEL:
            return None
        call = FloatCall.from_buffer_copy(self._call)
        call.packed += first * call.inputs * self._packed.itemsize
        call.outputs = outputs
        if self._bias is not None:
            call.bias = self._bias[first:].data_ptr()
        return call

    def _multiply(
        self, rows: Tensor, place: int | None, stride: int, dtype: torch.dtype, *, adds: bool
    ) -> None:
        """Write or add the products to the rows from this address on."""
        call = self._call
        call.rows, call.num_rows, call.dtype = rows.data_ptr(), rows.shape[0], DTYPES[rows.dtype]
        call.out, call.out_stride, call.out_dtype = place, stride, DTYPES[dtype]
        call.adds = adds
        self._native.run(Kernel.FLOAT_LINEAR, call)
