"""Sets of numbers: bounds, multiples and excluded numbers."""

import math
from collections.abc import Collection, Iterator
from dataclasses import dataclass, replace
from fractions import Fraction

from services.common.json_values import Json
from services.grammar import GrammarError

__all__ = ["EVERY_NUMBER", "NumberSet", "number_of"]

_MAX_MULTIPLE = 2**32 - 1
_INTERVALS = 16  # unit intervals that stand for all fractions


@dataclass(frozen=True, slots=True)
class NumberSet:
    """The numbers that satisfy all constraints. None: no constraint."""

    values: frozenset[Fraction] | None = None
    integer: bool | None = None
    """True = integers only; False = fractions only; None = both"""
    low: Fraction | None = None
    low_open: bool = False
    high: Fraction | None = None
    high_open: bool = False
    multiples: frozenset[Fraction] = frozenset()
    not_multiples: frozenset[Fraction] = frozenset()
    not_values: frozenset[Fraction] = frozenset()

    def intersection(self, other: "NumberSet") -> "NumberSet | None":
        """Return the numbers in both sets, or None if there are none."""
        if None not in (self.integer, other.integer) and self.integer != other.integer:
            return None
        low, low_open = max(
            (s.low, s.low_open) for s in (self, other) if s.low is not None
        ) if (self.low, other.low) != (None, None) else (None, False)  # fmt: skip
        high, high_closed = min(
            (s.high, not s.high_open) for s in (self, other) if s.high is not None
        ) if (self.high, other.high) != (None, None) else (None, True)  # fmt: skip
        values = self.values if other.values is None else other.values
        if self.values is not None and other.values is not None:
            values = self.values & other.values
        both = NumberSet(
            values,
            other.integer if self.integer is None else self.integer,
            low,
            low_open,
            high,
            not high_closed,
            self.multiples | other.multiples,
            self.not_multiples | other.not_multiples,
            self.not_values | other.not_values,
        )
        return both._normalized()

    def _normalized(self) -> "NumberSet | None":
        if self.multiples & self.not_multiples:
            return None
        if self.values is not None:
            values = frozenset(value for value in self.values if self._has(value))
            return NumberSet(values) if values else None
        if self.low is not None and self.high is not None:
            if self.low > self.high or (
                self.low == self.high and (self.low_open or self.high_open)
            ):
                return None
            if self.low == self.high:
                return replace(self, values=frozenset([self.low]))._normalized()
        kept = frozenset(
            value for value in self.not_values if self._has(value, ignores_exclusion=True)
        )
        return replace(self, not_values=kept)

    def _has(self, value: Fraction, *, ignores_exclusion: bool = False) -> bool:
        return (
            (self.integer is None or self.integer == (value.denominator == 1))
            and (self.low is None or value > self.low or (value == self.low and not self.low_open))
            and (
                self.high is None
                or value < self.high
                or (value == self.high and not self.high_open)
            )
            and all((value / m).denominator == 1 for m in self.multiples)
            and not any((value / m).denominator == 1 for m in self.not_multiples)
            and (ignores_exclusion or value not in self.not_values)
        )

    def obstacle(self) -> str | None:
        """Return the keyword that no grammar can enforce, or None."""
        if self.values is None and self.integer is False and not list(self._fractions()):
            return '"not" over "integer"'
        return '"not" over "multipleOf"' if self.values is None and self.not_multiples else None

    def schemas(self) -> Iterator[dict[str, Json]]:
        """Yield native schemas whose union is the set, or a part of it for fractions."""
        if self.values is not None:
            yield self._schema()
            return
        if self.integer is False:
            yield from self._fractions()
            return
        edges = sorted(self.not_values)
        for low, high in zip([None, *edges], [*edges, None], strict=True):
            part = replace(self, not_values=frozenset())
            if low is not None:
                part = part.intersection(NumberSet(low=low, low_open=True)) or part
            if high is not None:
                part = part.intersection(NumberSet(high=high, high_open=True)) or part
            yield part._schema()

    def _fractions(self) -> Iterator[dict[str, Json]]:
        """Yield unit intervals without their integer bounds, near zero or the set's bounds."""
        first = -_INTERVALS // 2
        if self.low is not None:
            first = max(first, math.floor(self.low))
        if self.high is not None and (self.low is None or self.high < first + _INTERVALS):
            first = min(first, math.ceil(self.high) - _INTERVALS)
        for whole in range(first, first + _INTERVALS):
            between = NumberSet(None, None, Fraction(whole), True, Fraction(whole + 1), True)
            part = replace(self, integer=None).intersection(between)
            if part is not None and not (part.multiples or part.not_multiples):
                yield from part.schemas()

    def _schema(self) -> dict[str, Json]:
        if self.values is not None:
            return {"enum": [_json(value) for value in sorted(self.values)]}
        schema: dict[str, Json] = {"type": "integer" if self.integer else "number"}
        if self.low is not None:
            schema["exclusiveMinimum" if self.low_open else "minimum"] = _json(self.low)
        if self.high is not None:
            schema["exclusiveMaximum" if self.high_open else "maximum"] = _json(self.high)
        if self.multiples:
            schema["multipleOf"] = _json(_least_common_multiple(self.multiples))
        return schema


EVERY_NUMBER = NumberSet()


def number_of(value: Json) -> Fraction | None:
    """Return the exact decimal value of a JSON number, or None for another value."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return Fraction(value) if isinstance(value, int) else Fraction(repr(value))


def _least_common_multiple(numbers: Collection[Fraction]) -> Fraction:
    unit = math.lcm(*(number.denominator for number in numbers))
    multiple = Fraction(math.lcm(*(int(number * unit) for number in numbers)), unit)
    if len(numbers) > 1 and multiple * unit > _MAX_MULTIPLE:  # llguidance overflows there
        listed = ", ".join(map(str, map(_json, sorted(numbers))))
        raise GrammarError(f"multipleOf can't be enforced for {listed} together.")
    return multiple


def _json(value: Fraction) -> int | float:
    return value.numerator if value.denominator == 1 else float(value)
