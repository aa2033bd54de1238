"""What the grammar compiler can't express in a JSON Schema, found with its path.

llguidance names an unsupported keyword but not its place, and drops those that the schema's draft
does not know. This walk visits every subschema in keyword position, and what "$ref" names, and
refuses both.
"""

import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from urllib.parse import unquote

from services.common.json_values import Json, JsonConstantError, parse_json
from services.grammar.error import GrammarError

__all__ = ["check", "locate", "parse", "reachable", "subschemas"]


_MAX_DEPTH = 120  # levels of JSON; the compiler's own parser stops at 128, in less clear words
_MOST_PLACES = 5  # that are listed where any of them may be meant
_UNSUPPORTED = frozenset({
    "$dynamicAnchor", "$dynamicRef", "$recursiveAnchor", "$recursiveRef", "disallow", "divisibleBy",
    "extends", "unevaluatedItems", "unevaluatedProperties",
})  # fmt: skip
_NEWEST = "https://json-schema.org/draft/2020-12/schema"
_LATER: Mapping[str, frozenset[str]] = {
    "http://json-schema.org/draft-04/schema": frozenset({"const", "prefixItems"}),
    "http://json-schema.org/draft-06/schema": frozenset({"prefixItems"}),
    "http://json-schema.org/draft-07/schema": frozenset({"prefixItems"}),
    "https://json-schema.org/draft/2019-09/schema": frozenset({"prefixItems"}),
}  # the keywords of later drafts, by draft; of those that are supported
_OPTIONS = "x-guidance"  # llguidance reads its options here; they can silence unsupported keywords
_ONE = frozenset({
    "additionalItems", "additionalProperties", "contains", "else", "if", "items", "not",
    "propertyNames", "then",
})  # fmt: skip
_MANY = frozenset({"allOf", "anyOf", "items", "oneOf", "prefixItems"})
_NAMED = frozenset({
    "$defs", "definitions", "dependencies", "dependentSchemas", "patternProperties", "properties",
})  # fmt: skip
_TYPES = frozenset({"array", "boolean", "integer", "null", "number", "object", "string"})
# JSON's strings and numbers; of a text that is JSON, the pieces between them hold neither
_SCALAR = re.compile(r'"(?:[^"\\]|\\.)*"|-?[0-9][-+.0-9eE]*')


def parse(text: str) -> Json:
    """JSON text; raises GrammarError with line and column, for what the compiler can't read too:
    numbers out of range, and halves of surrogate pairs."""
    try:
        value: Json = parse_json(text)
        _check_scalars(text)
    except json.JSONDecodeError as error:
        where = f"line {error.lineno}, column {error.colno}"
        raise GrammarError(f"This is not JSON: {error.msg} ({where}).") from None
    except JsonConstantError as error:
        raise GrammarError(f"This is not JSON: {error}.") from None
    except ValueError:  # of int()
        raise GrammarError("The grammar holds a number of too many digits.") from None
    except RecursionError:
        raise GrammarError(_too_deep()) from None
    return value


def check(schema: Json, path: str = "$", *, is_whole: bool = True) -> None:
    """Raise GrammarError for the first thing in a schema that can't be enforced.

    `is_whole`: all of the text is of this schema. Only then repetitions are seen (`steering`).
    """
    if schema is False:
        raise GrammarError(f"The schema at {path} is false, which nothing can satisfy.")
    found = reachable(schema, path)
    for subschema, where in found:
        _check_keywords(subschema, where)
        if not is_whole:
            _check_repetitions(subschema, where)
    _check_drafts(found)


def reachable(schema: Json, path: str = "$") -> list[tuple[Mapping[str, Json], str]]:
    """The schema, all schemas in it, and what "$ref" names; each object once, with its path.

    Raises GrammarError for what stands in the place of a schema and is none.
    """
    seen: dict[int, tuple[Mapping[str, Json], str]] = {}
    pending = [(schema, path)]
    while pending:
        start, at = pending.pop()
        for subschema, where in () if id(start) in seen else subschemas(start, at):
            if isinstance(subschema, bool) or id(subschema) in seen:
                continue
            if not isinstance(subschema, Mapping):
                raise GrammarError(f"The schema at {where} must be an object or a boolean.")
            seen[id(subschema)] = subschema, where
            pending += _referred(subschema, where, schema, path)
    return list(seen.values())


def locate(schema: Json, reason: str) -> str:
    """llguidance's reason with the places of the keyword that it speaks of, which it leaves out."""
    keyword = (
        "oneOf" if reason.startswith("oneOf") else "pattern" if "regex" in reason.lower() else None
    )
    places = [
        f"{where}.{keyword}"
        for subschema, where in subschemas(schema, "$")
        if isinstance(subschema, Mapping) and keyword in subschema
    ]
    if not places:
        return reason
    if keyword == "oneOf":
        reason = "oneOf is supported only where its parts can't overlap; use anyOf"
    return f"{reason}\nLook at {' or '.join(places[:_MOST_PLACES])}."


def subschemas(schema: Json, path: str, *, deep: bool = True) -> Iterator[tuple[Json, str]]:
    """A schema and all below it, with their paths; parents first. Not `deep`: those right below."""
    return _below(schema, path, 1) if deep else _children(schema, path)


def _below(schema: Json, path: str, depth: int) -> Iterator[tuple[Json, str]]:
    if depth > _MAX_DEPTH:
        raise GrammarError(_too_deep())
    yield schema, path
    for child, where in _children(schema, path):
        yield from _below(child, where, depth + 2)


def _children(schema: Json, path: str) -> Iterator[tuple[Json, str]]:
    if not isinstance(schema, Mapping):
        return
    for keyword, value in schema.items():
        where = f"{path}.{keyword}"
        if keyword in _NAMED and isinstance(value, Mapping):
            for name, subschema in value.items():
                if keyword != "dependencies" or not isinstance(subschema, list):
                    yield subschema, f"{where}.{name}"
        elif keyword in _MANY and isinstance(value, list):
            for index, subschema in enumerate(value):
                yield subschema, f"{where}[{index}]"
        elif keyword in _ONE:
            yield value, where


def _check_keywords(schema: Mapping[str, Json], path: str) -> None:
    for keyword in schema:
        if keyword == _OPTIONS:
            raise GrammarError(f'"{_OPTIONS}" at {path} is not allowed: the server sets it.')
        if keyword in _UNSUPPORTED:
            raise GrammarError(f'The keyword "{keyword}" at {path} is not supported.')
    kinds = schema.get("type")
    for kind in kinds if isinstance(kinds, list) else [kinds]:
        if kind is not None and kind not in _TYPES:
            raise GrammarError(f"{json.dumps(kind)} at {path}.type is not a JSON type.")


def _check_repetitions(schema: Mapping[str, Json], path: str) -> None:
    """The compiler counts a key again where it comes again, as one that is not named may: so only
    as many can be enforced as are required, and one more."""
    if schema.get("uniqueItems") is True:
        raise GrammarError(
            f'The keyword "uniqueItems" at {path} is not supported beside other text.'
        )
    fewest, required = schema.get("minProperties"), schema.get("required")
    distinct = len({str(name) for name in required}) if isinstance(required, list) else 0
    is_closed = schema.get("additionalProperties") is False and "patternProperties" not in schema
    if isinstance(fewest, int | float) and fewest > distinct + 1 and not is_closed:
        raise GrammarError(
            f"minProperties at {path} can't be enforced beyond {distinct + 1}: require the keys, "
            'or forbid others with "additionalProperties": false.'
        )


def _check_drafts(schemas: Sequence[tuple[Mapping[str, Json], str]]) -> None:
    """A draft that is named anywhere holds for all: references carry it beyond its own place."""
    drafts = {str(schema.get("$schema")).rstrip("#") for schema, _ in schemas}
    later = frozenset[str]().union(*(_LATER.get(draft, ()) for draft in drafts))
    for schema, path in schemas:
        for keyword in sorted(schema.keys() & later):
            raise GrammarError(
                f'The draft that "$schema" names does not have the keyword "{keyword}" at {path}; '
                f'leave "$schema" out, or name {_NEWEST}.'
            )


def _referred(
    schema: Mapping[str, Json], path: str, root: Json, root_path: str
) -> list[tuple[Json, str]]:
    """What "$ref" points to, with its path; raises GrammarError where there is nothing."""
    reference = schema.get("$ref")
    if not isinstance(reference, str) or not reference.startswith("#/"):
        return []  # the whole document or a name: the compiler resolves or refuses it
    found, where = root, root_path
    for part in reference[2:].split("/"):
        key = unquote(part).replace("~1", "/").replace("~0", "~")
        if isinstance(found, Mapping) and key in found:
            found, where = found[key], f"{where}.{key}"
        elif isinstance(found, list) and key.isdecimal() and int(key) < len(found):
            found, where = found[int(key)], f"{where}[{key}]"
        else:
            raise GrammarError(f'"{reference}" at {path}.$ref does not exist.')
    return [(found, where)]


def _check_scalars(text: str) -> None:
    """Look for what Python's parser takes and the compiler's does not. The text is JSON."""
    for scalar in _SCALAR.finditer(text):
        written = scalar.group()
        if written.startswith('"'):
            why = "half of a surrogate pair" if _has_half(written) else ""
        else:
            why = "a number out of range" if math.isinf(float(written)) else ""
        if why:
            line = text.count("\n", 0, scalar.start()) + 1
            column = scalar.start() - text.rfind("\n", 0, scalar.start())
            raise GrammarError(f"The JSON has {why} (line {line}, column {column}).")


def _has_half(written: str) -> bool:
    return "\\ud" in written.lower() and any(
        "\ud800" <= character <= "\udfff" for character in json.loads(written)
    )


def _too_deep() -> str:
    return f"The schema is nested deeper than {_MAX_DEPTH} levels."
