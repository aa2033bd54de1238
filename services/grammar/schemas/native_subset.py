"""The subset of JSON Schema that llguidance enforces exactly."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from services.common.json_values import Json
from services.grammar import GrammarError
from services.grammar.schemas.references import References
from services.grammar.schemas.subschemas import subschemas

__all__ = ["IN_PLACE", "NON_ASSERTIONS", "non_native"]

_NOT_NATIVE = frozenset({
    "contains", "dependencies", "dependentRequired", "dependentSchemas", "else", "if",
    "maxContains", "minContains", "not", "oneOf", "propertyNames", "then",
    "uniqueItems",
})  # fmt: skip
IN_PLACE = frozenset({"$ref", "allOf", "anyOf", "const", "enum", "oneOf"})
"""The keywords that apply schemas or values to the value itself, not to its parts"""
NON_ASSERTIONS = frozenset({
    "$anchor", "$comment", "$defs", "$id", "$schema", "default", "definitions", "deprecated",
    "description", "example", "examples", "id", "readOnly", "title", "writeOnly",
})  # fmt: skip
"""The keywords that do not constrain the value"""
_MAX_MULTIPLE = 1_000
_COUNTS = frozenset({
    "maxItems", "maxLength", "maxProperties", "minItems", "minLength", "minProperties",
})  # fmt: skip


def non_native(root: Json, references: References) -> set[int]:
    """Return the `id`s of the subschemas that are outside the subset, or that lead to one."""
    users: dict[int, list[int]] = {}
    found: set[int] = set()
    combined: set[int] = set()
    seen: set[int] = set()
    pending: list[Json] = [root]
    while pending:
        start = pending.pop()
        for schema, below in _edges(start):
            if id(schema) in seen:
                continue
            seen.add(id(schema))
            if not _is_native(schema):
                found.add(id(schema))
            if _is_combined(schema):
                combined.add(id(schema))
            if isinstance(schema.get("$ref"), str):
                try:
                    target = references.target(schema)
                except GrammarError:
                    continue  # llguidance resolves or refuses it
                below = [*below, target]
                pending.append(target)
            for other in below:
                users.setdefault(id(other), []).append(id(schema))
    if _has_cycle(users):
        found |= combined  # llguidance does not resolve cyclic references that have siblings
    spreading = list(found)
    while spreading:
        for user in users.get(spreading.pop(), ()):
            if user not in found:
                found.add(user)
                spreading.append(user)
    return found


def _has_cycle(users: Mapping[int, Sequence[int]]) -> bool:
    """Return whether the graph of uses has a cycle (Kahn's topological sort)."""
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


def _is_native(schema: Mapping[str, Any]) -> bool:
    """Return whether llguidance enforces a schema's own keywords exactly."""
    if schema.keys() & _NOT_NATIVE:
        return False
    if any(isinstance(schema.get(keyword), float) for keyword in _COUNTS):
        return False
    multiple = schema.get("multipleOf")
    if isinstance(multiple, int | float) and multiple > _MAX_MULTIPLE:
        return False  # the common multiple of several would overflow
    applied = schema.keys() & IN_PLACE
    others = schema.keys() - NON_ASSERTIONS - IN_PLACE
    if "$ref" in applied and (others or len(applied) > 1):
        return False  # llguidance does not resolve it in a cycle of references
    if applied and others & {"additionalItems", "patternProperties"}:
        return False  # llguidance separates the keywords before these from those after
    if applied and True in (schema.get("exclusiveMinimum"), schema.get("exclusiveMaximum")):
        return False
    if any(isinstance(value, float) and value.is_integer() for value in _constants(schema)):
        return False  # llguidance would write it with a fraction
    optional = schema.get("properties", {}).keys() - set(map(str, schema.get("required", ())))
    return not (optional and (schema.get("minProperties") or "maxProperties" in schema))


def _is_combined(schema: Mapping[str, Any]) -> bool:
    """Return whether an in-place keyword stands beside other constraints."""
    applied = schema.keys() & IN_PLACE
    others = schema.keys() - NON_ASSERTIONS - IN_PLACE
    parts = schema.get("allOf", ())
    return bool(applied and (others or len(applied) > 1 or len(parts) > 1))


def _constants(schema: Mapping[str, Any]) -> list[Any]:
    values = schema.get("enum", ())
    return [*(values if isinstance(values, list) else ()), schema.get("const")]
