"""Which kernel multiplies how many rows by FP8 weights of one shape."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from services.engine.model.attention.launch_times import fastest
from services.engine.model.attention.multiprocessors import count_multiprocessors
from services.engine.model.operators.fp8_products import (
    TILES,
    Fp8Matrix,
    Tile,
    multiply,
    parts_of,
)
from services.engine.model.operators.fp8_rounding import RoundedRows, round_rows
from services.engine.model.operators.product_tiles import MOST_DIVIDED, MOST_PARTS

__all__ = ["Fp8Plan"]

_MEASURED = (16, 32, 64, 128, 256)
"""Numbers of rows with which kernels are measured; more rows than the last have torch's product"""
_TIMED_BYTES = 256 << 20
"""Bytes of weights that a measurement reads, several times those of an L2 cache"""
_WITH_DESCRIPTORS = (9, 0)
"""Least compute capability with a tensor memory accelerator"""
_FEW_REGISTERS = 10
"""Compute capability of a B200, where the largest tile spills registers if groups have scales"""


class Product(ABC):
    """A kernel of products."""

    @abstractmethod
    def multiply(self, rows: RoundedRows, matrix: Fp8Matrix, out: Tensor, *, adds: bool) -> None:
        """Write rows @ weight.T + bias to `out` [n, outputs], or add it."""


@dataclass(frozen=True, slots=True)
class _OurProduct(Product):
    """Our kernel; all its products of up to 64 rows sum in the same order."""

    tile: Tile
    parts: int

    def multiply(self, rows: RoundedRows, matrix: Fp8Matrix, out: Tensor, *, adds: bool) -> None:
        multiply(rows, matrix, self.tile, self.parts, out, adds=adds)

    def __str__(self) -> str:
        loads = "TMA" if self.tile.by_descriptor else "cp.async"
        return f"{self.tile.rows}x{self.tile.outputs}, {loads}, {self.parts} parts"


@dataclass(frozen=True, slots=True)
class _TorchProduct(Product):
    """torch's product with a scale for each row and each output."""

    dtype: torch.dtype

    def multiply(self, rows: RoundedRows, matrix: Fp8Matrix, out: Tensor, *, adds: bool) -> None:
        if not adds and out.dtype == self.dtype:
            self._multiply(rows, matrix, out)
            return
        product = torch.empty_like(out, dtype=self.dtype)
        self._multiply(rows, matrix, product)
        if adds:
            out += product
        else:
            out.copy_(product)

    def _multiply(self, rows: RoundedRows, matrix: Fp8Matrix, out: Tensor) -> None:
        torch._scaled_mm(
            rows.numbers,
            matrix.weight.numbers.T,
            scale_a=rows.scales,
            scale_b=matrix.weight.scales,
            bias=matrix.bias,
            out_dtype=out.dtype,
            use_fast_accum=True,
            out=out,
        )

    def __str__(self) -> str:
        return "torch"


class Fp8Plan:
    """The kernels for all weights of one shape, by number of rows."""

    def __init__(self, matrix: Fp8Matrix, dtype: torch.dtype) -> None:
        """dtype: that of the outputs."""
        device = matrix.weight.numbers.device
        # Triton's interpreter stands for an H100.
        is_cuda = device.type == "cuda"
        capability = torch.cuda.get_device_capability(device) if is_cuda else _WITH_DESCRIPTORS
        self._dtype = dtype
        self._has_descriptors = capability >= _WITH_DESCRIPTORS
        self._parts = parts_of(matrix, TILES[0], count_multiprocessors(device))
        self._has_torch = matrix.group is None
        spills = capability[0] == _FEW_REGISTERS and not self._has_torch
        self._tiles = TILES[:-1] if spills else TILES
        self._products: dict[int, Product] = {rows: self._usual(rows) for rows in _MEASURED}
        self._largest: Product
        if self._has_torch:
            self._largest = _TorchProduct(dtype)
        else:
            self._largest = _OurProduct(self._tiles[-1], 1)

    def product(self, count: int) -> Product:
        """Return the kernel for `count` rows."""
        for rows, product in self._products.items():
            if count <= rows:
                return product
        return self._largest

    def measure(self, matrices: Sequence[Fp8Matrix]) -> None:
        """Choose kernels by their times with some weights of this shape."""
        outputs, inputs = matrices[0].shape
        device = matrices[0].weight.numbers.device
        enough = _TIMED_BYTES // matrices[0].weight.numbers.nbytes + 1
        for rows in _MEASURED:
            products = self._candidates(rows)
            rounded = round_rows(torch.randn(rows, inputs, device=device), matrices[0].group)
            out = torch.empty(rows, outputs, dtype=self._dtype, device=device)
            candidates = {
                product: [
                    partial(_launch, product, rounded, matrix, out) for matrix in matrices[:enough]
                ]
                for product in products
            }
            what = f"FP8 product of {rows} rows, {outputs} outputs and {inputs} inputs"
            chosen = fastest(candidates, self._usual(rows), what)
            if rows == _MEASURED[0] and isinstance(chosen, _OurProduct):
                self._parts = chosen.parts
            self._products[rows] = chosen

    def _usual(self, rows: int) -> Product:
        """Return the kernel that is used without a measurement."""
        if rows > MOST_DIVIDED and self._has_torch:
            return _TorchProduct(self._dtype)
        return self._ours(rows, self._parts)

    def _ours(self, rows: int, parts: int) -> _OurProduct:
        tile = next((tile for tile in self._tiles if tile.rows >= rows), self._tiles[-1])
        return _OurProduct(tile, parts if rows <= MOST_DIVIDED else 1)

    def _candidates(self, rows: int) -> list[Product]:
        """Return the kernels to measure, first the one whose output the others must have."""
        ours = [self._ours(rows, self._parts)]
        if rows == _MEASURED[0]:
            others = {max(1, self._parts // 2), min(2 * self._parts, MOST_PARTS)} - {self._parts}
            ours += [self._ours(rows, parts) for parts in sorted(others)]
        if self._has_descriptors:
            ours += [_OurProduct(each.tile.with_descriptor(), each.parts) for each in ours]
        theirs = [_TorchProduct(self._dtype)] if self._has_torch else []
        return [*theirs, *ours]


def _launch(product: Product, rows: RoundedRows, matrix: Fp8Matrix, out: Tensor) -> Tensor:
    product.multiply(rows, matrix, out, adds=False)
    return out
