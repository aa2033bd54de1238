"""Ceilings of the card: copies, reads and large products, beside which other figures stand."""

from __future__ import annotations

import torch

from benchmarks.gpu.context import Context, Rows
from benchmarks.gpu.timing import case

__all__ = ["measure_ceilings"]


def measure_ceilings(context: Context) -> Rows:
    """Yield the rates of a copy, of a read, and of square products in bfloat16 and FP8."""
    device, size = context.device, context.size(2 << 30, 1 << 20)
    source = torch.randint(0, 255, (size,), dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    copy = [lambda: target.copy_(source)] * 2
    yield case(context, {"what": "copy"}, lambda: copy, bytes_moved=2 * size)
    numbers = source.view(torch.int64)
    read = [lambda: numbers.sum()] * 2
    yield case(context, {"what": "read (sum)"}, lambda: read, bytes_moved=size)
    width = context.size(8192, 64)
    left, right = (torch.randn(width, width, device=device).bfloat16() for _ in range(2))
    product = [lambda: left @ right.T] * 2
    what = f"product of {width} by {width}"
    yield case(context, {"what": f"{what}, bfloat16"}, lambda: product, operations=2 * width**3)
    fp8_left, fp8_right = (each.to(torch.float8_e4m3fn) for each in (left, right))
    one = torch.ones((), device=device)
    scaled = [
        lambda: torch._scaled_mm(
            fp8_left, fp8_right.T, one, one, out_dtype=torch.bfloat16, use_fast_accum=True
        )
    ] * 2
    yield case(context, {"what": f"{what}, FP8"}, lambda: scaled, operations=2 * width**3)
