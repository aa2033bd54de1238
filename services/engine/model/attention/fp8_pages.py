"""Pages of keys or values in FP8 (E4M3), with a power of two for each token and head.

A page is [tokens, kv_heads, width] numbers, and behind them [kv_heads, tokens] exponents of a byte.
A number of the key is the stored one times the power of two. The power depends on the token's own
key alone, so a token is rounded alike in every batch. It is the least that brings the largest
number of the key to at most 448, the largest of E4M3. Scales between two powers would gain little,
since E4M3 has an exponent of its own. A number is wrong by at most a sixteenth of itself, or by
2^-17 of the key's largest number.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from services.engine.kernels.dependent_launch import launch_options
from services.engine.kernels.e4m3 import encode
from services.engine.kernels.grid_waits import wait_for_writes

__all__ = [
    "KV_FP8",
    "bytes_of",
    "decoded_pages",
    "exponent_of",
    "make_pages",
    "numbers_of",
    "places_of",
    "round_token",
    "rounded_pages",
    "store_numbers",
    "write_fp8",
]

KV_FP8 = torch.float8_e4m3fn
_BIAS = 127
"""Byte of the exponent 0, as in float32"""


def make_pages(
    pages: int, page: int, kv_heads: int, width: int, device: torch.device | None = None
) -> Tensor:
    """Return pages of zeros for the keys or values of a layer, uint8 [pages, bytes].

    page: number of tokens of a page; width: that of a key or value.
    """
    size = page * kv_heads * (width + 1)
    return torch.zeros((pages, size), dtype=torch.uint8, device=device)


def numbers_of(pages: Tensor, page: int, kv_heads: int, width: int) -> Tensor:
    """View pages, uint8 [pages, bytes], as E4M3 [pages, page, kv_heads, width].

    The exponents lie in the gaps between pages, where the kernels find them.
    """
    strides = pages.stride(0), kv_heads * width, width, 1
    return pages.view(KV_FP8).as_strided((len(pages), page, kv_heads, width), strides)


def bytes_of(pages: Tensor) -> Tensor | None:
    """View what `numbers_of` returns as bytes; None: the pages are not in FP8."""
    return pages.view(torch.uint8) if pages.dtype == KV_FP8 else None


def decoded_pages(numbers: Tensor) -> Tensor:
    """Return what pages hold in float32, [pages, page, kv_heads, width].

    numbers: a result of `numbers_of`.
    """
    pages, page, kv_heads, width = numbers.shape
    shape, strides = (pages, kv_heads, page), (numbers.stride(0), page, 1)
    first = numbers.storage_offset() + page * kv_heads * width
    exponents = numbers.view(torch.uint8).as_strided(shape, strides, first)
    return torch.ldexp(numbers.float(), exponents.transpose(1, 2)[..., None].int() - _BIAS)


def write_fp8(
    keys: Tensor, values: Tensor, key_pages: Tensor, value_pages: Tensor, slots: Tensor
) -> None:
    """Round each token's keys and values, write them to its slot, and put them back as rounded.

    Attention over the step's own keys then computes with the numbers that later steps read. keys:
    [tokens, kv_heads, head_dim], values: [tokens, kv_heads, value_dim], where only tokens may have
    gaps, the same in both; pages: those of `numbers_of`; slots: int64 [tokens].
    """
    if len(keys):
        _, heads, head_dim = keys.shape
        value_dim = values.shape[2]
        _write_rounded[(len(keys),)](
            keys,
            values,
            bytes_of(key_pages),
            bytes_of(value_pages),
            slots,
            keys.stride(0),
            values.stride(0),
            page_size=key_pages.shape[1],
            kv_heads=heads,
            head_dim=head_dim,
            value_dim=value_dim,
            padded_heads=triton.next_power_of_2(heads),
            padded_dim=triton.next_power_of_2(max(head_dim, value_dim)),
            **launch_options(keys.device),
        )


def rounded_pages(keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
    """Return pages in FP8 of keys and values [pages, page, kv_heads, width], which are rounded."""
    count, page, heads, _ = keys.shape
    key_pages, value_pages = (
        numbers_of(make_pages(count, page, heads, width, keys.device), page, heads, width)
        for width in (keys.shape[3], values.shape[3])
    )
    slots = torch.arange(count * page, device=keys.device)
    write_fp8(keys.flatten(0, 1), values.flatten(0, 1), key_pages, value_pages, slots)
    return key_pages, value_pages


@triton.jit(do_not_specialize=["slots"])  # type: ignore[untyped-decorator]
def _write_rounded(
    keys: tl.tensor,
    values: tl.tensor,
    key_pages: tl.tensor,
    value_pages: tl.tensor,
    slots: tl.tensor,
    key_stride: tl.tensor,
    value_stride: tl.tensor,
    page_size: tl.constexpr,
    kv_heads: tl.constexpr,
    head_dim: tl.constexpr,
    value_dim: tl.constexpr,
    padded_heads: tl.constexpr,
    padded_dim: tl.constexpr,
    is_dependent: tl.constexpr,
) -> None:
    """Round and write one token."""
    wait_for_writes(is_dependent)
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + token)
    key_rows = keys + token * key_stride
    round_token(key_rows, key_pages, slot, page_size, kv_heads, head_dim, padded_heads, padded_dim)
    value_rows = values + token * value_stride
    round_token(
        value_rows, value_pages, slot, page_size, kv_heads, value_dim, padded_heads, padded_dim
    )


@triton.jit  # type: ignore[untyped-decorator]
def round_token(
    rows: tl.tensor,
    pages: tl.tensor,
    slot: tl.tensor,
    page_size: tl.constexpr,
    kv_heads: tl.constexpr,
    width: tl.constexpr,
    padded_heads: tl.constexpr,
    padded_dim: tl.constexpr,
) -> None:
    """Round one token's keys or values [kv_heads, width], in place and into its page."""
    head = tl.arange(0, padded_heads)
    column = tl.arange(0, padded_dim)
    place = head[:, None] * width + column[None, :]
    mask = (head[:, None] < kv_heads) & (column[None, :] < width)
    exact = tl.load(rows + place, mask=mask, other=0.0).to(tl.float32)
    exponent = exponent_of(tl.max(tl.abs(exact), 1))
    numbers, exponents = places_of(pages, slot, page_size, kv_heads, width)
    rounded = store_numbers(numbers + place, exact, exponent, mask)
    tl.store(exponents + head * page_size, exponent.to(tl.uint8), mask=head < kv_heads)
    tl.store(rows + place, rounded.to(rows.dtype.element_ty), mask=mask)


@triton.jit  # type: ignore[untyped-decorator]
def places_of(
    pages: tl.tensor,
    slot: tl.tensor,
    page_size: tl.constexpr,
    kv_heads: tl.constexpr,
    width: tl.constexpr,
) -> tl.tensor:
    """Return where the numbers of a slot begin in `pages`, and where the exponents of its heads.

    An exponent lies `page_size` bytes behind that of the head before.
    """
    page_stride: tl.constexpr = page_size * kv_heads * (width + 1)
    begin = pages + slot // page_size * page_stride
    within = slot % page_size
    numbers = begin + within * (kv_heads * width)
    return numbers, begin + page_size * kv_heads * width + within


@triton.jit  # type: ignore[untyped-decorator]
def exponent_of(largest: tl.tensor) -> tl.tensor:
    """Return the exponent, as a byte in int32, of heads whose largest numbers are `largest`."""
    bits = largest.to(tl.int32, bitcast=True)
    # 448 = 1.75 * 2^8: a larger significand needs the next power of two
    exponent = (bits >> 23) - 8 + ((bits & 0x7FFFFF) > 0x600000).to(tl.int32)
    return tl.maximum(exponent, 1)


@triton.jit  # type: ignore[untyped-decorator]
def store_numbers(
    place: tl.tensor, exact: tl.tensor, exponent: tl.tensor, mask: tl.tensor
) -> tl.tensor:
    """Store numbers [heads, columns] in E4M3. Return in float32 what is stored.

    place: addresses of the bytes; exponent: result of `exponent_of` for the heads.
    """
    inverse = ((254 - exponent) << 23).to(tl.float32, bitcast=True)
    power = (exponent << 23).to(tl.float32, bitcast=True)
    numbers = encode(exact * inverse[:, None])
    tl.store(place, numbers, mask=mask)
    return numbers.to(tl.float8e4nv, bitcast=True).to(tl.float32) * power[:, None]
