"""Triton kernels that draw tokens on a GPU."""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

__all__ = ["mark_nan_ids", "pick", "pick_restricted", "sum_weights"]

_GROUPS = 8
"""Number of groups of a program that sums weights"""
_LOG2_E: tl.constexpr = tl.constexpr(1.4426950408889634)


def sum_weights(logits: Tensor, largest: Tensor, scale: Tensor, group: int) -> Tensor:
    """Return the sum of the weights, 2 ** ((logit - largest) * scale), of each `group` ids.

    logits: float32 [rows, vocabulary], rows contiguous; largest: float32 [rows, 1]; scale: float64
    [rows, 1]; group: a power of two. Returns float64 [rows, ceil(vocabulary / group)].
    """
    rows, vocabulary = logits.shape
    groups = triton.cdiv(vocabulary, group)
    sums = torch.empty((rows, groups), dtype=torch.float64, device=logits.device)
    _sum_weights[(triton.cdiv(groups, _GROUPS), rows)](
        logits,
        largest,
        scale,
        sums,
        logits.stride(0),
        largest.stride(0),
        vocabulary,
        groups,
        width=group,
        count=_GROUPS,
    )
    return sums


def pick(
    logits: Tensor, largest: Tensor, scale: Tensor, noise: Tensor, sums: Tensor, group: int
) -> Tensor:
    """Return the id at which each row's cumulative weight passes its noise: int64 [rows].

    noise: float64 [rows, 1], in [0, 1); sums: the result of `sum_weights` for the other arguments.
    """
    rows, vocabulary = logits.shape
    ids = torch.empty(rows, dtype=torch.int64, device=logits.device)
    groups = sums.shape[1]
    _pick[(rows,)](
        logits,
        largest,
        scale,
        noise,
        sums,
        ids,
        logits.stride(0),
        largest.stride(0),
        vocabulary,
        groups,
        width=group,
        count=triton.next_power_of_2(groups),
    )
    return ids


def pick_restricted(
    found: Tensor, ids: Tensor, sums: Tensor, columns: Sequence[Tensor], no_limit: int, more: bool
) -> tuple[Tensor, Tensor]:
    """Apply top-k, top-p and min-p to the likeliest tokens, and draw one of them.

    found, ids: float32 and int64 [rows, candidates], logits and ids by descending logit; sums: the
    result of `sum_weights`; columns: temperature, top_p, min_p, top_k and noise, float64 [rows, 1]
    each; no_limit: top_k of a row without one; more: the vocabulary has other tokens, too. Returns
    ids, int64 [rows], and whether the other tokens can't change them, bool [rows].
    """
    rows, candidates = found.shape
    drawn = torch.empty(rows, dtype=torch.int64, device=found.device)
    is_settled = torch.empty(rows, dtype=torch.bool, device=found.device)
    groups = sums.shape[1]
    _pick_restricted[(rows,)](
        found,
        ids,
        sums,
        *columns,
        drawn,
        is_settled,
        candidates,
        groups,
        no_limit=no_limit,
        more=more,
        width=triton.next_power_of_2(candidates),
        count=triton.next_power_of_2(groups),
    )
    return drawn, is_settled


def mark_nan_ids(logits: Tensor, ids: Tensor) -> Tensor:
    """Return the ids, with -1 where the id's logit is NaN. ids: int64 [rows], contiguous."""
    marked = torch.empty_like(ids)
    _mark_nan[(len(ids),)](logits, ids, marked, logits.stride(0))
    return marked


@triton.jit  # type: ignore[untyped-decorator]
def _sum_weights(  # type: ignore[no-untyped-def]
    logits,  # float32 [rows, stride]
    largest,  # float32 [rows, largest_stride]
    scale,  # float64 [rows]
    sums,  # float64 [rows, groups]
    stride,
    largest_stride,
    vocabulary,
    groups,
    width: tl.constexpr,
    count: tl.constexpr,
):
    """Sum the weights of `count` groups of a row. Grid: parts of the vocabulary, rows."""
    row = tl.program_id(1).to(tl.int64)
    group = tl.program_id(0) * count + tl.arange(0, count)
    ids = group[:, None] * width + tl.arange(0, width)[None, :]
    values = tl.load(logits + row * stride + ids, mask=ids < vocabulary, other=float("-inf"))
    factor = tl.load(scale + row).to(tl.float32)
    weights = tl.exp2((values - tl.load(largest + row * largest_stride)) * factor)
    weights = tl.where(ids < vocabulary, weights, 0.0)
    total = tl.sum(weights.to(tl.float64), axis=1)
    tl.store(sums + row * groups + group, total, mask=group < groups)


@triton.jit  # type: ignore[untyped-decorator]
def _pick(  # type: ignore[no-untyped-def]
    logits,  # float32 [rows, stride]
    largest,  # float32 [rows, largest_stride]
    scale,  # float64 [rows]
    noise,  # float64 [rows]
    sums,  # float64 [rows, groups]
    drawn,  # int64 [rows]
    stride,
    largest_stride,
    vocabulary,
    groups,
    width: tl.constexpr,
    count: tl.constexpr,
):
    """Find the group of the drawn id, then the id. Grid: rows.

    If rounding leaves no entry above the target, the last entry that grew is taken. A row of NaN
    yields id 0.
    """
    row = tl.program_id(0).to(tl.int64)
    place = tl.arange(0, count)
    total = tl.load(sums + row * groups + place, mask=place < groups, other=0.0)
    cumulated = tl.cumsum(total, axis=0)
    end = tl.max(cumulated, axis=0)
    target = tl.load(noise + row) * end
    above = tl.sum((cumulated <= target).to(tl.int32), axis=0)
    last = tl.sum((cumulated < end).to(tl.int32), axis=0)
    group = tl.minimum(above, last)
    before = tl.sum(tl.where(place == group - 1, cumulated, 0.0), axis=0)

    inner = tl.arange(0, width)
    ids = group * width + inner
    values = tl.load(logits + row * stride + ids, mask=ids < vocabulary, other=float("-inf"))
    factor = tl.load(scale + row).to(tl.float32)
    weights = tl.exp2((values - tl.load(largest + row * largest_stride)) * factor)
    weights = tl.where(ids < vocabulary, weights, 0.0)
    within = tl.cumsum(weights.to(tl.float64), axis=0)
    group_end = tl.max(within, axis=0)
    inner_above = tl.sum((within <= target - before).to(tl.int32), axis=0)
    inner_last = tl.sum((within < group_end).to(tl.int32), axis=0)
    token = group * width + tl.minimum(inner_above, inner_last)
    tl.store(drawn + row, tl.minimum(token, vocabulary - 1).to(tl.int64))


@triton.jit  # type: ignore[untyped-decorator]
def _pick_restricted(  # type: ignore[no-untyped-def]
    found,  # float32 [rows, candidates]
    ids,  # int64 [rows, candidates]
    sums,  # float64 [rows, groups]
    temperature,  # float64 [rows], as the next four
    top_p,
    min_p,
    top_k,
    noise,
    drawn,  # int64 [rows]
    is_settled,  # bool [rows]
    candidates,
    groups,
    no_limit: tl.constexpr,
    more: tl.constexpr,
    width: tl.constexpr,
    count: tl.constexpr,
):
    """Draw one of the candidates of a row; `sampler._pick_restricted` is the definition."""
    row = tl.program_id(0).to(tl.int64)
    place = tl.arange(0, width)
    is_candidate = place < candidates
    start = row * candidates
    logits = tl.load(found + start + place, mask=is_candidate, other=float("-inf"))
    values = logits.to(tl.float64) / tl.load(temperature + row)
    largest = tl.load(found + start).to(tl.float64) / tl.load(temperature + row)
    last = tl.load(found + start + candidates - 1)

    limit = tl.load(top_k + row)
    is_limited = limit < candidates
    most = tl.minimum(limit, candidates * 1.0).to(tl.int32)
    is_open = is_candidate & (place < most)
    group = tl.arange(0, count)
    sum_of = tl.load(sums + row * groups + group, mask=group < groups, other=0.0)
    weights = tl.where(is_open, tl.exp2((values - largest) * _LOG2_E), 0.0)
    total = tl.where(is_limited, tl.sum(weights, axis=0), tl.sum(sum_of, axis=0))
    normaliser = largest + tl.log(total)
    shares = tl.where(is_open, tl.exp2((values - normaliser) * _LOG2_E), 0.0)
    cumulated = tl.cumsum(shares, axis=0)

    in_top_p = is_candidate & (cumulated - shares < tl.load(top_p + row))
    floor = tl.load(min_p + row) * tl.exp2((largest - normaliser) * _LOG2_E)
    in_min_p = (shares >= floor) & (shares > 0)
    kept = tl.minimum(tl.sum(in_top_p.to(tl.int32), axis=0), tl.sum(in_min_p.to(tl.int32), axis=0))
    kept = tl.maximum(tl.minimum(kept, most), 1)
    end = tl.sum(tl.where(place == kept - 1, cumulated, 0.0), axis=0)
    is_before = is_candidate & (cumulated <= tl.load(noise + row) * end)
    index = tl.minimum(tl.sum(is_before.to(tl.int32), axis=0), kept - 1)
    tl.store(drawn + row, tl.load(ids + start + index))

    if more:
        border = tl.where(is_limited, most, kept)
        at_border = tl.load(found + start + border - 1)
        is_known = is_limited | (limit == no_limit)
        settled = is_known & ((at_border > last) | (last == float("-inf")))
        tl.store(is_settled + row, settled)
    else:
        tl.store(is_settled + row, True)


@triton.jit
def _mark_nan(  # type: ignore[no-untyped-def]
    logits,  # float32 [rows, stride]
    ids,  # int64 [rows]
    marked,  # int64 [rows]
    stride,
):
    """Replace the id of a row by -1 if its logit is NaN. Grid: rows."""
    row = tl.program_id(0).to(tl.int64)
    token = tl.load(ids + row)
    logit = tl.load(logits + row * stride + token)
    tl.store(marked + row, tl.where(logit == logit, token, -1))
