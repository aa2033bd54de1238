"""Which parts of a JSON Schema llguidance holds exactly as they are."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from services.common.json_values import Json
from services.grammar.error import GrammarError
from services.grammar.schemas.json_schema import subschemas
from services.grammar.schemas.references import References

__all__ = ["REMARKS", "hard_parts"]

_LOGIC = frozenset({
    "contains", "dependencies", "dependentRequired", "dependentSchemas", "else", "if",
    "maxContains", "minContains", "not", "oneOf", "propertyNames", "then",
    "uniqueItems",
})  # fmt: skip
_IN_PLACE = frozenset({"$ref", "allOf", "anyOf", "const", "enum", "oneOf"})
REMARKS = frozenset({
    "$anchor", "$comment", "$defs", "$id", "$schema", "default", "definitions", "deprecated",
    "description", "example", "examples", "id", "readOnly", "title", "writeOnly",
})  # fmt: skip
_COUNTS = frozenset({
    "maxItems", "maxLength", "maxProperties", "minItems", "minLength", "minProperties",
})  # fmt: skip


def hard_parts(root: Json, references: References) -> set[int]:
    """The ids of the subschemas that are not plain, or lead to one that is not."""
    users: dict[int, list[int]] = {}
    hard: set[int] = set()
    mixed: set[int] = set()
    seen: set[int] = set()
    pending: list[Json] = [root]
    while pending:
        start = pending.pop()
        for schema, below in _edges(start):
            if id(schema) in seen:
                continue
            seen.add(id(schema))
            if _is_hard(schema):
                hard.add(id(schema))
            if _is_mixed(schema):
                mixed.add(id(schema))
            if isinstance(schema.get("$ref"), str):
                try:
                    target = references.target(schema)
                except GrammarError:
                    continue  # the compiler refuses it, or knows better
                below = [*below, target]
                pending.append(target)
            for other in below:
                users.setdefault(id(other), []).append(id(schema))
    if _has_circle(users):
        hard |= mixed  # llguidance resolves no references in circles that others stand beside
    spreading = list(hard)
    while spreading:
        for user in users.get(spreading.pop(), ()):
            if user not in hard:
                hard.add(user)
                spreading.append(user)
    return hard


def _has_circle(users: Mapping[int, Sequence[int]]) -> bool:
    """Whether following edges may lead back to where one was."""
    waiting = dict.fromkeys(users, 0)
    for others in users.values():
        for other in others:
            waiting[other] = waiting.get(other, 0) + 1
    free = [node for node, count in waiting.items() if not count]
    while free:
        for other in users.get(free.pop(), ()):
            waiting[other] -= 1
            if not waiting[other]:
                free.append(other)
    return any(waiting.values())


def _edges(start: Json) -> Iterator[tuple[Mapping[str, Any], list[Json]]]:
    for schema, _ in subschemas(start, "$"):
        if isinstance(schema, Mapping):
            yield schema, [one for one, _ in subschemas(schema, "$", deep=False)]


def _is_hard(schema: Mapping[str, Any]) -> bool:
    """Whether llguidance does not hold it, or not exactly."""
    if schema.keys() & _LOGIC:
        return True
    if any(isinstance(schema.get(keyword), float) for keyword in _COUNTS):
        return True
    applied = schema.keys() & _IN_PLACE
    others = schema.keys() - REMARKS - _IN_PLACE
    if "$ref" in applied and (others or len(applied) > 1):
        return True  # in a circle of references, llguidance does not resolve it
    if applied and others & {"additionalItems", "patternProperties"}:
        return True  # llguidance takes keywords apart that lie before and behind these
    if applied and True in (schema.get("exclusiveMinimum"), schema.get("exclusiveMaximum")):
        return True
    if any(isinstance(value, float) and value.is_integer() for value in _constants(schema)):
        return True  # llguidance would write it as a fraction
    optional = schema.get("properties", {}).keys() - set(map(str, schema.get("required", ())))
    return bool(optional and (schema.get("minProperties") or "maxProperties" in schema))


def _is_mixed(schema: Mapping[str, Any]) -> bool:
    """Whether several parts say what a value is."""
    applied = schema.keys() & _IN_PLACE
    others = schema.keys() - REMARKS - _IN_PLACE
    parts = schema.get("allOf", ())
    return bool(applied and (others or len(applied) > 1 or len(parts) > 1))


def _constants(schema: Mapping[str, Any]) -> list[Any]:
    values = schema.get("enum", ())
    return [*(values if isinstance(values, list) else ()), schema.get("const")]
