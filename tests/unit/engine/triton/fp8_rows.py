"""Rows that torch rounds to FP8 as pages of `fp8_pages` hold them, without a kernel."""

import torch
from torch import Tensor

from services.engine.model.attention import fp8_pages

__all__ = ["packed_pages", "rounded"]

LARGEST = 448
"""The largest number of E4M3"""
BIAS = 127
"""Byte of the exponent 0"""


def rounded(rows: Tensor) -> Tensor:
    """Round rows [tokens, heads, width], and return them in float32."""
    numbers, power = _numbers_and_power(rows)
    return (numbers.double() * power).float()


def packed_pages(exact: Tensor) -> Tensor:
    """Return pages in FP8 of keys or values [pages, page, kv_heads, width]."""
    count, page, heads, width = exact.shape
    numbers, power = _numbers_and_power(exact)
    pages = fp8_pages.make_pages(count, page, heads, width)
    pages[:, page * heads * width :] = (power.log2() + BIAS)[..., 0].transpose(1, 2).flatten(1)
    held = fp8_pages.numbers_of(pages, page, heads, width)
    held.copy_(numbers)
    return held


def _numbers_and_power(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Divide rows by the least power of two that brings each to at most 448.

    Returns the numbers in E4M3, and the powers [..., 1] in float64.
    """
    exact = rows.double()
    power = torch.exp2(
        torch.ceil(torch.log2(exact.abs().amax(-1, keepdim=True) / LARGEST)).clamp(min=-126)
    )
    return (exact / power).float().to(torch.float8_e4m3fn), power
