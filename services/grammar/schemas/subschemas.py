"""The subschemas of a JSON Schema, found by traversal and by JSON pointers."""

from collections.abc import Iterator, Mapping
from urllib.parse import unquote

from services.common.annotations import NAMED_SCHEMAS
from services.common.json_values import Json
from services.grammar import GrammarError

__all__ = ["MAX_DEPTH", "reachable", "resolve_pointer", "subschemas"]

MAX_DEPTH = 120
"""Levels of JSON. llguidance's own parser stops at 128, with a less clear message."""

_SINGLE = frozenset({
    "additionalItems", "additionalProperties", "contains", "else", "if", "items", "not",
    "propertyNames", "then",
})  # fmt: skip
_LISTS = frozenset({"allOf", "anyOf", "items", "oneOf", "prefixItems"})


def subschemas(schema: Json, path: str, *, deep: bool = True) -> Iterator[tuple[Json, str]]:
    """Yield a schema and all its subschemas with their paths, parents first.

    Without `deep`, yield the direct subschemas only.
    """
    return _descendants(schema, path, 1) if deep else _children(schema, path)


def reachable(schema: Json, path: str = "$") -> list[tuple[Mapping[str, Json], str]]:
    """Return all subschemas and all targets of "$ref", each object once, with its path.

    Raises GrammarError where a subschema is neither an object nor a boolean.
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
            reference = subschema.get("$ref")
            # llguidance resolves or refuses all other references
            if isinstance(reference, str) and reference.startswith("#/"):
                target = resolve_pointer(schema, reference[1:], path)
                if target is None:
                    raise GrammarError(f'"{reference}" at {where}.$ref does not exist.')
                pending.append(target)
    return list(seen.values())


def resolve_pointer(document: Json, pointer: str, path: str = "$") -> tuple[Json, str] | None:
    """Return the target of a percent-encoded JSON pointer (RFC 6901) with its path, or None.

    `path` is the document's own path.
    """
    found, where = document, path
    for part in pointer.split("/")[1:]:
        key = unquote(part).replace("~1", "/").replace("~0", "~")
        if isinstance(found, Mapping) and key in found:
            found, where = found[key], f"{where}.{key}"
        elif isinstance(found, list) and key.isdecimal() and int(key) < len(found):
            found, where = found[int(key)], f"{where}[{key}]"
        else:
            return None
    return found, where


def _descendants(schema: Json, path: str, depth: int) -> Iterator[tuple[Json, str]]:
    if depth > MAX_DEPTH:
        raise GrammarError(f"The schema is nested deeper than {MAX_DEPTH} levels.")
    yield schema, path
    for child, where in _children(schema, path):
        yield from _descendants(child, where, depth + 2)


def _children(schema: Json, path: str) -> Iterator[tuple[Json, str]]:
    if not isinstance(schema, Mapping):
        return
    for keyword, value in schema.items():
        where = f"{path}.{keyword}"
        if keyword in NAMED_SCHEMAS and isinstance(value, Mapping):
            for name, subschema in value.items():
                if keyword != "dependencies" or not isinstance(subschema, list):
                    yield subschema, f"{where}.{name}"
        elif keyword in _LISTS and isinstance(value, list):
            for index, subschema in enumerate(value):
                yield subschema, f"{where}[{index}]"
        elif keyword in _SINGLE:
            yield value, where
