"""Single keywords of JSON Schema, and their negations, as sets of values."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeAlias

from services.common.json_values import Json
from services.grammar import GrammarError
from services.grammar.schemas.array_sets import EVERY_ARRAY, ArraySet
from services.grammar.schemas.conjunction import NEVER
from services.grammar.schemas.number_sets import EVERY_NUMBER, NumberSet, number_of
from services.grammar.schemas.object_sets import EVERY_OBJECT, ObjectSet
from services.grammar.schemas.string_sets import EVERY_STRING, StringSet

__all__ = [
    "EVERYTHING",
    "KINDS",
    "NormalForm",
    "Set",
    "array_of",
    "assertion_form",
    "count_of",
    "items_of",
    "limit_of",
    "negated_assertion_form",
    "numbers_of",
    "object_of",
    "strings_of",
    "union",
]

Set: TypeAlias = frozenset[bool | None] | NumberSet | StringSet | ArraySet | ObjectSet
NormalForm: TypeAlias = Mapping[str, Sequence[Set]]
"""A union of sets of values for each kind in KINDS"""

KINDS = ("null", "boolean", "number", "string", "array", "object")
EVERYTHING: dict[str, Sequence[Any]] = {
    "null": [frozenset([None])],
    "boolean": [frozenset([False, True])],
    "number": [EVERY_NUMBER],
    "string": [EVERY_STRING],
    "array": [EVERY_ARRAY],
    "object": [EVERY_OBJECT],
}


def union(*forms: NormalForm) -> dict[str, Any]:
    """Return the union of normal forms."""
    return {kind: list(dict.fromkeys(one for form in forms for one in form[kind]))
            for kind in KINDS}  # fmt: skip


def assertion_form(schema: Mapping[str, Any], sets: Mapping[str, Any]) -> NormalForm:
    """Return the normal form of "type" and of the given sets by kind."""
    form = {kind: [sets[kind]] if kind in sets else EVERYTHING[kind] for kind in KINDS}
    array = form["array"][0].normalized()
    value = form["object"][0].normalized()
    form |= {"array": [array] if array else [], "object": [value] if value else []}
    kinds = schema.get("type")
    if kinds is None:
        return form
    named = kinds if isinstance(kinds, list) else [kinds]
    if "integer" in named and "number" not in named:
        whole = [one.intersection(NumberSet(integer=True)) for one in form["number"]]
        form["number"] = [one for one in whole if one is not None]
        named = [*named, "number"]
    return {kind: form[kind] if kind in named else [] for kind in KINDS}


def negated_assertion_form(schema: Mapping[str, Any], path: str) -> NormalForm:
    """Return the values that violate an assertion of a schema, other than on members or items."""
    form: dict[str, list[Any]] = {kind: [] for kind in KINDS}
    kinds = schema.get("type")
    if kinds is not None:
        named = kinds if isinstance(kinds, list) else [kinds]
        form |= {kind: list(EVERYTHING[kind]) for kind in KINDS if kind not in named}
        if "integer" in named and "number" not in named:
            form["number"] = [NumberSet(integer=False)]
    numbers, strings = numbers_of(schema, path), strings_of(schema, path)
    if numbers.values is not None:  # the bounds leave one number, or none
        form["number"].append(NumberSet(not_values=numbers.values))
    if numbers.low is not None:
        form["number"].append(NumberSet(high=numbers.low, high_open=not numbers.low_open))
    if numbers.high is not None:
        form["number"].append(NumberSet(low=numbers.high, low_open=not numbers.high_open))
    form["number"] += [NumberSet(not_multiples=frozenset([m])) for m in numbers.multiples]
    if strings.low:
        form["string"].append(StringSet(high=strings.low - 1))
    if strings.high is not None:
        form["string"].append(StringSet(low=strings.high + 1))
    form["string"] += [StringSet(not_patterns=frozenset([p])) for p in strings.patterns]
    form["string"] += [StringSet(not_formats=frozenset([name])) for name in strings.formats]
    form["array"] += _outside_bounds(schema, "Items", path, ArraySet)
    form["object"] += _outside_bounds(schema, "Properties", path, ObjectSet)
    if schema.get("uniqueItems") is True:
        form["array"].append(ArraySet(repeats=True))
    required = schema.get("required")
    for name in required if isinstance(required, list) else ():
        form["object"].append(ObjectSet(((str(name), NEVER),)))
    return form


def _outside_bounds(
    schema: Mapping[str, Any], what: str, path: str, make: Callable[..., Any]
) -> Iterable[Any]:
    if low := count_of(schema, f"min{what}", path):
        yield make(high=low - 1)
    if (high := limit_of(schema, f"max{what}", path)) is not None:
        yield make(low=high + 1)


def numbers_of(schema: Mapping[str, Any], path: str) -> NumberSet:
    """Return the numbers that a schema's own keywords allow; raise GrammarError for bad bounds."""
    result: NumberSet | None = EVERY_NUMBER
    for keyword in ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"):
        bound = schema.get(keyword)
        is_open = keyword.startswith("exclusive")
        if bound is True and is_open:  # draft-04
            bound = schema.get(keyword.removeprefix("exclusive").lower())
        if bound is None or isinstance(bound, bool):
            continue
        number = number_of(bound)
        if number is None or (keyword == "multipleOf" and not number):
            raise GrammarError(f"{keyword} at {path} must be a number.")
        if keyword == "multipleOf":
            limit = NumberSet(multiples=frozenset([abs(number)]))
        elif "inimum" in keyword:
            limit = NumberSet(low=number, low_open=is_open)
        else:
            limit = NumberSet(high=number, high_open=is_open)
        result = result.intersection(limit) if result is not None else None
    return result if result is not None else NumberSet(values=frozenset())


def strings_of(schema: Mapping[str, Any], path: str) -> StringSet:
    """Return the strings that a schema's own keywords allow."""
    pattern, name = schema.get("pattern"), schema.get("format")
    return StringSet(
        low=count_of(schema, "minLength", path),
        high=limit_of(schema, "maxLength", path),
        patterns=frozenset([pattern] if isinstance(pattern, str) else ()),
        formats=frozenset([name] if isinstance(name, str) and name != "unknown" else ()),
    )


def items_of(schema: Mapping[str, Any]) -> tuple[Sequence[Any], Any]:
    """Return the schemas of the first items, and the schema of all further items."""
    items = schema.get("items", True)
    if isinstance(items, list):
        return items, schema.get("additionalItems", True)
    return schema.get("prefixItems", ()), items


def count_of(schema: Mapping[str, Any], keyword: str, path: str, default: int = 0) -> int:
    """Return a keyword's count, or `default`; raise GrammarError if it is not a count."""
    limit = limit_of(schema, keyword, path)
    return default if limit is None else limit


def limit_of(schema: Mapping[str, Any], keyword: str, path: str) -> int | None:
    """Return a keyword's count, or None; raise GrammarError if it is not a count."""
    if keyword not in schema:
        return None
    number = number_of(schema[keyword])
    if number is None or number.denominator != 1 or number < 0:
        raise GrammarError(f"{keyword} at {path} must be a whole number, 0 or more.")
    return number.numerator


def array_of(value: Json, path: str) -> Sequence[Json]:
    """Return a non-empty array; raise GrammarError for anything else."""
    if not isinstance(value, list) or not value:
        raise GrammarError(f"{path} must be an array and not empty.")
    return value


def object_of(value: Json, path: str) -> Mapping[str, Json]:
    """Return an object; raise GrammarError for anything else."""
    if not isinstance(value, Mapping):
        raise GrammarError(f"{path} must be an object.")
    return value
