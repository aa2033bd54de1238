"""Numbers beyond the precision of a double, in which llguidance computes.

Constants are exact or refused. Bounds are exact up to 2^53; larger ones become narrower, so that no
number beyond them is written.
"""

import math
from collections.abc import Iterator, Mapping
from decimal import Decimal
from fractions import Fraction
from typing import NoReturn

from services.common.json_values import Json
from services.grammar import GrammarError
from services.grammar.schemas.number_sets import number_of

__all__ = ["InexactNumber", "check_exact", "narrow_bounds", "parse_number"]

_EXACT = 2**53
"""Size up to which each integer is a double"""
_TOP = 2**63 - 1024
"""The largest integer that llguidance bounds integers by"""
_BOUNDS = ("maximum", "minimum", "exclusiveMaximum", "exclusiveMinimum")


class InexactNumber(float):
    """A number of a JSON text with more digits than a double has."""


def parse_number(text: str) -> float:
    """Return the double of a JSON number with a fraction or an exponent."""
    number = float(text)
    if math.isinf(number) or Decimal(repr(number)) == Decimal(text):
        return number
    return InexactNumber(text)


def check_exact(schema: Mapping[str, Json], path: str) -> None:
    """Raise GrammarError for a constant, or another number of a schema, that would be rounded."""
    if _has_large_bounds(schema):
        _narrowed(schema, path)
    for keyword in (*_BOUNDS, "multipleOf"):
        if isinstance(schema.get(keyword), InexactNumber):
            _refuse(f"{path}.{keyword}", "it has more digits than a double")
    if "const" in schema:
        _check_constants(schema["const"], f"{path}.const")
    if isinstance(values := schema.get("enum"), list):
        for index, value in enumerate(values):
            _check_constants(value, f"{path}.enum[{index}]")


def narrow_bounds(schema: Json) -> Json:
    """Return a lowered schema with bounds that llguidance enforces exactly.

    It is the same object if all bounds are already exact. Raises GrammarError where no number
    remains.
    """
    if isinstance(schema, list):
        parts = [narrow_bounds(part) for part in schema]
        return parts if any(a is not b for a, b in zip(parts, schema, strict=True)) else schema
    if not isinstance(schema, Mapping):
        return schema
    changed = {
        name: value if name in ("const", "enum") else narrow_bounds(value)
        for name, value in schema.items()
    }
    if _has_large_bounds(schema):
        return _narrowed(changed, "a subschema")
    return changed if any(changed[name] is not schema[name] for name in schema) else schema


def _has_large_bounds(schema: Mapping[str, Json]) -> bool:
    return any(
        (number := number_of(schema.get(keyword))) is not None
        and abs(number) + keyword.startswith("exclusive") > _EXACT
        for keyword in _BOUNDS
    )


def _narrowed(schema: Mapping[str, Json], path: str) -> dict[str, Json]:
    """Bound integers by doubles below 2^63, and other numbers by 2^53."""
    kinds = schema.get("type")
    named = kinds if isinstance(kinds, list) else [kinds]
    top = _TOP if "integer" in named and "number" not in named else _EXACT
    low, high = _bound(schema, "Minimum", 1), _bound(schema, "Maximum", -1)
    lowest, highest = _double(max(low, -top), 1), _double(min(high, top), -1)
    if lowest > highest or low > top or high < -top:
        raise GrammarError(f"The bounds of numbers at {path} can't be enforced exactly.")
    narrowed = {name: value for name, value in schema.items() if name not in _BOUNDS}
    if low > -math.inf or highest < 0:
        narrowed["minimum"] = lowest
    if high < math.inf or lowest > 0:
        narrowed["maximum"] = highest
    return narrowed


def _bound(schema: Mapping[str, Json], name: str, inward: int) -> int | float:
    """Return the tightest whole bound on one side; an infinity without one."""
    plain, exclusive = schema.get(name.lower()), schema.get(f"exclusive{name}")
    bounds: list[int | float] = [-inward * math.inf]
    if (number := number_of(plain)) is not None:
        bounds.append(_whole(number, inward, is_open=exclusive is True))
    if (number := number_of(exclusive)) is not None:
        bounds.append(_whole(number, inward, is_open=True))
    return max(bounds) if inward > 0 else min(bounds)


def _whole(number: Fraction, inward: int, *, is_open: bool) -> int:
    whole = math.ceil(number) if inward > 0 else math.floor(number)
    return whole + inward if is_open and whole == number else whole


def _double(number: int | float, inward: int) -> int:
    """Return the next integer inward that is a double."""
    nearest = float(number)
    if (int(nearest) - int(number)) * inward < 0:
        nearest = math.nextafter(nearest, inward * math.inf)
    return int(nearest)


def _check_constants(value: Json, path: str) -> None:
    for number, where in _numbers(value, path):
        exact = number_of(number)
        assert exact is not None
        if isinstance(number, InexactNumber):
            _refuse(where, "it has more digits than a double")
        if abs(exact) > _EXACT and not _is_written_exactly(exact):
            _refuse(where, f"beyond {_EXACT}, few numbers are")


def _is_written_exactly(number: Fraction) -> bool:
    if abs(number) < 2**63:
        return int(float(number)) == number
    return abs(number) > 2**64 and Fraction(repr(float(number))) == number


def _numbers(value: Json, path: str) -> Iterator[tuple[int | float, str]]:
    if isinstance(value, Mapping):
        for name, part in value.items():
            yield from _numbers(part, f"{path}.{name}")
    elif isinstance(value, list):
        for index, part in enumerate(value):
            yield from _numbers(part, f"{path}[{index}]")
    elif isinstance(value, int | float) and not isinstance(value, bool):
        yield value, path


def _refuse(path: str, why: str) -> NoReturn:
    raise GrammarError(
        f"The number at {path} can't be enforced exactly: {why}. Use a string, or fewer digits."
    )
