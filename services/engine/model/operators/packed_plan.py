"""Which kernel multiplies how many rows by packed weights of one form and shape."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from services.engine.model.attention.launch_times import fastest
from services.engine.model.operators.packed_kernels import (
    MOST_PARTS,
    MOST_ROWS,
    PackedMatrix,
    count_parts,
    decode,
    multiply,
    tiles_of,
)
from services.engine.model.operators.product_tiles import ProductTile
from services.engine.model.operators.torch_operators import add_product, multiply_into

__all__ = ["PackedPlan"]

_MEASURED = (8, 16, 32, 64, 128, MOST_ROWS)
"""Numbers of rows with which kernels are measured; more rows are multiplied by decoded weights"""
_TIMED_BYTES = 256 << 20
"""Bytes of weights that a measurement reads, several times those of an L2 cache"""
_DECODED_BYTES = 32 << 20
"""Bytes of weights that are decoded at a time, so that a product finds them in the L2 cache"""


class Product(ABC):
    """A way to multiply."""

    @abstractmethod
    def multiply(self, rows: Tensor, matrix: PackedMatrix, out: Tensor, *, adds: bool) -> None:
        """Write rows @ weight.T + bias to `out` [n, outputs], or add it."""


@dataclass(frozen=True, slots=True)
class _OfCodes(Product):
    """A kernel that decodes in registers; all such kernels sum in the same order."""

    tile: ProductTile
    parts: int

    def multiply(self, rows: Tensor, matrix: PackedMatrix, out: Tensor, *, adds: bool) -> None:
        multiply(rows, matrix, self.tile, self.parts, out, adds=adds)

    def __str__(self) -> str:
        return f"codes, {self.tile.rows}x{self.tile.outputs}, {self.parts} parts"


@dataclass(frozen=True, slots=True)
class _OfWeights(Product):
    """Decoding, some outputs at a time, and torch's product with weights in the rows' dtype."""

    def multiply(self, rows: Tensor, matrix: PackedMatrix, out: Tensor, *, adds: bool) -> None:
        outputs, inputs = out.shape[1], rows.shape[1]
        most = min(outputs, max(1, _DECODED_BYTES // (inputs * rows.itemsize)))
        decoded = rows.new_empty((most, inputs))
        compute = add_product if adds else multiply_into
        for first in range(0, outputs, most):
            part = slice(first, min(first + most, outputs))
            weight = decoded[: part.stop - first]
            decode(matrix.weight, first, weight)
            bias = None if matrix.bias is None else matrix.bias[part]
            compute(rows, weight.T, bias, out[:, part])

    def __str__(self) -> str:
        return "decoded weights"


class PackedPlan:
    """The ways to multiply by all weights of one form and shape, by number of rows."""

    def __init__(self, matrix: PackedMatrix, dtype: torch.dtype) -> None:
        """dtype: that of activations."""
        self._dtype = dtype
        self._tiles = tiles_of(matrix.weight.form, matrix.weight.codes.device)
        self._parts = count_parts(matrix.weight)
        self._products: dict[int, Product] = {rows: self._usual(rows) for rows in _MEASURED}

    def product(self, count: int) -> Product:
        """Return the way to multiply `count` rows."""
        for rows, product in self._products.items():
            if count <= rows:
                return product
        return _OfWeights()

    def measure(self, matrices: Sequence[PackedMatrix]) -> None:
        """Choose by the times of products with some weights of this form and shape."""
        weight = matrices[0].weight
        device = weight.codes.device
        some = matrices[: _TIMED_BYTES // weight.nbytes + 1]
        for count in _MEASURED:
            rows = torch.randn(count, weight.inputs, device=device, dtype=self._dtype)
            out = torch.empty(count, weight.outputs, device=device, dtype=self._dtype)
            candidates = {
                product: [partial(_launch, product, rows, matrix, out) for matrix in some]
                for product in self.candidates(count)
            }
            what = f"product of {count} rows, {weight.outputs} outputs and {weight.inputs} inputs"
            chosen = fastest(candidates, self._usual(count), f"{what} in {weight.form}")
            if count == _MEASURED[0] and isinstance(chosen, _OfCodes):
                self._parts = chosen.parts
            self._products[count] = chosen

    def _usual(self, count: int) -> Product:
        """Return the way that is used without a measurement."""
        fits = [tile for tile in self._tiles if tile.rows >= count]
        most = max(tile.rows for tile in self._tiles)
        # of tiles with equally many rows, the last is the largest
        rows = min((tile.rows for tile in fits), default=most)
        return _OfCodes([tile for tile in self._tiles if tile.rows == rows][-1], self._parts)

    def candidates(self, count: int) -> list[Product]:
        """Return the ways to measure, first the one whose output the others must have."""
        rows = sorted({tile.rows for tile in self._tiles})
        fits = [each for each in rows if each >= count][:1] or rows[-2:]
        products: list[Product] = [_OfWeights()]
        products += [_OfCodes(tile, self._parts) for tile in self._tiles if tile.rows in fits]
        if count == _MEASURED[0]:
            others = {max(1, self._parts // 2), min(2 * self._parts, MOST_PARTS)} - {self._parts}
            tile = next(tile for tile in self._tiles if tile.rows in fits)
            products += [_OfCodes(tile, parts) for parts in sorted(others)]
        return products


def _launch(product: Product, rows: Tensor, matrix: PackedMatrix, out: Tensor) -> Tensor:
    product.multiply(rows, matrix, out, adds=False)
    return out
