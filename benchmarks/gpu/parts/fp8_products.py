"""Products with FP8 weights at few and many rows: the ways that torch and our kernels offer."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor
from torch.nn.functional import pad

from benchmarks.gpu.context import Context, Row, Rows
from benchmarks.gpu.timing import case, copies
from services.engine.model.operators.fp8_weights import FP8, Fp8Rounding, Fp8Weight

__all__ = ["compare_products"]

_SHAPES = {
    "qkv": (6144, 4096),
    "out": (4096, 4096),
    "gate, up": (28672, 4096),
    "down": (4096, 14336),
}
"""Outputs and inputs of Llama 3.1 8B's products"""
_GROUP = 128
_ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 1024)
_UNSCALED = "no scales (left to the next kernel)"
"""A product that is not the whole function, so it has no error"""
_MOST_EXCHANGED = 64
_PADDED = 16
"""Multiple of rows that an exchanged product needs"""
_MOST_ERROR = 0.06
"""Largest difference from the product in float32, of the root mean square of the results"""

Call = Callable[[], object]


@dataclass(frozen=True, slots=True)
class _Product:
    """One product: rows in bfloat16 and FP8, and the same weight in several buffers."""

    rows: Tensor
    """bfloat16 [rows, inputs]"""
    weights: Sequence[Fp8Weight]
    """Copies with a scale for each output"""
    grouped: Sequence[Fp8Weight]
    """Copies with a scale for each group; they share the numbers with `weights`"""
    plain: Sequence[Tensor]
    """Copies in bfloat16"""


def compare_products(context: Context) -> Rows:
    """Yield time and error of each way, by shape and number of rows.

    Times include the rounding of the rows, because a step pays for it.
    """
    if context.on_gpu:
        context.require_capability(8, 9, "multiplication in FP8")
    shapes = context.size(_SHAPES, {"tiny": (64, 256)})
    for name, (outputs, inputs) in shapes.items():
        weight = torch.randn(outputs, inputs, device=context.device) * inputs**-0.5
        rounded, grouped = Fp8Rounding().round(weight), Fp8Rounding(_GROUP).round(weight)
        count = copies(context, weight.numel())
        weights = [Fp8Weight(rounded.numbers.clone(), rounded.scales) for _ in range(count)]
        by_group = [Fp8Weight(grouped.numbers.clone(), grouped.scales) for _ in range(count)]
        plain = [weight.bfloat16().clone() for _ in range(max(2, count // 2))]
        for number in context.size(_ROWS, (1, 3, 40)):
            rows = torch.randn(number, inputs, device=context.device).bfloat16()
            product = _Product(rows, weights, by_group, plain)
            exact = rows.float() @ weight.T
            for how, calls, size in _ways(product):
                names: Row = {"product": f"{name} {outputs}x{inputs}", "rows": number, "how": how}
                row = case(context, names, lambda: calls, bytes_moved=size)  # noqa: B023
                if "failure" not in row and how != _UNSCALED:
                    row |= _error(calls[0], exact)
                yield row


def _ways(product: _Product) -> Iterator[tuple[str, list[Call], int]]:
    """Yield the name, the calls and the bytes of a weight of each way."""
    # imported here: only GPU machines have Triton
    from services.engine.model.operators.fp8_rounding import round_rows

    rows, count = product.rows, len(product.rows)
    first = product.weights[0]
    size = first.numbers.nbytes

    def by_output(weight: Fp8Weight) -> object:
        rounded = round_rows(rows, None)
        return _scaled(rounded.numbers, weight.numbers.T, rounded.scales, weight.scales)

    one = torch.ones((), device=rows.device)

    def by_tensor(weight: Fp8Weight) -> object:
        return _scaled(round_rows(rows, None).numbers, weight.numbers.T, one, one)

    def exchanged(weight: Fp8Weight) -> object:
        rounded = round_rows(rows, None)
        numbers, scales = rounded.numbers, rounded.scales
        if missing := -count % _PADDED:
            numbers = pad(numbers.view(torch.uint8), (0, 0, 0, missing)).view(FP8)
            scales = pad(scales, (0, 0, 0, missing), value=1.0)
        return _scaled(weight.numbers, numbers.T, weight.scales.T, scales.T).T[:count]

    plain: list[Call] = [partial(torch.mm, rows, each.T) for each in product.plain]
    yield "bfloat16", plain, product.plain[0].nbytes
    yield "rowwise scales", _each(by_output, product.weights), size
    yield _UNSCALED, _each(by_tensor, product.weights), size
    if count <= _MOST_EXCHANGED:
        yield "rowwise scales, operands exchanged", _each(exchanged, product.weights), size
    for how, calls in _ours(product):
        yield how, calls, size


def _ours(product: _Product) -> Iterator[tuple[str, list[Call]]]:
    """Yield the calls of our kernel: by both ways to load, and by numbers of parts."""
    # imported here: only GPU machines have Triton
    from services.engine.model.attention.multiprocessors import count_multiprocessors
    from services.engine.model.operators.fp8_products import (
        TILES,
        Fp8Matrix,
        Tile,
        multiply,
        parts_of,
    )
    from services.engine.model.operators.fp8_rounding import round_rows
    from services.engine.model.operators.product_tiles import MOST_DIVIDED

    rows, count = product.rows, len(product.rows)
    usual = next((tile for tile in TILES if tile.rows >= count), TILES[-1])

    def call(matrix: Fp8Matrix, tile: Tile, parts: int) -> object:
        out = rows.new_empty(count, matrix.shape[0])
        multiply(round_rows(rows, matrix.group), matrix, tile, parts, out, adds=False)
        return out

    for group, weights in ((None, product.weights), (_GROUP, product.grouped)):
        matrices = [Fp8Matrix.of(weight, None, group) for weight in weights]
        parts = parts_of(matrices[0], TILES[0], count_multiprocessors(rows.device))
        tried = {parts} if group else {max(1, parts // 2), parts, 2 * parts}
        tried = tried if count <= MOST_DIVIDED else {1}
        for number in sorted(tried):
            for tile in (usual, usual.with_descriptor()):
                how = f"our kernel, {'TMA' if tile.by_descriptor else 'cp.async'}, {number} parts"
                what = how if group is None else f"{how}, groups of {group}"
                yield what, [partial(call, matrix, tile, number) for matrix in matrices]


def _each(call: Callable[[Fp8Weight], object], weights: Sequence[Fp8Weight]) -> list[Call]:
    return [partial(call, weight) for weight in weights]


def _scaled(left: Tensor, right: Tensor, left_scales: Tensor, right_scales: Tensor) -> Tensor:
    return torch._scaled_mm(
        left,
        right,
        scale_a=left_scales.contiguous(),
        scale_b=right_scales.contiguous(),
        out_dtype=torch.bfloat16,
        use_fast_accum=True,
    )


def _error(call: Call, exact: Tensor) -> Row:
    """Return the difference of a product from the exact one, and whether it is in its bound."""
    found = call()
    assert isinstance(found, Tensor)
    difference = (found.float() - exact).square().mean().sqrt() / exact.square().mean().sqrt()
    error = difference.item()
    return {"error": error, "ok": error <= _MOST_ERROR}
