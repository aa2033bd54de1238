"""Operators for FP8 weights on a GPU: E4M3, with a scale for each output and for each row.

Not yet run on a GPU.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn.functional import pad

from services.engine.model.operators.interface import Projection
from services.engine.model.operators.triton_operators import TritonOperators

__all__ = ["Fp8Operators", "quantize_rows"]

_ALIGNMENT = 16
"""Inputs and outputs of torch's FP8 products are multiples of it"""
_CHUNK = 2048
"""Numbers that the rounding kernel reads at a time"""


class Fp8Operators(TritonOperators):
    """bfloat16 activations, rounded row by row before each product.

    Experts multiply bfloat16 activations; MXFP4 stays as it is. Routers and products whose inputs
    are no multiple of 16 stay in bfloat16.
    """

    def __init__(self, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__(dtype, device)
        self._expert_dtype = torch.float8_e4m3fn

    def projection(self, weight: Tensor, bias: Tensor | None) -> Projection:
        if weight.shape[1] % _ALIGNMENT:
            return super().projection(weight, bias)
        return _Fp8Projection(self._own(weight), None if bias is None else self._own(bias))

    def exact_projection(self, weight: Tensor, bias: Tensor | None) -> Projection:
        return super().projection(weight, bias)


class _Fp8Projection(Projection):
    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self._outputs = len(weight)
        missing = -self._outputs % _ALIGNMENT
        self._weight, scales = quantize_rows(pad(weight, (0, 0, 0, missing)))
        self._scales = scales.view(1, -1)
        self._bias = None if bias is None else pad(bias, (0, missing))
        self.weight_bytes = self._weight.nbytes + scales.nbytes

    def into(self, rows: Tensor, out: Tensor) -> None:
        if out.dtype == rows.dtype and self._outputs == len(self._weight):
            self._multiply(rows, out)
        else:
            out.copy_(self._product(rows))

    def add_to(self, rows: Tensor, out: Tensor) -> None:
        out += self._product(rows)

    def _product(self, rows: Tensor) -> Tensor:
        product = rows.new_empty((len(rows), len(self._weight)))
        self._multiply(rows, product)
        return product[:, : self._outputs]

    def _multiply(self, rows: Tensor, out: Tensor) -> None:
        rounded, scales = quantize_rows(rows)
        torch._scaled_mm(
            rounded,
            self._weight.T,
            scale_a=scales,
            scale_b=self._scales,
            bias=self._bias,
            out_dtype=out.dtype,
            out=out,
        )


def quantize_rows(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Round each row, times its own factor, to E4M3. NaN stays NaN.

    rows: [n, width]. Returns contiguous float8_e4m3fn [n, width] and float32 scales [n, 1]: a
    number times its row's scale is about the number in `rows`.
    """
    rows = rows.contiguous()
    count, width = rows.shape
    rounded = torch.empty_like(rows, dtype=torch.float8_e4m3fn)
    scales = torch.empty((count, 1), dtype=torch.float32, device=rows.device)
    _quantize[(count,)](rounded, scales, rows, width=width, chunk=_CHUNK)
    return rounded, scales


@triton.jit  # type: ignore[untyped-decorator]
def _quantize(
    rounded: tl.tensor,
    scales: tl.tensor,
    rows: tl.tensor,
    width: tl.constexpr,
    chunk: tl.constexpr,
) -> None:
    """Round one row."""
    row = tl.program_id(0).to(tl.int64)
    start = rows + row * width
    largest = tl.zeros((chunk,), tl.float32)
    for first in range(0, width, chunk):
        column = first + tl.arange(0, chunk)
        numbers = tl.load(start + column, mask=column < width, other=0.0)
        largest = tl.maximum(largest, tl.abs(numbers.to(tl.float32)))
    # A row of zeros has a scale, too. 448 is the largest number in E4M3.
    scale = tl.maximum(tl.max(largest, axis=0), 1e-12) / 448.0
    tl.store(scales + row, scale)
    for first in range(0, width, chunk):
        column = first + tl.arange(0, chunk)
        numbers = tl.load(start + column, mask=column < width, other=0.0).to(tl.float32)
        place = rounded + row * width + column
        tl.store(place, (numbers / scale).to(rounded.dtype.element_ty), mask=column < width)
