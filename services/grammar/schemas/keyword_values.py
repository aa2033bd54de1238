"""The values that JSON Schema allows for each keyword."""

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from services.common.json_values import Json
from services.grammar import GrammarError
from services.grammar.schemas.number_sets import number_of

__all__ = ["check_values"]

_TYPES = ("array", "boolean", "integer", "null", "number", "object", "string")
_MAX_SHOWN = 60  # characters of a value in a message
_MAX_COUNT = 2**53


def check_values(schema: Mapping[str, Json], path: str) -> None:
    """Raise GrammarError, with the path, for the first keyword with a value of a wrong kind.

    Subschemas are not examined, and annotations such as "description" may have any value.
    """
    for keyword, value in schema.items():
        if keyword in _CHECKS:
            wanted, is_right = _CHECKS[keyword]
            if not is_right(value):
                shown = json.dumps(value, ensure_ascii=False)
                shown = shown if len(shown) <= _MAX_SHOWN else f"{shown[:_MAX_SHOWN]}…"
                remedy = _REMEDIES.get(keyword, "")
                raise GrammarError(f"{keyword} at {path} must be {wanted}, got {shown}.{remedy}")


def _is_type(value: Json) -> bool:
    return isinstance(value, str) and value in _TYPES


def _is_types(value: Json) -> bool:
    if not isinstance(value, list):
        return _is_type(value)
    return bool(value) and all(map(_is_type, value)) and len(set(value)) == len(value)


def _is_number(value: Json) -> bool:
    return number_of(value) is not None


def _is_positive(value: Json) -> bool:
    return (number_of(value) or 0) > 0


def _is_bound(value: Json) -> bool:
    return isinstance(value, bool) or _is_number(value)  # draft-04 has booleans


def _is_count(value: Json) -> bool:
    number = number_of(value)
    return number is not None and number.denominator == 1 and 0 <= number <= _MAX_COUNT


def _is_names(value: Json) -> bool:
    return isinstance(value, list) and all(isinstance(name, str) for name in value)


def _is_names_by_name(value: Json) -> bool:
    return isinstance(value, Mapping) and all(map(_is_names, value.values()))


def _is_of(kind: type) -> Callable[[Json], bool]:
    return lambda value: isinstance(value, kind)


def _is_filled(value: Json) -> bool:
    return isinstance(value, list) and bool(value)


def _all(
    keywords: Sequence[str], wanted: str, is_right: Callable[[Any], bool]
) -> dict[str, tuple[str, Callable[[Any], bool]]]:
    return dict.fromkeys(keywords, (wanted, is_right))


_CHECKS: Mapping[str, tuple[str, Callable[[Any], bool]]] = {
    **_all(("$anchor", "$id", "$ref", "$schema", "format", "pattern"), "a string", _is_of(str)),
    **_all(("type",), f"one or several of {', '.join(_TYPES)}", _is_types),
    **_all(("allOf", "anyOf", "enum", "oneOf"), "an array and not empty", _is_filled),
    **_all(("prefixItems",), "an array", _is_of(list)),
    **_all(("maximum", "minimum"), "a number", _is_number),
    **_all(("exclusiveMaximum", "exclusiveMinimum"), "a number", _is_bound),
    **_all(("multipleOf",), "a number above 0", _is_positive),
    **_all(
        (
            "maxContains", "maxItems", "maxLength", "maxProperties",
            "minContains", "minItems", "minLength", "minProperties",
        ),
        "a whole number from 0 to 2^53",
        _is_count,
    ),
    **_all(("uniqueItems",), "true or false", _is_of(bool)),
    **_all(("required",), "an array of strings", _is_names),
    **_all(("dependentRequired",), "an object of arrays of strings", _is_names_by_name),
    **_all(
        (
            "$defs", "definitions", "dependencies", "dependentSchemas", "patternProperties",
            "properties",
        ),
        "an object",
        _is_of(dict),
    ),
}  # fmt: skip
_REMEDIES = {"required": ' List required members in "required" of the object that has them.'}
