"""Weights in groups of codes, in the form that the kernels pack."""

import ctypes
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from services.engine.kernels.library import Native, Numbers
from services.engine.kernels.memory import Arena
from services.engine.kernels.structures import (
    BlocksCall,
    CodesCall,
    GroupedCall,
    MappedCall,
    NumbersCall,
    PlaneCall,
)
from services.engine.model.checkpoint.quantized import (
    BlockCodes,
    BlockNumbers,
    GroupNumbers,
    QuantizedWeight,
)

__all__ = ["STRIP", "StoredGroups", "alike_runs", "has_kernel", "mapped_call", "pack_groups"]

_BLOCK = 32
"""Number of inputs of a block of codes; groups are multiples of it, or half of it"""
STRIP = 8
"""Number of outputs that are packed together"""
_BYTE = 8


@dataclass(frozen=True, slots=True)
class StoredGroups:
    """A weight in groups of codes, as the kernels read it."""

    codes: Tensor | BlockCodes
    bits: int
    group: int
    numbers: Numbers
    scales: GroupNumbers | BlockNumbers
    offsets: GroupNumbers | BlockNumbers | None
    values: tuple[int, ...]

    @classmethod
    def of(cls, weight: QuantizedWeight) -> "StoredGroups":
        scales, offsets = weight.scales, weight.offsets
        bits, group, values = weight.bits, weight.group, tuple(map(int, weight.values))
        if weight.is_mapped:
            return cls(weight.codes, bits, group, Numbers.FLOATS, scales, offsets, values)
        if offsets is not None and bits == _BYTE:  # the kernel's codes have a sign
            offsets = GroupNumbers(offsets.float() + 2 ** (_BYTE - 1) * scales.float())
        kind, (scales, *further) = _alike([scales] if offsets is None else [scales, offsets])
        codes = weight.codes.contiguous() if isinstance(weight.codes, Tensor) else weight.codes
        further_numbers = further[0] if further else None
        return cls(codes, bits, group, kind, scales, further_numbers, values)

    @property
    def is_mapped(self) -> bool:
        """True if the kernels read the weight from the mapped file."""
        return isinstance(self.scales, BlockNumbers) and self.scales.stay

    @property
    def format(self) -> tuple[object, ...]:
        """Form of the weight, equal for all weights that are stored alike."""
        inputs, has_offsets = self.codes.shape[1], self.offsets is not None
        form = self.bits, self.group, self.numbers, has_offsets, self.values
        return inputs, self.is_mapped, *form

    def call(self, outputs: int | None = None) -> GroupedCall:
        """Describe the packed weight to the kernels. outputs: number of them; None = all."""
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
        """Pack the weight at an address, into tile columns first_tile, first_tile + tile_step, …"""
        scales = _copied(self.scales)
        offsets = None if self.offsets is None else _copied(self.offsets)
        calls = [None if each is None else _numbers_call(each) for each in (scales, offsets)]
        codes = _codes_call(self.codes)
        native.grouped_pack(self.call(), codes, *calls, place, first_tile, tile_step)


def pack_groups(
    native: Native,
    arena: Arena,
    weights: Sequence[StoredGroups],
    call: GroupedCall,
    *,
    alternate: bool = False,
) -> Tensor:
    """Pack weights that are stored alike, one after the other or with their tiles interleaved.

    call: describes all of them. Returns uint8 [bytes], with zeros where nothing is packed.
    """

    def pack() -> Tensor:
        packed = arena.take(native.grouped_bytes(call), torch.uint8)
        place = packed.data_ptr()
        for first, weight in enumerate(weights):
            if alternate:
                weight.pack(native, place, first, len(weights))
            else:
                weight.pack(native, place)
                place += native.grouped_bytes(weight.call())
        return packed

    rows = [weight.codes.shape[0] for weight in weights]
    form = "alternate" if alternate else "groups"
    return arena.packed(f"{form} {call.outputs} {rows} {weights[0].format}", pack)


def mapped_call(
    weights: Sequence[StoredGroups], outputs: int, *, alternate: bool = False
) -> tuple[GroupedCall, int]:
    """Describe mapped weights that are stored alike, and return the bytes of their blocks too.

    The call is valid as long as these bytes live. alternate: the weights' tiles alternate.
    """
    call = weights[0].call(outputs)
    blocks = (BlocksCall * len(weights))(*map(_blocks_call, weights))
    call.mapped = ctypes.pointer(MappedCall(blocks, len(weights), alternate))
    call.held = (blocks, weights)
    num_bytes = sum(
        weight.codes.shape[0] * part.shape[1] for weight in weights for part in _parts(weight)
    )
    return call, num_bytes


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


def _alike(
    numbers: Sequence[GroupNumbers | BlockNumbers],
) -> tuple[Numbers, Sequence[GroupNumbers | BlockNumbers]]:
    """Return scales, and offsets if there are any, in the smallest form that holds all numbers.

    The blocks of a file are not read if their types tell the form.
    """
    examples = [_example(each) for each in numbers]
    if all(each.factors is not None for each in examples):
        return Numbers.LEVELS, numbers
    for dtype, kind in ((torch.uint8, Numbers.EXPONENTS), (torch.float16, Numbers.HALVES)):
        if all(each.each.dtype == dtype for each in examples):
            return kind, numbers
    floats = [each.float().contiguous() for each in numbers]
    halves = [each.half() for each in floats]
    if all(torch.equal(half.float(), each) for half, each in zip(halves, floats, strict=True)):
        return Numbers.HALVES, list(map(GroupNumbers, halves))
    return Numbers.FLOATS, list(map(GroupNumbers, floats))


def _example(numbers: GroupNumbers | BlockNumbers) -> GroupNumbers:
    """Return a few numbers of the same types."""
    if isinstance(numbers, BlockNumbers):
        return numbers.example if numbers.factor == 1 else numbers.copied()
    return numbers


def _copied(numbers: GroupNumbers | BlockNumbers) -> GroupNumbers:
    """Return the numbers contiguous in memory."""
    return (numbers.copied() if isinstance(numbers, BlockNumbers) else numbers).contiguous()


def _codes_call(codes: Tensor | BlockCodes) -> CodesCall:
    """Return a call's argument, which is valid as long as `codes` is."""
    if isinstance(codes, Tensor):
        return CodesCall(rows=codes.data_ptr(), row_bytes=codes.stride(0))
    layout = codes.layout
    planes = [PlaneCall(*plane) for plane in layout.planes]
    return CodesCall(
        rows=codes.rows.data_ptr(),
        row_bytes=codes.rows.stride(0),
        order=None if codes.order is None else codes.order.data_ptr(),
        planes=(PlaneCall * len(planes))(*planes),
        num_planes=len(planes),
        block_bytes=layout.num_bytes,
        block_codes=layout.num_codes,
        lift=layout.lift,
    )


def _blocks_call(weight: StoredGroups) -> BlocksCall:
    """Describe a mapped weight, which must outlive the call."""
    codes, numbers = weight.codes, weight.scales
    assert isinstance(codes, BlockCodes)
    assert isinstance(numbers, BlockNumbers)
    return BlocksCall(
        codes=_codes_call(codes),
        numbers=numbers.blocks.data_ptr() + numbers.first,
        number_row_bytes=numbers.blocks.stride(0),
        number_block_bytes=numbers.block_bytes,
        outputs=codes.shape[0],
        num_rows=len(codes.rows),
        form=numbers.form,
        factor=numbers.factor,
    )


def _parts(weight: StoredGroups) -> Sequence[Tensor]:
    """Return the blocks of a mapped weight, and its numbers if they lie apart."""
    codes, numbers = weight.codes, weight.scales
    assert isinstance(codes, BlockCodes)
    assert isinstance(numbers, BlockNumbers)
    apart = codes.rows.data_ptr() != numbers.blocks.data_ptr()
    return (codes.rows, numbers.blocks) if apart else (codes.rows,)


def _numbers_call(numbers: GroupNumbers) -> NumbersCall:
    factors = None if numbers.factors is None else numbers.factors.data_ptr()
    return NumbersCall(numbers.each.data_ptr(), factors)


def has_kernel(weight: QuantizedWeight) -> bool:
    """Return whether the kernels multiply by these groups."""
    fits = weight.group % _BLOCK == 0 or weight.group == _BLOCK // 2
    has_integers = all(isinstance(value, int) for value in weight.values)
    return fits and has_integers and weight.order is None and weight.shape[1] % _BLOCK == 0
