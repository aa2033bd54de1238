"""Triton kernels between a layer's matrix products: one launch in place of three to eighteen.

Each kernel computes in float32 and rounds where torch's operators do.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from services.engine.kernels.dependent_launch import launch_options
from services.engine.kernels.grid_waits import wait_for_writes
from services.engine.model.architecture.activation import Activation, Nonlinearity
from services.engine.model.operators.fp8_rounding import RoundedRows, store_rounded
from services.engine.model.operators.fp8_weights import LARGEST
from services.engine.model.operators.rotation import Rotation

__all__ = [
    "activate",
    "can_round",
    "has_kernel",
    "norm_rows",
    "rotate_heads",
    "rotate_pairs",
    "rotated_tile",
]

_ROTATED = 256
"""Number of pairs that a program of `rotate_heads` rotates: heads × half a head's width"""
_COLUMNS = 1024
"""Number of columns that a program of `activate` computes"""
_ROW_COLUMNS = 16384
"""Most columns of a row that one program holds, to round them with one scale"""
_KINDS = {
    Nonlinearity.SILU: 0,
    Nonlinearity.GELU: 1,
    Nonlinearity.GELU_TANH: 2,
    Nonlinearity.CLAMPED_SWIGLU: 3,
    Nonlinearity.RELU_SQUARED: 4,
}


@triton.jit  # type: ignore[untyped-decorator]
def _norm(  # type: ignore[no-untyped-def]
    rows,
    weight,
    out,
    row_stride,
    out_stride,
    columns,
    epsilon,
    numbers,
    scales,
    groups,
    adds: tl.constexpr,
    width: tl.constexpr,
    largest: tl.constexpr,
    group: tl.constexpr,
    is_dependent: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, width)
    inside = at < columns
    factors = tl.load(weight + at, mask=inside, other=0.0).to(tl.float32)
    wait_for_writes(is_dependent)
    values = tl.load(rows + row * row_stride + at, mask=inside, other=0.0).to(tl.float32)
    scale = tl.rsqrt(tl.sum(values * values) / columns + epsilon)
    normed = (values * scale).to(out.dtype.element_ty).to(tl.float32)
    result = normed * factors
    place = out + row * out_stride + at
    if adds:
        rounded = result.to(out.dtype.element_ty).to(tl.float32)
        result = tl.load(place, mask=inside, other=0.0).to(tl.float32) + rounded
    stored = result.to(out.dtype.element_ty)
    tl.store(place, stored, mask=inside)
    if numbers is not None:
        begin = numbers + row * columns
        exact = tl.where(inside, stored.to(tl.float32), 0.0)
        store_rounded(begin, scales + row * groups, exact, 0, columns, largest, group)


@triton.jit  # type: ignore[untyped-decorator]
def _rotate(  # type: ignore[no-untyped-def]
    heads,
    cosines,
    sines,
    query_norm,
    key_norm,
    token_stride,
    num_heads,
    num_queries,
    half,
    epsilon,
    has_norms: tl.constexpr,
    tile_heads: tl.constexpr,
    width: tl.constexpr,
    is_dependent: tl.constexpr,
):
    """Rotate some heads of one token: [tile_heads, width] of each half. Grid: tokens, tiles."""
    wait_for_writes(is_dependent)
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * tile_heads + tl.arange(0, tile_heads)[:, None]
    at = tl.arange(0, width)[None, :]
    inside = (at < half) & (head < num_heads)
    place = heads + token * token_stride + head * (2 * half) + at
    low, high = rotate_pairs(
        place,
        cosines + token * half + at,
        sines + token * half + at,
        query_norm + at,
        key_norm + at,
        inside,
        at < half,
        head < num_queries,
        half,
        epsilon,
        has_norms,
    )
    tl.store(place, low, mask=inside)
    tl.store(place + half, high, mask=inside)


@triton.jit  # type: ignore[untyped-decorator]
def rotate_pairs(  # type: ignore[no-untyped-def]
    place,
    cosines,
    sines,
    query_norm,
    key_norm,
    inside,
    is_width,
    is_query,
    half,
    epsilon,
    has_norms: tl.constexpr,
):
    """Return the rotated lower and upper halves of heads [heads, width], in their dtype.

    place: addresses of the lower halves; cosines, sines and norms: addresses [1, width] of those of
    the lower halves; inside: which numbers there are; is_query: which heads have `query_norm`.
    """
    dtype = place.dtype.element_ty
    low = tl.load(place, mask=inside, other=0.0).to(tl.float32)
    high = tl.load(place + half, mask=inside, other=0.0).to(tl.float32)
    if has_norms:
        mean = (tl.sum(low * low, 1) + tl.sum(high * high, 1)) / (2 * half)
        scale = tl.rsqrt(mean + epsilon)[:, None]
        low = (low * scale).to(dtype).to(tl.float32)
        high = (high * scale).to(dtype).to(tl.float32)
        queries_low = tl.load(query_norm, mask=is_width, other=0.0).to(tl.float32)
        queries_high = tl.load(query_norm + half, mask=is_width, other=0.0).to(tl.float32)
        keys_low = tl.load(key_norm, mask=is_width, other=0.0).to(tl.float32)
        keys_high = tl.load(key_norm + half, mask=is_width, other=0.0).to(tl.float32)
        low = (low * tl.where(is_query, queries_low, keys_low)).to(dtype).to(tl.float32)
        high = (high * tl.where(is_query, queries_high, keys_high)).to(dtype).to(tl.float32)
    cosine = tl.load(cosines, mask=is_width, other=0.0)
    sine = tl.load(sines, mask=is_width, other=0.0)
    return (low * cosine - high * sine).to(dtype), (high * cosine + low * sine).to(dtype)


@triton.jit  # type: ignore[untyped-decorator]
def _activate(  # type: ignore[no-untyped-def]
    product,
    out,
    columns,
    alpha,
    limit,
    numbers,
    scales,
    groups,
    kind: tl.constexpr,
    gated: tl.constexpr,
    width: tl.constexpr,
    largest: tl.constexpr,
    group: tl.constexpr,
    is_dependent: tl.constexpr,
):
    wait_for_writes(is_dependent)
    row = tl.program_id(0).to(tl.int64)
    first = tl.program_id(1) * width
    at = first + tl.arange(0, width)
    inside = at < columns
    begin = product + row * columns * (2 if gated else 1)
    gate = tl.load(begin + at, mask=inside, other=0.0).to(tl.float32)
    if kind == 4:
        gate = tl.maximum(gate, 0.0)
        result = gate * gate
    elif kind == 3:
        gate = tl.minimum(gate, limit)
        result = gate / (1.0 + tl.exp(-alpha * gate))
    elif kind == 2:
        inner = 0.7978845608028654 * (gate + 0.044715 * gate * gate * gate)
        result = gate / (1.0 + tl.exp(-2.0 * inner))
    elif kind == 1:
        result = 0.5 * gate * (1.0 + tl.math.erf(gate * 0.7071067811865476))
    else:
        result = gate / (1.0 + tl.exp(-gate))
    if gated:
        factor = tl.load(begin + columns + at, mask=inside, other=0.0).to(tl.float32)
        if kind == 3:
            factor = tl.minimum(tl.maximum(factor, -limit), limit) + 1.0
        result = result.to(out.dtype.element_ty).to(tl.float32) * factor
    stored = result.to(out.dtype.element_ty)
    tl.store(out + row * columns + at, stored, mask=inside)
    if numbers is not None:
        begin = numbers + row * columns
        exact = tl.where(inside, stored.to(tl.float32), 0.0)
        store_rounded(begin, scales + row * groups, exact, first, columns, largest, group)


def norm_rows(
    rows: Tensor,
    weight: Tensor,
    epsilon: float,
    out: Tensor,
    *,
    adds: bool = False,
    rounded: RoundedRows | None = None,
    group: int | None = None,
) -> None:
    """Write each row's RMSNorm to `out`, or add it; `out` may be `rows`.

    rows, out: [n, width], the rows contiguous; weight: [width]. rounded: where to write `out`
    in FP8, too, with a scale for each row, or each `group` of a row.
    """
    count, columns = rows.shape
    if count:
        width = max(triton.next_power_of_2(columns), group or 1)
        _norm[(count,)](
            rows,
            weight,
            out,
            rows.stride(0),
            out.stride(0),
            columns,
            epsilon,
            *_pointers(rounded),
            adds=adds,
            width=width,
            largest=LARGEST,
            group=group or width,
            num_warps=_warps(width),
            **launch_options(out.device),
        )


def rotate_heads(
    heads: Tensor,
    num_queries: int,
    rotation: Rotation,
    query_norm: Tensor | None,
    key_norm: Tensor | None,
    epsilon: float,
) -> None:
    """Apply RoPE in place, after the RMSNorms of each head if both are given.

    heads: [tokens, heads, head_dim], first `num_queries` query heads, then key heads; norms:
    [head_dim] each.
    """
    tokens, count, head_dim = heads.shape
    if tokens:
        has_norms = query_norm is not None
        width, tile_heads = rotated_tile(count, head_dim)
        _rotate[(tokens, triton.cdiv(count, tile_heads))](
            heads,
            rotation.cosines,
            rotation.sines,
            query_norm if query_norm is not None else heads,
            key_norm if key_norm is not None else heads,
            heads.stride(0),
            count,
            num_queries,
            head_dim // 2,
            epsilon,
            has_norms=has_norms,
            tile_heads=tile_heads,
            width=width,
            **launch_options(heads.device),
        )


def rotated_tile(heads: int, head_dim: int) -> tuple[int, int]:
    """Return the pairs of a head, as a power of two, and the heads that one program rotates."""
    width = triton.next_power_of_2(head_dim // 2)
    return width, min(max(_ROTATED // width, 1), triton.next_power_of_2(heads))


def has_kernel(activation: Activation) -> bool:
    """Return whether `activate` computes this activation."""
    return activation.nonlinearity in _KINDS and activation.cutoff is None


def can_round(width: int, group: int | None) -> bool:
    """Return whether kernels that write rows of this width can round them, too."""
    return group is not None or width <= _ROW_COLUMNS


def activate(
    product: Tensor,
    activation: Activation,
    out: Tensor,
    *,
    rounded: RoundedRows | None = None,
    group: int | None = None,
) -> None:
    """Write the activation of a product [n, width], or [n, 2 * width] if gated, to out [n, width].

    All tensors are contiguous. rounded: as for `norm_rows`.
    """
    count, columns = out.shape
    if count:
        width = max(triton.next_power_of_2(columns), group or 1)
        if rounded is None or group is not None:
            width = min(_COLUMNS, width)
        _activate[(count, triton.cdiv(columns, width))](
            product,
            out,
            columns,
            activation.alpha,
            activation.limit,
            *_pointers(rounded),
            kind=_KINDS[activation.nonlinearity],
            gated=activation.gated,
            width=width,
            largest=LARGEST,
            group=group or width,
            num_warps=_warps(width),
            **launch_options(out.device),
        )


def _warps(width: int) -> int:
    """Return the number of warps that compute `width` values."""
    return max(4, min(16, width // 512))


def _pointers(rounded: RoundedRows | None) -> tuple[Tensor | None, Tensor | None, int]:
    """Return the numbers, the scales and the number of scales of a row."""
    if rounded is None:
        return None, None, 0
    return rounded.numbers.view(torch.uint8), rounded.scales, rounded.scales.shape[1]
