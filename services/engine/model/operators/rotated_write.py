"""Triton kernel that rotates a step's heads and writes keys and values to the cache.

Its result is that of `fused_kernels.rotate_heads` and of the kernel that writes after it.
"""

import triton
import triton.language as tl
from torch import Tensor

from services.engine.kernels.dependent_launch import launch_options
from services.engine.kernels.grid_waits import wait_for_writes
from services.engine.model.attention.fp8_pages import (
    KV_FP8,
    bytes_of,
    exponent_of,
    places_of,
    round_token,
    store_numbers,
)
from services.engine.model.operators.fused_kernels import rotate_pairs, rotated_tile
from services.engine.model.operators.rotation import UnrotatedHeads

__all__ = ["write_rotated"]


def write_rotated(heads: UnrotatedHeads, keys: Tensor, values: Tensor, slots: Tensor) -> None:
    """Norm and rotate heads in place, and write each token's keys and values to its slot.

    keys: contiguous [pages, page, kv_heads, head_dim], values: [pages, page, kv_heads, value_dim],
    or in FP8 as of `fp8_pages.numbers_of`, where the heads become what is stored; slots: int64
    [tokens].
    """
    tokens, count, head_dim = heads.heads.shape
    if not tokens:
        return
    _, page, kv_heads, value_dim = values.shape
    is_fp8 = keys.dtype == KV_FP8
    width, tile_heads = rotated_tile(count, head_dim)
    has_norms = heads.query_norm is not None
    _write_rotated[(tokens, triton.cdiv(count, tile_heads) + 1)](
        heads.heads,
        heads.values,
        bytes_of(keys) if is_fp8 else keys,
        bytes_of(values) if is_fp8 else values,
        slots,
        heads.rotation.cosines,
        heads.rotation.sines,
        heads.query_norm if has_norms else heads.heads,
        heads.key_norm if has_norms else heads.heads,
        heads.heads.stride(0),
        count - kv_heads,
        head_dim // 2,
        heads.epsilon,
        is_fp8=is_fp8,
        page_size=page,
        kv_heads=kv_heads,
        head_dim=head_dim,
        value_dim=value_dim,
        has_norms=has_norms,
        tile_heads=tile_heads,
        width=width,
        padded_heads=triton.next_power_of_2(kv_heads),
        padded_value=triton.next_power_of_2(value_dim),
        **launch_options(slots.device),
    )


@triton.jit(do_not_specialize=["slots"])  # type: ignore[untyped-decorator]
def _write_rotated(
    heads: tl.tensor,
    values: tl.tensor,
    key_pages: tl.tensor,
    value_pages: tl.tensor,
    slots: tl.tensor,
    cosines: tl.tensor,
    sines: tl.tensor,
    query_norm: tl.tensor,
    key_norm: tl.tensor,
    token_stride: tl.tensor,
    num_queries: tl.tensor,
    half: tl.tensor,
    epsilon: tl.tensor,
    is_fp8: tl.constexpr,
    page_size: tl.constexpr,
    kv_heads: tl.constexpr,
    head_dim: tl.constexpr,
    value_dim: tl.constexpr,
    has_norms: tl.constexpr,
    tile_heads: tl.constexpr,
    width: tl.constexpr,
    padded_heads: tl.constexpr,
    padded_value: tl.constexpr,
    is_dependent: tl.constexpr,
) -> None:
    """Rotate some heads of one token, and write the keys among them; or write its values.

    Grid: tokens, and tiles of heads with one more program for the values.
    """
    wait_for_writes(is_dependent)
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + token)
    if tl.program_id(1) == tl.num_programs(1) - 1:
        rows = values + token * token_stride
        if is_fp8:
            round_token(
                *(rows, value_pages, slot, page_size),
                *(kv_heads, value_dim, padded_heads, padded_value),
            )
        else:
            kv_head = tl.arange(0, padded_heads)[:, None]
            value_at = tl.arange(0, padded_value)[None, :]
            source = kv_head * value_dim + value_at
            is_value = (kv_head < kv_heads) & (value_at < value_dim)
            value = tl.load(rows + source, mask=is_value)
            tl.store(value_pages + slot * (kv_heads * value_dim) + source, value, mask=is_value)
    else:
        first = tl.program_id(1) * tile_heads
        number = first + tl.arange(0, tile_heads)
        head = number[:, None]
        at = tl.arange(0, width)[None, :]
        inside = (at < half) & (head < num_queries + kv_heads)
        place = heads + token * token_stride + head * head_dim + at
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
        if first + tile_heads > num_queries:
            column = (head - num_queries) * head_dim + at
            is_key = inside & (head >= num_queries)
            if is_fp8:
                exact_low, exact_high = low.to(tl.float32), high.to(tl.float32)
                largest = tl.maximum(tl.max(tl.abs(exact_low), 1), tl.max(tl.abs(exact_high), 1))
                exponent = exponent_of(largest)
                numbers, exponents = places_of(key_pages, slot, page_size, kv_heads, head_dim)
                rounded_low = store_numbers(numbers + column, exact_low, exponent, is_key)
                rounded_high = store_numbers(numbers + column + half, exact_high, exponent, is_key)
                is_head = (number >= num_queries) & (number < num_queries + kv_heads)
                at_head = exponents + (number - num_queries) * page_size
                tl.store(at_head, exponent.to(tl.uint8), mask=is_head)
                low = tl.where(is_key, rounded_low.to(low.dtype), low)
                high = tl.where(is_key, rounded_high.to(high.dtype), high)
            else:
                target = key_pages + slot * (kv_heads * head_dim) + column
                tl.store(target, low, mask=is_key)
                tl.store(target + half, high, mask=is_key)
        tl.store(place, low, mask=inside)
        tl.store(place + half, high, mask=inside)
