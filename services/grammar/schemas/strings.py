"""The keywords of a JSON Schema that speak of strings, as the compiler holds them exactly."""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence

from services.common.annotations import ENFORCED_FORMATS
from services.common.json_values import Json
from services.grammar.error import GrammarError
from services.grammar.patterns import whole_match
from services.grammar.patterns.characters import is_spellable
from services.grammar.patterns.formats import FORMATS
from services.grammar.schemas.json_schema import reachable

__all__ = ["given_words", "held_exactly"]

_Note = Callable[[str, str], None]


def held_exactly(schema: Json, path: str = "$") -> Json:
    """A schema that allows the same texts but for those that can't be written, and that the
    compiler enforces to the letter. The one given stays as it is.

    Raises GrammarError, with the place, for strings and patterns that can't be held.
    """
    return _rewritten(schema, path, lambda expression, given: None)


def given_words(schema: Json, path: str, reason: str) -> str:
    """The compiler's reason with the patterns that it speaks of as the client wrote them."""
    given: dict[str, str] = {}
    _rewritten(schema, path, given.__setitem__)
    for expression in sorted(given, key=len, reverse=True):
        reason = reason.replace(expression, given[expression])
    return reason


def _rewritten(schema: Json, path: str, note: _Note) -> Json:
    found = reachable(schema, path)
    try:
        held = {id(part): _held(part, where, note) for part, where in found}
        _check_names(found)
        return _replaced(schema, held)
    except RecursionError:
        raise GrammarError("A value in the schema is nested too deeply.") from None


def _replaced(value: Json, held: Mapping[int, Mapping[str, Json]]) -> Json:
    if isinstance(value, Mapping):
        content = held.get(id(value), value)
        return {name: _replaced(part, held) for name, part in content.items()}
    if isinstance(value, list):
        return [_replaced(part, held) for part in value]
    return value


def _held(schema: Mapping[str, Json], path: str, note: _Note) -> Mapping[str, Json]:
    """One schema, without those within it."""
    for value, where in _literals(schema, path):
        for text, place in _strings(value, where):
            _check_spelling(text, place)
    changed = dict(schema)
    expressions: list[str] = []
    kinds = schema.get("type")
    if "pattern" in schema or "format" in schema:
        if kinds is None or "string" in (kinds if isinstance(kinds, list) else [kinds]):
            expressions = [*_of_pattern(changed, path, note), *_of_format(changed, note)]
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
        changed["patternProperties"] = _of_names(named, f"{path}.patternProperties", note)
    return changed


def _of_pattern(changed: dict[str, Json], path: str, note: _Note) -> Sequence[str]:
    pattern = changed.get("pattern")
    if not isinstance(pattern, str):
        return []
    expressions = _expressions(pattern, f"{path}.pattern", note)
    if expressions is None:
        raise GrammarError(
            f"No text that can be written matches the pattern at {path}.pattern: of the control "
            r"characters there are \b, \t, \n, \f and \r."
        )
    return expressions


def _of_format(changed: dict[str, Json], note: _Note) -> Sequence[str]:
    """Leaves what the compiler enforces exactly, and takes the rest out."""
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
        note(expression, name)
    return expressions


def _of_names(named: Mapping[str, Json], path: str, note: _Note) -> dict[str, Json]:
    """patternProperties; those whose names can't be written come to nothing."""
    changed: dict[str, Json] = {}
    for pattern, part in named.items():
        expressions = _expressions(pattern, f"{path}.{pattern}", note)
        if expressions is None:
            continue
        if len(expressions) > 1:
            raise GrammarError(f"The pattern at {path}.{pattern}: (?=…) is not supported in names.")
        if expressions[0] in changed:
            raise GrammarError(f"The pattern at {path}.{pattern} matches what another one does.")
        changed[expressions[0]] = part
    return changed


def _expressions(pattern: str, path: str, note: _Note) -> Sequence[str] | None:
    try:
        expressions = whole_match.rewrite(pattern)
    except GrammarError as error:
        raise GrammarError(f"The pattern at {path} can't be enforced: {error}.") from None
    for expression in expressions or ():
        note(expression, pattern)
    return expressions


def _literals(schema: Mapping[str, Json], path: str) -> Iterator[tuple[Json, str]]:
    if "const" in schema:
        yield schema["const"], f"{path}.const"
    if isinstance(values := schema.get("enum"), list):
        for index, value in enumerate(values):
            yield value, f"{path}.enum[{index}]"


def _strings(value: Json, path: str) -> Iterator[tuple[str, str]]:
    """The strings within a value, but for its keys, which the compiler spells by itself."""
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
        f"The string at {path} has U+{code:04X}, which can't be written: of the control "
        r"characters there are \b, \t, \n, \f and \r."
    )


def _check_names(schemas: Sequence[tuple[Mapping[str, Json], str]]) -> None:
    """A pattern of names is held for names that can be written: others are not seen to match."""
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
    """Every property that a schema names."""
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
