"""Lossless conversion of ggml's block formats to codes in groups.

Source: ggml's dequantization (ggml-quants.c). A block has 32 weights, 64 in NVFP4, and 256 in the
formats whose names end in K or XS, and in TQ2_0.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from services.common.gguf.ggml_types import BLOCK_SIZES, GgmlType
from services.engine.model.checkpoint import mxfp4
from services.engine.model.checkpoint.quantized import (
    BlockCodes,
    BlockLayout,
    BlockNumbers,
    GroupNumbers,
    NumberForm,
    Plane,
    QuantizedWeight,
)

__all__ = ["has_codes", "read_groups"]

_KIND = GgmlType
_FORM = NumberForm
_Array: TypeAlias = npt.NDArray[Any]
_IQ4_VALUES = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)


class _Numbers(NamedTuple):
    """Scales or offsets of blocks."""

    each: _Array
    """float16, int8 or uint8 [blocks, groups], as in GroupNumbers"""
    factors: _Array | None = None
    """float16 [blocks, 1], factors of numbers in int8; None = none"""


@dataclass(frozen=True, slots=True)
class _Format:
    """Form of a block: its codes, and the numbers of its groups."""

    bits: int
    """Number of bits of a code in memory"""
    planes: Sequence[Plane]
    numbers: Callable[[_Array], tuple[_Numbers, _Numbers | None]]
    """Function that returns the scales of blocks [blocks, bytes], and their offsets, if any"""
    form: NumberForm | None
    """Form in which the kernels read a mapped block's scales and offsets; None: they can't"""
    first: int = 0
    """Index of the byte in a block at which `form` begins"""
    lift: int = 0
    """Number added to a code's bits, modulo 256. Without offsets, the middle code means zero"""
    values: tuple[int, ...] = ()
    """Number that each code stands for, before the scale; empty if the code itself is the number"""


def has_codes(kind: GgmlType, *, mapped: bool = False) -> bool:
    """Return whether blocks are codes in groups; others are decoded at loading.

    mapped: whether the kernels also read their scales and offsets from the file.
    """
    form = _FORMATS.get(kind)
    return form is not None and (not mapped or form.form is not None)


def read_groups(rows: _Array, kind: GgmlType, *, mapped: bool = False) -> QuantizedWeight | None:
    """Return the weights of rows [outputs, bytes of a row]; None if `kind` has no codes.

    The codes stay in the rows; the scales and offsets stay there until they are packed, or for good
    if `mapped`: the kernels then read them from the file.
    """
    form = _FORMATS.get(kind)
    if form is None:
        return None
    num_codes, num_bytes = BLOCK_SIZES[kind]
    layout = BlockLayout(num_bytes, num_codes, form.planes, form.lift)
    codes = BlockCodes(torch.from_numpy(rows), layout)
    if form.form is not None:
        return _in_blocks(codes, form, form.form, stay=mapped)
    numbers = form.numbers(rows.reshape(-1, num_bytes))
    scales, offsets = (_of_rows(each, len(rows)) for each in numbers)
    assert scales is not None
    return QuantizedWeight(codes, form.bits, scales, offsets, values=form.values)


def _in_blocks(
    codes: BlockCodes, form: _Format, numbers_form: NumberForm, *, stay: bool
) -> QuantizedWeight:
    """Return a weight whose scales and offsets are read from its blocks when needed."""
    size = codes.layout.num_bytes
    one = form.numbers(np.zeros((1, size), np.uint8))

    def read(number: int) -> Callable[[Tensor], GroupNumbers]:
        def numbers_of(rows: Tensor) -> GroupNumbers:
            found = form.numbers(rows.numpy().reshape(-1, size))[number]
            numbers = _of_rows(found, len(rows))
            assert numbers is not None
            return numbers

        return numbers_of

    each = [
        BlockNumbers(
            codes.rows,
            size,
            numbers.each.shape[1],
            numbers_form,
            read(number),
            first=form.first,
            stay=stay,
        )
        for number, numbers in enumerate(one)
        if numbers is not None
    ]
    offsets = each[1] if len(each) > 1 else None
    return QuantizedWeight(codes, form.bits, each[0], offsets, values=form.values)


def _of_rows(numbers: _Numbers | None, count: int) -> GroupNumbers | None:
    """Return the numbers of the blocks of `count` rows."""
    if numbers is None:
        return None
    each, factors = (
        None if part is None else torch.from_numpy(part.reshape(count, -1)) for part in numbers
    )
    assert each is not None
    return GroupNumbers(each, factors)


def _half(blocks: _Array, at: int) -> _Array:
    """Return a half-precision number of each block: [blocks, 1]."""
    count, size = blocks.shape
    every: _Array = np.ndarray((count, 1), np.float16, blocks, at, (size, size))
    return every.copy()


def _scale(blocks: _Array) -> tuple[_Numbers, None]:
    return _Numbers(_half(blocks, 0)), None


def _last_scale(blocks: _Array) -> tuple[_Numbers, None]:
    return _Numbers(_half(blocks, blocks.shape[1] - 2)), None


def _scale_and_offset(blocks: _Array) -> tuple[_Numbers, _Numbers]:
    return _Numbers(_half(blocks, 0)), _Numbers(_half(blocks, 2))


def _q2_k(blocks: _Array) -> tuple[_Numbers, _Numbers]:
    both = blocks[:, :16].view(np.int8)
    scales = _Numbers(both & 15, _half(blocks, 80))
    return scales, _Numbers(both >> 4 & 15, -_half(blocks, 82))


def _q3_k(blocks: _Array) -> tuple[_Numbers, None]:
    low, high = blocks[:, 96:104], blocks[:, 104:108]
    levels = np.concatenate((low & 15, low >> 4), axis=1)
    levels |= np.concatenate([high >> shift & 3 for shift in (0, 2, 4, 6)], axis=1) << 4
    return _Numbers(levels.view(np.int8) - np.int8(32), _half(blocks, 108)), None


def _levels(blocks: _Array) -> tuple[_Numbers, _Numbers]:
    """Return the 6-bit scales and offsets of a block's 8 groups."""
    words: _Array = np.ascontiguousarray(blocks[:, 4:16]).view(np.uint32)
    first, second, third = words.T  # of four bytes each
    lows = first & 0x3F3F3F3F, second & 0x3F3F3F3F
    fours = third & 0x0F0F0F0F, third >> 4 & 0x0F0F0F0F
    twos = (each >> 6 & 0x03030303 for each in (first, second))
    highs = (four | two << 4 for four, two in zip(fours, twos, strict=True))
    scales, offsets = (
        np.stack((low, high), axis=1).view(np.int8) for low, high in zip(lows, highs, strict=True)
    )
    return _Numbers(scales, _half(blocks, 0)), _Numbers(offsets, -_half(blocks, 2))


def _q6_k(blocks: _Array) -> tuple[_Numbers, None]:
    levels = np.ascontiguousarray(blocks[:, 192:208]).view(np.int8)
    return _Numbers(levels, _half(blocks, 208)), None


def _iq4_xs(blocks: _Array) -> tuple[_Numbers, None]:
    both: _Array = np.ascontiguousarray(blocks[:, 2:4]).view(np.uint16)
    high = (both >> np.arange(0, 16, 2, dtype=np.uint16) & 3).astype(np.uint8)
    packed = blocks[:, 4:8]
    low = np.stack((packed & 15, packed >> 4), axis=2).reshape(len(blocks), 8)
    return _Numbers((low | high << 4).view(np.int8) - np.int8(32), _half(blocks, 0)), None


def _exponents(blocks: _Array) -> tuple[_Numbers, None]:
    return _Numbers(mxfp4.exponents(torch.from_numpy(blocks[:, :1])).numpy()), None


def _small_floats(blocks: _Array) -> tuple[_Numbers, None]:
    """Return the scales of NVFP4's groups, E4M3 without signs, in which the code of NaN means 0.

    They are halved, because the codes stand for twice their numbers.
    """
    bits = torch.from_numpy(blocks[:, :4] & np.uint8(0x7F))
    scales = bits.view(torch.float8_e4m3fn).to(torch.float16).nan_to_num() / 2
    return _Numbers(scales.numpy()), None


_PAIRS = 32
"""Bytes of a run of 1-bit or 2-bit codes in the formats of 256 weights"""
_FORMATS: dict[GgmlType, _Format] = {
    _KIND.Q4_0: _Format(4, [Plane(2, 16, 16, 4)], _scale, _FORM.SCALE),
    _KIND.Q4_1: _Format(4, [Plane(4, 16, 16, 4)], _scale_and_offset, _FORM.SCALE_AND_OFFSET),
    _KIND.Q5_0: _Format(
        6, [Plane(6, 16, 16, 4), Plane(2, 4, 1, 1, 4)], _scale, _FORM.SCALE, lift=16
    ),
    _KIND.Q5_1: _Format(
        6,
        [Plane(8, 16, 16, 4), Plane(4, 4, 1, 1, 4)],
        _scale_and_offset,
        _FORM.SCALE_AND_OFFSET,
    ),
    _KIND.Q8_0: _Format(8, [Plane(2, 32, 32, 8)], _scale, _FORM.SCALE, lift=128),
    _KIND.Q2_K: _Format(4, [Plane(16, 64, _PAIRS, 2)], _q2_k, _FORM.Q2_K),
    _KIND.Q3_K: _Format(
        4, [Plane(32, 64, _PAIRS, 2), Plane(0, 32, _PAIRS, 1, 2)], _q3_k, _FORM.Q3_K, lift=4
    ),
    _KIND.Q4_K: _Format(4, [Plane(16, 128, 32, 4)], _levels, _FORM.Q4_K),
    _KIND.Q5_K: _Format(
        6, [Plane(48, 128, 32, 4), Plane(16, 32, _PAIRS, 1, 4)], _levels, _FORM.Q4_K
    ),
    _KIND.Q6_K: _Format(6, [Plane(0, 128, 64, 4), Plane(128, 64, _PAIRS, 2, 4)], _q6_k, _FORM.Q6_K),
    _KIND.TQ2_0: _Format(4, [Plane(0, 64, _PAIRS, 2)], _last_scale, _FORM.SCALE, first=64, lift=7),
    _KIND.IQ4_NL: _Format(4, [Plane(2, 16, 16, 4)], _scale, _FORM.SCALE, values=_IQ4_VALUES),
    _KIND.IQ4_XS: _Format(4, [Plane(8, 128, 16, 4)], _iq4_xs, _FORM.IQ4_XS, values=_IQ4_VALUES),
    _KIND.MXFP4: _Format(
        4, [Plane(1, 16, 16, 4)], _exponents, _FORM.EXPONENT, values=mxfp4.DOUBLED
    ),
    _KIND.NVFP4: _Format(4, [Plane(4, 32, 8, 4)], _small_floats, None, values=mxfp4.DOUBLED),
}
