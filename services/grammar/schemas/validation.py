"""Validation of a JSON Schema: its JSON syntax, unsupported keywords, and keywords of other drafts.

llguidance names an unsupported keyword without its path, and silently ignores keywords that the
schema's draft does not define. This module refuses both, with the path.
"""

import json
import math
import re
from collections.abc import Mapping, Sequence

from services.common.json_values import Json, JsonConstantError, parse_json
from services.grammar import GrammarError
from services.grammar.schemas.exact_numbers import check_exact, parse_number
from services.grammar.schemas.finiteness import check_finite
from services.grammar.schemas.keyword_values import check_values
from services.grammar.schemas.subschemas import MAX_DEPTH, reachable, subschemas

__all__ = ["check", "locate", "parse"]

_MAX_LISTED_PATHS = 5
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
}
"""Supported keywords that only later drafts define, by draft"""
_OPTIONS = "x-guidance"
"""The keyword of llguidance's options, one of which silences unsupported keywords"""
# JSON strings and numbers; the rest of a JSON text contains neither quotes nor digits
_SCALAR = re.compile(r'"(?:[^"\\]|\\.)*"|-?[0-9][-+.0-9eE]*')


def parse(text: str) -> Json:
    """Parse JSON text.

    Raises GrammarError with line and column, also for what Python accepts and llguidance does not:
    numbers out of range and unpaired surrogates.
    """
    try:
        value: Json = parse_json(text, parse_number)
        _check_scalars(text)
    except json.JSONDecodeError as error:
        where = f"line {error.lineno}, column {error.colno}"
        raise GrammarError(f"This is not JSON: {error.msg} ({where}).") from None
    except JsonConstantError as error:
        raise GrammarError(f"This is not JSON: {error}.") from None
    except ValueError:  # from int()
        raise GrammarError("A number in the grammar has too many digits.") from None
    except RecursionError:
        raise GrammarError(f"The schema is nested deeper than {MAX_DEPTH} levels.") from None
    return value


def check(schema: Json, path: str = "$", *, is_followed: bool = True) -> None:
    """Raise GrammarError for the first keyword that can't be enforced.

    `is_followed`: the state of the JSON is followed, so repeated keys and items are detected
    (`matching.uniqueness`).
    """
    if schema is False:
        raise GrammarError(f"The schema at {path} is false, which no value satisfies.")
    found = reachable(schema, path)
    for subschema, where in found:
        _check_keywords(subschema, where)
        check_values(subschema, where)
        check_exact(subschema, where)
        if not is_followed:
            _check_repetitions(subschema, where)
    _check_drafts(found)
    check_finite(schema, found)


def locate(schema: Json, reason: str) -> str:
    """Return llguidance's reason with the paths of the keyword that it is about."""
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
    return f"{reason}\nLook at {' or '.join(places[:_MAX_LISTED_PATHS])}."


def _check_keywords(schema: Mapping[str, Json], path: str) -> None:
    for keyword in schema:
        if keyword == _OPTIONS:
            raise GrammarError(f'"{_OPTIONS}" at {path} is not allowed: the server sets it.')
        if keyword in _UNSUPPORTED:
            raise GrammarError(f'The keyword "{keyword}" at {path} is not supported.')


def _check_repetitions(schema: Mapping[str, Json], path: str) -> None:
    """Refuse keywords that are only enforceable where repetitions are detected.

    llguidance counts a repeated unnamed key again, so minProperties is enforceable only up to the
    number of required keys + 1.
    """
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
    """Refuse keywords that are later than any "$schema" in the document.

    Any "$schema" applies to all subschemas: references carry it beyond its own place.
    """
    drafts = {str(schema.get("$schema")).rstrip("#") for schema, _ in schemas}
    later = frozenset[str]().union(*(_LATER.get(draft, ()) for draft in drafts))
    for schema, path in schemas:
        for keyword in sorted(schema.keys() & later):
            raise GrammarError(
                f'The draft that "$schema" names does not have the keyword "{keyword}" at {path}; '
                f'leave "$schema" out, or name {_NEWEST}.'
            )


def _check_scalars(text: str) -> None:
    """Refuse strings and numbers of a JSON text that llguidance's parser refuses."""
    for scalar in _SCALAR.finditer(text):
        written = scalar.group()
        if written.startswith('"'):
            why = "an unpaired surrogate" if _has_surrogate(written) else ""
        else:
            why = "a number out of range" if math.isinf(float(written)) else ""
        if why:
            line = text.count("\n", 0, scalar.start()) + 1
            column = scalar.start() - text.rfind("\n", 0, scalar.start())
            raise GrammarError(f"The JSON has {why} (line {line}, column {column}).")


def _has_surrogate(written: str) -> bool:
    return "\\ud" in written.lower() and any(
        "\ud800" <= character <= "\udfff" for character in json.loads(written)
    )
