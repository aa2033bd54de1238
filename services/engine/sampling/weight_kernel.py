"""Triton kernel that sums the weights of a draw, without storing them."""

import torch
import triton
import triton.language as tl
from torch import Tensor

__all__ = ["sum_weights"]

_GROUPS = 8
"""Groups of a program"""


def sum_weights(logits: Tensor, largest: Tensor, scales: Tensor, group: int) -> Tensor:
    """Return the sum of 2 ** ((logit - largest) * scale) over each `group` ids.

    logits: float32 [rows, vocabulary], contiguous rows; largest, scales: float32 [rows, 1]; group:
    a power of two. Returns float64 [rows, ceil(vocabulary / group)].
    """
    rows, vocabulary = logits.shape
    groups = triton.cdiv(vocabulary, group)
    sums = torch.empty((rows, groups), dtype=torch.float64, device=logits.device)
    grid = (triton.cdiv(groups, _GROUPS), rows)
    _sum[grid](
        logits,
        largest.contiguous(),
        scales.contiguous(),
        sums,
        logits.stride(0),
        vocabulary,
        groups,
        width=group,
        count=_GROUPS,
    )
    return sums


@triton.jit  # type: ignore[untyped-decorator]
def _sum(  # type: ignore[no-untyped-def]
    logits,  # float32 [rows, stride]
    largest,  # float32 [rows]
    scales,  # float32 [rows]
    sums,  # float64 [rows, groups]
    stride,
    vocabulary,
    groups,
    width: tl.constexpr,
    count: tl.constexpr,
):
    """Sum some groups of a row. Grid: parts of the vocabulary, rows."""
    row = tl.program_id(1).to(tl.int64)
    group = tl.program_id(0) * count + tl.arange(0, count)
    ids = group[:, None] * width + tl.arange(0, width)[None, :]
    values = tl.load(logits + row * stride + ids, mask=ids < vocabulary, other=float("-inf"))
    weights = tl.exp2((values - tl.load(largest + row)) * tl.load(scales + row))
    weights = tl.where(ids < vocabulary, weights, 0.0)
    total = tl.sum(weights.to(tl.float64), axis=1)
    tl.store(sums + row * groups + group, total, mask=group < groups)
