"""Quantized weights in a GPU's memory: codes and numbers in tiles, as the kernels read them.

A tile is `TILE` inputs of one output. Its codes lie in blocks of `width` inputs: integer c of a
plane holds the codes of input c of each block, so that one mask selects the codes of two blocks.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple, TypeAlias

import torch
from torch import Tensor
from torch.nn.functional import pad

from services.engine.model.checkpoint.quantized import (
    BlockNumbers,
    GroupNumbers,
    QuantizedWeight,
)
from services.engine.model.operators.code_planes import BYTE, FIVE_BITS, join_codes

__all__ = [
    "TILE",
    "CodeValues",
    "Kind",
    "PackedForm",
    "PackedWeight",
    "StoredCodes",
    "alike_runs",
    "have_one_order",
    "in_one_form",
]

TILE = 256
"""Number of inputs of a tile"""
Kind: TypeAlias = Literal["float16", "bfloat16", "float32", "level", "small", "exponent", "zero"]
"""Form of stored numbers. A level is an int8 times the tile's float16 factor. Small levels are
those of scales and offsets together, from 0 to 63, in 6 bits each. An exponent n means
2 ** (n - 127), but 0 means 0. A zero is the code that means 0, in place of an offset"""
_DTYPES: dict[Kind, torch.dtype] = {
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
    "float32": torch.float32,
    "level": torch.int8,
    "small": torch.int8,
    "exponent": torch.uint8,
    "zero": torch.uint8,
}
_HALVES: tuple[Kind, ...] = ("bfloat16", "float16")
_FLOATS = frozenset[Kind](("float16", "bfloat16", "float32", "zero"))
"""Kinds whose numbers float32 holds"""
_WORD = 4
"""Bytes of an integer"""
_GROUPS = (16, 32, 64, 128, 256)
"""Widths of groups of which a tile has one or more"""
_AT_ONCE = 1 << 24
"""Number of codes that are packed at a time, to bound the memory"""
_MOST_ZERO = 255
_SMALL_BITS = 6


@dataclass(frozen=True, slots=True)
class PackedForm:
    """Form of a packed weight, equal for all weights that one kernel multiplies."""

    bits: int
    """Bits of a code: 4, 5, 6 or 8"""
    group: int
    """Number of inputs that share a scale: a divisor or a multiple of `TILE`; 0: all inputs"""
    scales: Kind
    offsets: Kind | None
    """None: the middle code means 0, or `values` says what codes mean"""
    values: tuple[float, ...] = ()
    """16 numbers that codes of 4 bits stand for; empty: the codes themselves"""

    @property
    def width(self) -> int:
        """Number of inputs of a block, which lie in one group."""
        return 16 if self.bits in (FIVE_BITS, 6) or self.group == 16 else 32

    @property
    def integers(self) -> int:
        """Number of int32 with the codes of a tile."""
        return TILE * self.bits // 32

    @property
    def blocks(self) -> int:
        """Number of blocks of a tile."""
        return TILE // self.width

    @property
    def blocks_of_plane(self) -> int:
        """Number of blocks whose codes, or the lower 4 bits of them, lie in the same integers."""
        return 4 if self.bits == BYTE else 8

    @property
    def blocks_of_group(self) -> int:
        """Number of neighbouring blocks of a tile that share a scale."""
        return self.blocks // self.groups

    @property
    def has_offsets(self) -> bool:
        """True if numbers are added to scaled codes."""
        return self.offsets is not None and self.offsets != "zero"

    @property
    def has_factors(self) -> bool:
        """True if each tile has a factor of its scales, and of small levels one of its offsets."""
        return self.scales in ("level", "small")

    @property
    def groups(self) -> int:
        """Number of scales of a tile."""
        return TILE // self.group if 0 < self.group < TILE else 1

    @property
    def repeats(self) -> int:
        """Number of tiles that share their numbers; 0: all of an output."""
        return max(1, self.group // TILE) if self.group else 0

    @property
    def offset_word(self) -> int:
        """Index of the first int32 with offsets among the numbers of a tile."""
        return _words(self.scales, self.groups)

    @property
    def middle(self) -> int:
        """The code that means 0 where neither offsets nor `values` tell."""
        return 0 if self.has_offsets else 2 ** (self.bits - 1)

    @property
    def factor_word(self) -> int:
        """Index of the int32 with the factors of scales and offsets, if there are any."""
        if self.scales == "small":
            return -(-2 * self.groups * _SMALL_BITS // 32)
        return self.offset_word + (0 if self.offsets is None else _words(self.offsets, self.groups))

    @property
    def words(self) -> int:
        """Number of int32 with the numbers of a tile."""
        return self.factor_word + self.has_factors

    def rows(self, inputs: int) -> int:
        """Return the number of rows of numbers that a weight of so many inputs has."""
        return -(-inputs // (TILE * self.repeats)) if self.repeats else 1


class CodeValues(NamedTuple):
    """Numbers that codes of 4 bits stand for, each the sum of two of 16 bits.

    The sum holds a float32 but for its last bits.
    """

    terms: Tensor
    """int32 [16]: the larger term of each number lies in the lower half"""
    num_terms: int
    """1 if all smaller terms are 0, else 2"""

    @staticmethod
    def of(values: Sequence[float], dtype: torch.dtype, device: torch.device) -> "CodeValues":
        """Divide numbers for products whose activations have this type."""
        kind = torch.bfloat16 if dtype == torch.bfloat16 else torch.float16
        exact = torch.tensor(values, dtype=torch.float64)
        larger = exact.to(kind)
        smaller = (exact - larger.double()).to(kind)
        both = torch.stack((larger, smaller), dim=1).view(torch.int32).flatten()
        return CodeValues(both.to(device), 1 + bool(smaller.any()))


@dataclass(frozen=True, slots=True)
class StoredCodes:
    """A weight as a checkpoint stores it, whose numbers lie on the device."""

    weight: QuantizedWeight
    form: PackedForm
    scales: Tensor
    """[outputs, groups] in the type of `form.scales`"""
    scale_factors: Tensor | None
    """float16 [outputs, n]"""
    offsets: Tensor | None
    """[outputs, groups] in the type of `form.offsets`"""
    offset_factors: Tensor | None

    @staticmethod
    def of(weight: QuantizedWeight, device: torch.device) -> "StoredCodes | None":
        """Read the numbers of a weight; return None if no form holds it without loss."""
        inputs, group = weight.shape[1], weight.group
        if group not in _GROUPS and group % TILE:
            if group != inputs:
                return None
            group = 0
        scales = _on(weight.scales, device)
        own, other = _smallest(scales, inputs), None
        if weight.offsets is not None:
            offsets = _on(weight.offsets, device)
            zeros = None if offsets.each.dtype != torch.float32 else _zeros(scales, offsets)
            other = _smallest(offsets, inputs) if zeros is None else _Numbers("zero", zeros, None)
            own, other = _with_small_levels(own, other, offsets)
        values = tuple(map(float, weight.values))
        kind = None if other is None else other.kind
        return StoredCodes(
            weight,
            PackedForm(_bits(weight), group, own.kind, kind, values),
            own.each,
            own.factors,
            None if other is None else other.each,
            None if other is None else other.factors,
        )

    @property
    def shape(self) -> tuple[int, int]:
        """Outputs and inputs."""
        return self.weight.shape

    def in_form(self, form: PackedForm) -> "StoredCodes":
        """Return the same weight with numbers of the kinds of `form`, which hold them."""
        scales, offsets, own = self.scales, self.offsets, self.form
        if offsets is None and form.offsets is not None:
            offsets = torch.full_like(scales, own.middle, dtype=torch.uint8)
            own = replace(own, offsets="zero")
        if own.offsets == "zero" and form.offsets == "float32":
            assert offsets is not None
            offsets = -offsets.float() * scales.float()
        if offsets is not None and form.offsets is not None:
            offsets = offsets.to(_DTYPES[form.offsets])
        return replace(self, form=form, scales=scales.to(_DTYPES[form.scales]), offsets=offsets)

    def numbers(self) -> Tensor:
        """Return int32 [rows, outputs, words]: scales, offsets and factors of each tile."""
        form, (outputs, inputs) = self.form, self.shape
        rows = form.rows(inputs)
        if form.scales == "small":
            assert self.offsets is not None
            parts = [_small_levels(self.scales, self.offsets, rows)]
        else:
            parts = [_in_words(self.scales, rows, form.groups)]
            if self.offsets is not None:
                parts.append(_in_words(self.offsets, rows, form.groups))
        if form.has_factors:
            both = [
                torch.zeros((outputs, rows), dtype=torch.float16, device=self.scales.device)
                if each is None
                else _repeated(each, rows)
                for each in (self.scale_factors, self.offset_factors)
            ]
            parts.append(torch.stack(both, dim=2).view(torch.int32))
        return torch.cat(parts, dim=2).transpose(0, 1)

    def codes(self, part: slice, device: torch.device) -> Tensor:
        """Return the codes of some outputs, int32 [tiles, outputs, integers]."""
        codes = self.weight.codes
        if isinstance(codes, Tensor):
            unpacked = codes[part].to(device)
        else:
            rows = codes.rows[part] if codes.order is None else codes.rows[codes.order[part]]
            # A code of 5 bits without its lift has the middle of 5 bits in place of that of 6.
            layout = codes.layout
            if self.form.bits == FIVE_BITS:
                layout = replace(layout, lift=0)
            unpacked = replace(codes, rows=rows.to(device), order=None, layout=layout).decode()
        return _in_blocks(unpacked, self.form)


@dataclass(frozen=True, slots=True)
class PackedWeight:
    """A weight [outputs, inputs] on the device."""

    form: PackedForm
    inputs: int
    codes: Tensor
    """int32 [tiles, outputs, integers]; [count, …] of a stack of weights"""
    numbers: Tensor
    """int32 [tiles / repeats, outputs, words]: scales, offsets, factors; [count, …] of a stack"""
    values: CodeValues | None
    """Numbers that the codes stand for; None: the codes are the numbers"""

    @property
    def outputs(self) -> int:
        return self.codes.shape[-2]

    @property
    def nbytes(self) -> int:
        return self.codes.nbytes + self.numbers.nbytes

    @staticmethod
    def of(
        weights: Sequence[StoredCodes], dtype: torch.dtype, device: torch.device
    ) -> "PackedWeight":
        """Pack the outputs of weights of one form, one after the other.

        dtype: that of activations.
        """
        packed = PackedWeight.stack(weights, 1, dtype, device).part(0)
        packed.put(weights)
        return packed

    @staticmethod
    def stack(
        weights: Sequence[StoredCodes], count: int, dtype: torch.dtype, device: torch.device
    ) -> "PackedWeight":
        """Allocate `count` weights like that of these outputs, in one more dimension."""
        form, inputs = weights[0].form, weights[0].shape[1]
        outputs, tiles = sum(weight.shape[0] for weight in weights), -(-inputs // TILE)
        shape, rows = (tiles, outputs, form.integers), (form.rows(inputs), outputs, form.words)
        return PackedWeight(
            form,
            inputs,
            torch.empty((count, *shape), dtype=torch.int32, device=device),
            torch.empty((count, *rows), dtype=torch.int32, device=device),
            CodeValues.of(form.values, dtype, device) if form.values else None,
        )

    def part(self, number: int) -> "PackedWeight":
        """View one weight of a stack."""
        return replace(self, codes=self.codes[number], numbers=self.numbers[number])

    def put(self, weights: Iterable[StoredCodes]) -> None:
        """Copy weights of this form, one after the other."""
        first = 0
        for weight in weights:
            outputs, inputs = weight.shape
            self.numbers[:, first : first + outputs] = weight.numbers()
            step = max(1, _AT_ONCE // inputs)
            for begin in range(0, outputs, step):
                part = slice(begin, min(begin + step, outputs))
                codes = weight.codes(part, self.codes.device)
                self.codes[:, first + part.start : first + part.stop] = codes
            first += outputs


def alike_runs(weights: Iterable[StoredCodes]) -> Iterator[Sequence[StoredCodes]]:
    """Join neighbours of one order of inputs that have one form, or can be given one."""
    run: Sequence[StoredCodes] = []
    for weight in weights:
        joined = in_one_form([*run, weight])
        if joined is None or (run and not have_one_order(run[0], weight)):
            yield run
            joined = [weight]
        run = joined
    yield run


def in_one_form(weights: Sequence[StoredCodes]) -> Sequence[StoredCodes] | None:
    """Give weights the smallest form that holds the numbers of all; None: there is none."""
    forms = [weight.form for weight in weights]
    if len({(form.bits, form.group, form.values) for form in forms}) > 1:
        return None
    scales = _common({form.scales for form in forms})
    kinds = {form.offsets or "zero" for form in forms}
    offsets = None if all(form.offsets is None for form in forms) else _common(kinds)
    if scales is None or (offsets is None and kinds != {"zero"}):
        return None
    form = replace(forms[0], scales=scales, offsets=offsets)
    return [weight.in_form(form) for weight in weights]


def _common(kinds: set[Kind]) -> Kind | None:
    """Return the kind that holds the numbers of all these kinds; None: there is none."""
    if len(kinds) == 1:
        return next(iter(kinds))
    return "float32" if kinds <= _FLOATS else None


def have_one_order(one: StoredCodes, other: StoredCodes) -> bool:
    """Return whether two weights read their inputs in the same order."""
    orders = one.weight.order, other.weight.order
    return orders[0] is orders[1] or (
        orders[0] is not None and orders[1] is not None and torch.equal(orders[0], orders[1])
    )


def _on(numbers: GroupNumbers | BlockNumbers, device: torch.device) -> GroupNumbers:
    """Copy numbers to the device."""
    own = numbers.copied() if isinstance(numbers, BlockNumbers) else numbers
    factors = None if own.factors is None else own.factors.to(device)
    return GroupNumbers(own.each.to(device), factors)


class _Numbers(NamedTuple):
    """Scales or offsets [outputs, groups], and the factors of levels."""

    kind: Kind
    each: Tensor
    factors: Tensor | None


def _smallest(numbers: GroupNumbers, inputs: int) -> _Numbers:
    """Return numbers in the smallest form that holds all of them."""
    if numbers.each.dtype == torch.uint8:
        return _Numbers("exponent", numbers.each, None)
    if numbers.factors is not None and inputs % (TILE * numbers.factors.shape[1]) == 0:
        return _Numbers("level", numbers.each, numbers.factors)
    floats = numbers.float()
    for kind in _HALVES:
        rounded = floats.to(_DTYPES[kind])
        if torch.equal(rounded.float(), floats):
            return _Numbers(kind, rounded, None)
    return _Numbers("float32", floats, None)


def _with_small_levels(
    own: _Numbers, other: _Numbers, offsets: GroupNumbers
) -> tuple[_Numbers, _Numbers]:
    """Return scales and offsets as small levels if both are levels and fit, else with floats."""
    if other.kind != "level":
        return own, other
    both = own.each, other.each
    if own.kind == "level" and all(map(_are_small, both)):
        return own._replace(kind="small"), other._replace(kind="small")
    return own, _Numbers("float32", offsets.float(), None)


def _are_small(levels: Tensor) -> bool:
    return int(levels.min()) >= 0 and int(levels.max()) < 1 << _SMALL_BITS


def _bits(weight: QuantizedWeight) -> int:
    """Return the bits of a code: 5 if the file stores so many."""
    codes = weight.codes
    if isinstance(codes, Tensor) or sum(p.bits for p in codes.layout.planes) != FIVE_BITS:
        return weight.bits
    return FIVE_BITS


def _zeros(scales: GroupNumbers, offsets: GroupNumbers) -> Tensor | None:
    """Return the codes that mean 0, uint8; None if the offsets are no multiples of the scales."""
    each, others = scales.float(), offsets.float()
    zeros = (-others / torch.where(each == 0, 1, each)).round()
    fits = bool(((zeros >= 0) & (zeros <= _MOST_ZERO) & (-zeros * each == others)).all())
    return zeros.to(torch.uint8) if fits else None


def _words(kind: Kind, count: int) -> int:
    return -(-count * _DTYPES[kind].itemsize // _WORD)


def _in_words(numbers: Tensor, rows: int, groups: int) -> Tensor:
    """Return int32 [outputs, rows, words] with `groups` numbers each, of [outputs, numbers]."""
    outputs, count = numbers.shape
    whole = pad(numbers, (0, rows * groups - count)).flatten()
    stored = whole.view(torch.uint8).view(outputs, rows, -1)
    return pad(stored, (0, -stored.shape[2] % _WORD)).view(torch.int32)


def _small_levels(scales: Tensor, offsets: Tensor, rows: int) -> Tensor:
    """Return int32 [outputs, rows, words]: 6 bits of each scale, then of each offset of a tile."""
    outputs = len(scales)
    both = [each.view(outputs, rows, -1).to(torch.int32) for each in (scales, offsets)]
    levels = torch.cat(both, dim=2).unbind(2)
    words = torch.zeros((outputs, rows, -(-len(levels) * _SMALL_BITS // 32)), dtype=torch.int32)
    words = words.to(scales.device)
    for number, level in enumerate(levels):
        word, place = divmod(number * _SMALL_BITS, 32)
        words[..., word] |= level << place
        if place + _SMALL_BITS > 32:
            words[..., word + 1] |= level >> (32 - place)
    return words


def _repeated(factors: Tensor, rows: int) -> Tensor:
    """Return a factor for each tile: [outputs, rows]."""
    return factors.repeat_interleave(rows // factors.shape[1], dim=1)


def _in_blocks(codes: Tensor, form: PackedForm) -> Tensor:
    """Pack codes, uint8 [outputs, inputs], to int32 [tiles, outputs, integers]."""
    outputs, inputs = codes.shape
    blocks = pad(codes, (0, -inputs % TILE)).view(outputs, -1, form.blocks, form.width)
    return join_codes(blocks, form.bits).transpose(0, 1)
