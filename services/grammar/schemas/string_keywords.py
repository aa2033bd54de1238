"""The string keywords of a JSON Schema, lowered to what llguidance enforces exactly."""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence

from services.common.annotations import ENFORCED_FORMATS
from services.common.json_values import Json
from services.grammar import GrammarError
from services.grammar.patterns.character_sets import is_spellable
from services.grammar.patterns.formats import FORMATS
from services.grammar.patterns.full_match import full_match_expressions
from services.grammar.schemas.subschemas import reachable

__all__ = ["lower_strings", "restore_patterns"]

_Record = Callable[[str, str], None]
"""Called with each new expression and the pattern or format that it replaces"""


def lower_strings(schema: Json, path: str = "$") -> Json:
    """Return a schema of the same values, except strings with characters outside SPELLABLE.

    The given schema is not changed. Raises GrammarError, with the place, for strings and patterns
    that can't be enforced.
    """
    return _lowered(schema, path, lambda expression, given: None)


def restore_patterns(schema: Json, path: str, reason: str) -> str:
    """Return the compiler's reason with its expressions replaced by the client's patterns."""
    given: dict[str, str] = {}
    _lowered(schema, path, given.__setitem__)
    for expression in sorted(given, key=len, reverse=True):
        reason = reason.replace(expression, given[expression])
    return reason


def _lowered(schema: Json, path: str, record: _Record) -> Json:
    found = reachable(schema, path)
    try:
        lowered = {id(part): _lowered_part(part, where, record) for part, where in found}
        _check_names(found)
        return _replaced(schema, lowered)
    except RecursionError:
        raise GrammarError("A value in the schema is nested too deeply.") from None


def _replaced(value: Json, lowered: Mapping[int, Mapping[str, Json]]) -> Json:
    if isinstance(value, Mapping):
        content = lowered.get(id(value), value)
        return {name: _replaced(part, lowered) for name, part in content.items()}
    if isinstance(value, list):
        return [_replaced(part, lowered) for part in value]
    return value


def _lowered_part(schema: Mapping[str, Json], path: str, record: _Record) -> Mapping[str, Json]:
    """Lower a schema's own keywords, but not its subschemas."""
    for value, where in _literals(schema, path):
        for text, place in _strings(value, where):
            _check_spelling(text, place)
    changed = dict(schema)
    expressions: list[str] = []
    kinds = schema.get("type")
    if "pattern" in schema or "format" in schema:
        if kinds is None or "string" in (kinds if isinstance(kinds, list) else [kinds]):
            expressions = [*_of_pattern(changed, path, record), *_of_format(changed, record)]
        else:
            changed.pop("pattern", None)
            changed.pop("format", None)
    if expressions:
        changed["pattern"] = expressions[0]
    if expressions[1:]:
        kind = {"type": "string"} if kinds == "string" else {}
        others = changed.get("allOf", [])
        more = [{**kind, "pattern": expression} for expression in expressions[1:]]
        changed["allOf"] = [*others, *more] if isinstance(others, list) else others
    if isinstance(named := schema.get("patternProperties"), Mapping):
        changed["patternProperties"] = _of_names(named, f"{path}.patternProperties", record)
    return changed


def _of_pattern(changed: dict[str, Json], path: str, record: _Record) -> Sequence[str]:
    pattern = changed.get("pattern")
    if not isinstance(pattern, str):
        return []
    expressions = _expressions(pattern, f"{path}.pattern", record)
    if expressions is None:
        raise GrammarError(
            f"No supported text matches the pattern at {path}.pattern: the only control "
            r"characters are \b, \t, \n, \f and \r."
        )
    return expressions


def _of_format(changed: dict[str, Json], record: _Record) -> Sequence[str]:
    """Remove the format, unless llguidance enforces it exactly; return its expressions."""
    name = changed.get("format")
    if not isinstance(name, str) or (name in ENFORCED_FORMATS and name not in FORMATS):
        return []
    del changed["format"]
    if name not in FORMATS:
        return []
    form, longest = FORMATS[name], changed.get("maxLength")
    if form.max_length is not None and (
        longest is None or (isinstance(longest, int | float) and longest > form.max_length)
    ):
        changed["maxLength"] = form.max_length
    expressions = [f"^(?:{expression})$" for expression in form.expressions]
    for expression in expressions:
        record(expression, name)
    return expressions


def _of_names(named: Mapping[str, Json], path: str, record: _Record) -> dict[str, Json]:
    """Return patternProperties by expression, without patterns that no supported name matches."""
    changed: dict[str, Json] = {}
    for pattern, part in named.items():
        expressions = _expressions(pattern, f"{path}.{pattern}", record)
        if expressions is None:
            continue
        if len(expressions) > 1:
            raise GrammarError(f"The pattern at {path}.{pattern}: (?=…) is not supported in names.")
        if expressions[0] in changed:
            raise GrammarError(f"The pattern at {path}.{pattern} equals another one.")
        changed[expressions[0]] = part
    return changed


def _expressions(pattern: str, path: str, record: _Record) -> Sequence[str] | None:
    try:
        expressions = full_match_expressions(pattern)
    except GrammarError as error:
        raise GrammarError(f"The pattern at {path} can't be enforced: {error}.") from None
    for expression in expressions or ():
        record(expression, pattern)
    return expressions


def _literals(schema: Mapping[str, Json], path: str) -> Iterator[tuple[Json, str]]:
    if "const" in schema:
        yield schema["const"], f"{path}.const"
    if isinstance(values := schema.get("enum"), list):
        for index, value in enumerate(values):
            yield value, f"{path}.enum[{index}]"


def _strings(value: Json, path: str) -> Iterator[tuple[str, str]]:
    """Yield the strings in a value with their paths, without keys: llguidance escapes those."""
    if isinstance(value, str):
        yield value, path
    elif isinstance(value, Mapping):
        for name, part in value.items():
            yield from _strings(part, f"{path}.{name}")
    elif isinstance(value, list):
        for index, part in enumerate(value):
            yield from _strings(part, f"{path}[{index}]")


def _check_spelling(text: str, path: str) -> None:
    if is_spellable(text):
        return
    code = next(ord(character) for character in text if not is_spellable(character))
    raise GrammarError(
        f"The string at {path} has U+{code:04X}, which is not supported: the only control "
        r"characters are \b, \t, \n, \f and \r."
    )


def _check_names(schemas: Sequence[tuple[Mapping[str, Json], str]]) -> None:
    """Refuse control characters in names beside patternProperties.

    Expressions never match such names, so values under them would escape their schema.
    """
    if not any("patternProperties" in schema for schema, _ in schemas):
        return
    for schema, path in schemas:
        for name in _names(schema):
            if not is_spellable(name):
                raise GrammarError(
                    f"The property {json.dumps(name)} at {path} has a control character, which "
                    "is not supported together with patternProperties."
                )


def _names(schema: Mapping[str, Json]) -> Iterator[str]:
    """Yield every property that a schema names."""
    properties, required = schema.get("properties"), schema.get("required")
    if isinstance(properties, Mapping):
        yield from properties
    if isinstance(required, list):
        yield from (name for name in required if isinstance(name, str))
    for value, _ in _literals(schema, ""):
        yield from _keys(value)


def _keys(value: Json) -> Iterator[str]:
    if isinstance(value, Mapping):
        yield from value
        for part in value.values():
            yield from _keys(part)
    elif isinstance(value, list):
        for part in value:
            yield from _keys(part)
