"""Weights in groups of codes, as quantized checkpoints store them."""

import builtins
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from enum import IntEnum
from itertools import accumulate
from typing import NamedTuple, Protocol, TypeAlias

import torch
from torch import Tensor

from services.engine.model.checkpoint import mxfp4
from services.engine.model.checkpoint.mxfp4 import Mxfp4Weight

__all__ = [
    "BlockCodes",
    "BlockLayout",
    "BlockNumbers",
    "GroupNumbers",
    "NumberForm",
    "Plane",
    "QuantizedWeight",
    "StoredRows",
    "Weight",
    "decoded",
    "in_groups",
    "rounded",
    "split",
]


class Plane(NamedTuple):
    """Some bits of a block's codes: each `run` bytes hold, in their lowest `bits` bits, a part of
    `run` codes, then of the next `run` codes in the bits above, and so on."""

    first: int
    """Index of the first byte in the block"""
    bytes: int
    run: int
    bits: int
    shift: int = 0
    """Place of the bits in the code"""


@dataclass(frozen=True, slots=True)
class BlockLayout:
    """Layout of codes in the blocks of a file."""

    num_bytes: int
    num_codes: int
    planes: Sequence[Plane]
    lift: int = 0
    """Number added to the bits, modulo 256"""


@dataclass(frozen=True, slots=True)
class BlockCodes:
    """Codes [outputs, inputs] in the blocks of a mapped file."""

    rows: Tensor
    """uint8 [rows, bytes]"""
    layout: BlockLayout
    order: Tensor | None = None
    """int64 [outputs], the row of each output; None = in order"""

    @property
    def shape(self) -> tuple[int, int]:
        """Outputs and inputs."""
        num_rows, num_bytes = self.rows.shape
        outputs = num_rows if self.order is None else len(self.order)
        return outputs, num_bytes // self.layout.num_bytes * self.layout.num_codes

    def select(self, index: Tensor | slice) -> "BlockCodes":
        """Return the codes or numbers of some outputs, without reading them."""
        if self.order is not None:
            return replace(self, order=self.order[index].contiguous())
        if isinstance(index, slice):
            return replace(self, rows=self.rows[index])
        return replace(self, order=index.contiguous())

    def columns(self, number: int, count: int) -> "BlockCodes | None":
        """Return part `number` of `count` equal parts of the inputs; None if a block is cut."""
        if self.rows.shape[1] // self.layout.num_bytes % count:
            return None
        return replace(self, rows=self.rows.chunk(count, dim=1)[number])

    def decode(self) -> Tensor:
        """Return the codes, uint8 [outputs, inputs]."""
        rows = self.rows if self.order is None else self.rows.index_select(0, self.order)
        blocks = rows.reshape(-1, self.layout.num_bytes)
        shape, device = (len(blocks), self.layout.num_codes), rows.device
        codes = torch.zeros(shape, dtype=torch.uint8, device=device)
        for plane in self.layout.planes:
            packed = blocks[:, plane.first : plane.first + plane.bytes]
            shifts = torch.arange(0, 8, plane.bits, dtype=torch.uint8, device=device)[:, None]
            bits = packed.reshape(len(blocks), -1, 1, plane.run) >> shifts & (1 << plane.bits) - 1
            codes |= bits.reshape(codes.shape) << plane.shift
        return (codes + self.layout.lift).view(self.shape)


@dataclass(frozen=True, slots=True)
class GroupNumbers:
    """Scales or offsets of a weight: a number for each group of inputs of each output."""

    each: Tensor
    """[outputs, inputs / group] in float32, float16, int8 with `factors`, or uint8, where n means
    2 ** (n - 127), but 0 means 0"""
    factors: Tensor | None = None
    """float16 [outputs, n], each a factor of equally many neighbouring groups; None = 1"""

    @property
    def count(self) -> int:
        """Numbers of an output."""
        return self.each.shape[1]

    def float(self) -> Tensor:
        """Return the numbers as float32 [outputs, inputs / group]."""
        if self.each.dtype == torch.uint8:
            return (self.each.int() << 23).view(torch.float32)
        if self.factors is None:
            return self.each.float()
        outputs, count = self.factors.shape
        levels = self.each.float().view(outputs, count, -1)
        return (levels * self.factors.float()[..., None]).view(self.each.shape)

    def contiguous(self) -> "GroupNumbers":
        """Return the same numbers, contiguous in memory."""
        factors = None if self.factors is None else self.factors.contiguous()
        return GroupNumbers(self.each.contiguous(), factors)

    def times(self, factor: builtins.float) -> "GroupNumbers":
        """Return the numbers times a factor."""
        return GroupNumbers(self.float() * factor)

    def rows(self, index: Tensor | slice) -> "GroupNumbers":
        """Return the numbers of some outputs."""
        factors = None if self.factors is None else _rows(self.factors, index)
        return GroupNumbers(_rows(self.each, index), factors)

    def columns(self, number: int, count: int) -> "GroupNumbers | None":
        """Return part `number` of `count` equal parts; None if one is not whole."""
        parts = [self.each] if self.factors is None else [self.each, self.factors]
        if any(part.shape[1] % count for part in parts):
            return None
        return GroupNumbers(*(part.chunk(count, dim=1)[number] for part in parts))


class NumberForm(IntEnum):
    """Forms in which blocks of ggml's types hold the numbers of their groups, as in kernels.h."""

    SCALE = 0
    SCALE_AND_OFFSET = 1
    Q2_K = 2
    Q3_K = 3
    Q4_K = 4
    Q6_K = 5
    IQ4_XS = 6
    EXPONENT = 7


@dataclass(frozen=True, slots=True)
class BlockNumbers:
    """Numbers of groups in the blocks of a mapped file, which are read when they are needed."""

    blocks: Tensor
    """uint8 [rows, bytes]"""
    block_bytes: int
    per_block: int
    form: NumberForm
    read: Callable[[Tensor], GroupNumbers]
    """Function that returns the numbers of some rows [rows, bytes]"""
    first: int = 0
    """Index of the byte in a block at which the form begins"""
    order: Tensor | None = None
    """int64 [outputs], the row of each output; None = in order"""
    factor: builtins.float = 1.0
    stay: bool = True
    """True if the kernels read the numbers there in every step; False: packing copies them"""

    @property
    def count(self) -> int:
        """Numbers of an output."""
        return self.blocks.shape[1] // self.block_bytes * self.per_block

    @property
    def example(self) -> GroupNumbers:
        """Numbers of the same types from a block of zeros."""
        return self.read(torch.zeros(1, self.block_bytes, dtype=torch.uint8))

    def copied(self) -> GroupNumbers:
        """Return the numbers as they are stored, unless a factor changes them."""
        if self.factor != 1:
            return GroupNumbers(self.float())
        numbers = self.read(self.blocks.contiguous())
        return numbers if self.order is None else numbers.rows(self.order)

    def float(self) -> Tensor:
        """Return the numbers as float32 [outputs, inputs / group]."""
        rows = self.blocks if self.order is None else self.blocks.index_select(0, self.order)
        return self.read(rows.contiguous()).float() * self.factor

    def times(self, factor: builtins.float) -> "BlockNumbers":
        """Return the numbers times a factor."""
        return replace(self, factor=self.factor * factor)

    def rows(self, index: Tensor | slice) -> "BlockNumbers":
        """Return the codes or numbers of some outputs, without reading them."""
        if self.order is not None:
            return replace(self, order=self.order[index])
        if isinstance(index, slice):
            return replace(self, blocks=self.blocks[index])
        return replace(self, order=index)

    def columns(self, number: int, count: int) -> "BlockNumbers | None":
        """Return part `number` of `count` equal parts; None if a block is cut."""
        if self.blocks.shape[1] // self.block_bytes % count:
            return None
        return replace(self, blocks=self.blocks.chunk(count, dim=1)[number])


@dataclass(frozen=True, slots=True)
class QuantizedWeight:
    """weight[o, i] = scales[o, i // group] * codes[o, i] + offsets[o, i // group], in float32.

    With values: weight[o, i] = scales[o, i // group] * values[codes[o, i]].
    """

    codes: Tensor | BlockCodes
    """uint8 [outputs, inputs], below 2 ** bits"""
    bits: int
    """Number of bits of a code: 4, 6 or 8"""
    scales: GroupNumbers | BlockNumbers
    offsets: GroupNumbers | BlockNumbers | None = None
    """Numbers to add to scaled codes; None = -scales * 2 ** (bits - 1), or 0 with `values`"""
    order: Tensor | None = None
    """int64 [inputs]: input i is column order[i] of `codes`; None = in order"""
    values: tuple[float, ...] = ()
    """16 numbers that codes of 4 bits stand for; empty = the codes themselves"""

    @property
    def shape(self) -> tuple[int, int]:
        """Outputs and inputs."""
        outputs, inputs = self.codes.shape
        return outputs, inputs

    @property
    def group(self) -> int:
        """Number of inputs that share a scale."""
        return self.shape[1] // self.scales.count

    @property
    def is_mapped(self) -> bool:
        """True if the weight is read from the mapped file when it is needed."""
        return isinstance(self.scales, BlockNumbers) and self.scales.stay

    def decode(self) -> Tensor:
        """Return the weight, float32 [outputs, inputs]."""
        scales = self.scales.float()
        codes = self.codes if isinstance(self.codes, Tensor) else self.codes.decode()
        if self.values:
            codes = torch.tensor(self.values, dtype=torch.float32)[codes.int()]
        numbers = codes.float().view(*scales.shape, -1)
        if self.offsets is None:  # rounded once, as in ggml
            zero = 0 if self.values else 2 ** (self.bits - 1)
            weight = (numbers - zero) * scales[..., None]
        else:
            weight = numbers * scales[..., None] + self.offsets.float()[..., None]
        weight = weight.view(self.shape)
        return weight if self.order is None else weight[:, self.order]

    def rows(self, index: Tensor | slice) -> "QuantizedWeight":
        """Return some outputs."""
        offsets = None if self.offsets is None else self.offsets.rows(index)
        codes = self.codes
        codes = _rows(codes, index) if isinstance(codes, Tensor) else codes.select(index)
        return replace(self, codes=codes, scales=self.scales.rows(index), offsets=offsets)

    def times(self, factor: float) -> "QuantizedWeight":
        """Return the weight times a factor."""
        if factor == 1:
            return self
        offsets = None if self.offsets is None else self.offsets.times(factor)
        return replace(self, scales=self.scales.times(factor), offsets=offsets)

    def columns(self, number: int, count: int) -> "QuantizedWeight | None":
        """Return part `number` of `count` equal parts of the inputs; None if a group is cut."""
        scales = self.scales.columns(number, count)
        offsets = None if self.offsets is None else self.offsets.columns(number, count)
        codes: Tensor | BlockCodes | None
        if isinstance(self.codes, Tensor):
            codes = self.codes.chunk(count, dim=1)[number]
        else:
            codes = self.codes.columns(number, count)
        if self.order is not None or scales is None or codes is None:
            return None
        if self.offsets is not None and offsets is None:
            return None
        return replace(self, codes=codes, scales=scales, offsets=offsets)


class StoredRows(Protocol):
    """Rows of a weight in the format of its file."""

    def decode(self, index: Tensor) -> Tensor:
        """Return the rows `index` (int64 [n]), float32 [n, inputs]."""


Weight: TypeAlias = Tensor | QuantizedWeight | Mxfp4Weight


def in_groups(weight: Mxfp4Weight, *, mapped: bool = False) -> QuantizedWeight:
    """View an MXFP4 weight as groups of codes.

    mapped: the weight lies in a mapped file, and its scales are read when they are needed.
    """
    num_bytes = mxfp4.GROUP_SIZE // 2
    layout = BlockLayout(num_bytes, mxfp4.GROUP_SIZE, [Plane(0, num_bytes, 1, 4)])
    codes = BlockCodes(weight.blocks.flatten(1), layout)
    scales: GroupNumbers | BlockNumbers
    if mapped:
        scales = BlockNumbers(weight.scales, 1, 1, NumberForm.EXPONENT, _exponents)
    else:
        scales = _exponents(weight.scales)
    return QuantizedWeight(codes, 4, scales, values=mxfp4.DOUBLED)


def _exponents(scales: Tensor) -> GroupNumbers:
    return GroupNumbers(mxfp4.exponents(scales))


def decoded(weight: Weight) -> Tensor:
    """Return the weight as a tensor."""
    return weight if isinstance(weight, Tensor) else weight.decode()


def rounded(weight: Tensor, bits: int, group: int) -> QuantizedWeight:
    """Round a weight [outputs, inputs] to the nearest codes, with scales that float16 holds.

    `bits`: 8 for codes of -127 to 127 times the scale; 4 for -8 to 7, where the scale has the sign
    that gives the largest number the code -8.
    """
    groups = weight.float().view(len(weight), -1, group)
    largest = groups.gather(2, groups.abs().argmax(2, keepdim=True))
    scales = (largest.abs() / 127 if bits == 8 else largest / -8).half()
    zero, least, most = (128, 1, 255) if bits == 8 else (8, 0, 15)
    codes = (groups / torch.where(scales == 0, 1, scales) + zero).round().clamp(least, most)
    return QuantizedWeight(
        codes.to(torch.uint8).view(weight.shape), bits, GroupNumbers(scales[..., 0])
    )


def split(weight: Weight, sizes: Sequence[int]) -> Sequence[Weight]:
    """Return parts with `sizes` outputs each."""
    if isinstance(weight, Tensor):
        return weight.split_with_sizes(list(sizes))
    ends = [*accumulate(sizes)]
    return [weight.rows(slice(end - size, end)) for size, end in zip(sizes, ends, strict=True)]


def _rows(tensor: Tensor, index: Tensor | slice) -> Tensor:
    # `index_select` copies whole rows, other indexing each number
    return tensor[index] if isinstance(index, slice) else tensor.index_select(0, index)
