"""Weights in groups of codes, in the form that the kernels pack."""

import ctypes
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from services.engine.kernels.library import (
    CodesCall,
    GroupedCall,
    Native,
    Numbers,
    NumbersCall,
    PlaneCall,
)
from services.engine.model.checkpoint.quantized import BlockCodes, GroupNumbers, QuantizedWeight

__all__ = ["STRIP", "StoredGroups", "alike_runs", "has_kernel"]

_BLOCK = 32
"""Inputs of a block of codes; groups are multiples of it, or half of it"""
STRIP = 8
"""Outputs that are packed together"""
_BYTE = 8


@dataclass(frozen=True, slots=True)
class StoredGroups:
    """A weight as the kernels want it."""

    codes: Tensor | BlockCodes
    bits: int
    group: int
    numbers: Numbers
    scales: GroupNumbers
    offsets: GroupNumbers | None
    values: tuple[int, ...]

    @classmethod
    def of(cls, weight: QuantizedWeight) -> "StoredGroups":
        scales, offsets = weight.scales, weight.offsets
        if offsets is not None and weight.bits == _BYTE:  # the kernel's codes have a sign
            offsets = GroupNumbers(offsets.float() + 2 ** (_BYTE - 1) * scales.float())
        kind, (scales, *further) = _alike([scales] if offsets is None else [scales, offsets])
        codes = weight.codes.contiguous() if isinstance(weight.codes, Tensor) else weight.codes
        further_numbers = further[0] if further else None
        return cls(codes, weight.bits, weight.group, kind, scales, further_numbers, weight.values)

    @property
    def format(self) -> tuple[object, ...]:
        """Weights of a run have this in common."""
        inputs, has_offsets = self.codes.shape[1], self.offsets is not None
        return inputs, self.bits, self.group, self.numbers, has_offsets, self.values

    def call(self, outputs: int | None = None) -> GroupedCall:
        """Describe the packed weight to the kernels. outputs: None = as many as it has."""
        return GroupedCall(
            inputs=self.codes.shape[1],
            outputs=self.codes.shape[0] if outputs is None else outputs,
            group=self.group,
            bits=self.bits,
            numbers=self.numbers,
            has_offsets=self.offsets is not None,
            has_values=bool(self.values),
            values=self.values,
        )

    def pack(self, native: Native, place: int, first_tile: int = 0, tile_step: int = 1) -> None:
        """Pack it at an address, into the tile columns first_tile, first_tile + tile_step, …"""
        offsets = None if self.offsets is None else _numbers_call(self.offsets)
        codes, scales = _codes_call(self.codes), _numbers_call(self.scales)
        native.grouped_pack(self.call(), codes, scales, offsets, place, first_tile, tile_step)


def alike_runs(
    weights: Iterable[QuantizedWeight], outputs: int = STRIP
) -> Iterator[Sequence[StoredGroups]]:
    """Join neighbours that are stored alike; each but a run's last has a multiple of `outputs`."""
    run: list[StoredGroups] = []
    for weight in map(StoredGroups.of, weights):
        if run and (run[-1].format != weight.format or run[-1].codes.shape[0] % outputs):
            yield run
            run = []
        run.append(weight)
    yield run


def _alike(numbers: Sequence[GroupNumbers]) -> tuple[Numbers, Sequence[GroupNumbers]]:
    """Return scales, and offsets if there are any, in the smallest form that holds all of them."""
    if all(each.factors is not None for each in numbers):
        return Numbers.LEVELS, [each.contiguous() for each in numbers]
    for dtype, kind in ((torch.uint8, Numbers.EXPONENTS), (torch.float16, Numbers.HALVES)):
        if all(each.each.dtype == dtype for each in numbers):
            return kind, [each.contiguous() for each in numbers]
    floats = [each.float().contiguous() for each in numbers]
    halves = [each.half() for each in floats]
    if all(torch.equal(half.float(), each) for half, each in zip(halves, floats, strict=True)):
        return Numbers.HALVES, list(map(GroupNumbers, halves))
    return Numbers.FLOATS, list(map(GroupNumbers, floats))


def _codes_call(codes: Tensor | BlockCodes) -> CodesCall:
    """Return a call's argument, which is valid as long as `codes` is."""
    if isinstance(codes, Tensor):
        return CodesCall(rows=codes.data_ptr(), row_bytes=codes.stride(0))
    layout = codes.layout
    planes = [PlaneCall(*plane) for plane in layout.planes]
    call = CodesCall(
        rows=codes.rows.data_ptr(),
        row_bytes=codes.rows.stride(0),
        order=None if codes.order is None else codes.order.data_ptr(),
        planes=(PlaneCall * len(planes))(*planes),
        num_planes=len(planes),
        block_bytes=layout.num_bytes,
        block_codes=layout.num_codes,
    )
    call.table = ctypes.create_string_buffer(bytes(layout.values))  # kept with the call
    call.values = ctypes.addressof(call.table) if layout.values else None
    return call


def _numbers_call(numbers: GroupNumbers) -> NumbersCall:
    factors = None if numbers.factors is None else numbers.factors.data_ptr()
    return NumbersCall(numbers.each.data_ptr(), factors)


def has_kernel(weight: QuantizedWeight) -> bool:
    """Return whether the kernels multiply by these groups."""
    fits = weight.group % _BLOCK == 0 or weight.group == _BLOCK // 2
    return fits and weight.order is None and weight.shape[1] % _BLOCK == 0
