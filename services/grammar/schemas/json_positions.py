"""Positions in a JSON text: the subschemas that may apply to the value there."""

import functools
import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeAlias

from services.common.json_values import Json
from services.grammar.schemas.native_subset import IN_PLACE
from services.grammar.schemas.subschemas import resolve_pointer, subschemas
from services.grammar.schemas.word_sets import WordSet

__all__ = ["UNIQUE", "JsonPositions", "Position", "allows_repeats"]

UNIQUE = "x-tokenwire-unique"
"""Keyword in place of uniqueItems in lowered schemas; llguidance ignores it"""

Position: TypeAlias = frozenset[int]
"""Numbers of the subschemas that may apply"""

_TRANSPARENT = frozenset({"$defs", "$ref", "allOf", "anyOf", "definitions", "description", "title"})

_Schema: TypeAlias = Mapping[str, Any]


class JsonPositions:
    """The positions of a lowered schema.

    A position has the subschemas of all alternatives, and excludes what any of them forbids.
    """

    def __init__(self, schema: _Schema, options: _Schema) -> None:
        """options: members of a schema that tell llguidance how to write JSON."""
        self._root = schema
        self._options = options
        self._schemas: list[_Schema] = []
        self._numbers: dict[int, int] = {}
        self.start = self._position([schema])
        self.item = functools.lru_cache(maxsize=None)(self._item)
        self.member = functools.lru_cache(maxsize=None)(self._member)
        self.is_unique = functools.lru_cache(maxsize=None)(self._is_unique)
        self.items_of = functools.lru_cache(maxsize=None)(self._items_of)
        self.keys_of = functools.lru_cache(maxsize=None)(self._keys_of)

    def _item(self, position: Position, index: int) -> Position:
        return self._position(_item_of(schema, index) for schema in self._of(position))

    def _member(self, position: Position, key: bytes) -> Position:
        name = json.loads(b'"%s"' % key)
        return self._position(
            value for schema in self._of(position) for value in _values_of(schema, name)
        )

    def _is_unique(self, position: Position) -> bool:
        return any(UNIQUE in schema for schema in self._of(position))

    def _items_of(self, position: Position) -> WordSet | None:
        """Return the words that items can be, or None if that is not known."""
        items: list[Any] = []
        for schema in self._of(position):
            if schema.get("type", "array") == "array":
                items += [*schema.get("prefixItems", ()), schema.get("items", {})]
        if not items or any(item in ({}, True) for item in items):
            return None
        return self._words({"anyOf": items})

    def _keys_of(self, position: Position) -> WordSet | None:
        """Return the words that unnamed keys can be, or None if no patterns limit them."""
        patterns: list[str] = []
        for schema in self._of(position):
            if schema.get("type", "object") == "object":
                if schema.get("additionalProperties", True) is not False:
                    return None
                patterns += schema.get("patternProperties", {})
        if not patterns:
            return None
        return self._words({"anyOf": [{"type": "string", "pattern": p} for p in patterns]})

    def _words(self, schema: _Schema) -> WordSet | None:
        whole = {**self._options, "$defs": self._root.get("$defs", {}), **schema}
        return WordSet.of(json.dumps({"grammars": [{"json_schema": whole}]}))

    def _position(self, schemas: Any) -> Position:
        return frozenset(
            self._number(one) for schema in schemas for one in self._alternatives(schema, 0)
        )

    def _of(self, position: Position) -> list[_Schema]:
        return [self._schemas[number] for number in sorted(position)]

    def _number(self, schema: _Schema) -> int:
        number = self._numbers.get(id(schema))
        if number is None:
            number = self._numbers[id(schema)] = len(self._schemas)
            self._schemas.append(schema)
        return number

    def _alternatives(self, schema: Any, depth: int) -> Iterator[_Schema]:
        """Yield the parts of a schema behind references, "anyOf" and "allOf"."""
        if not isinstance(schema, Mapping) or depth > 100:
            return
        if isinstance(reference := schema.get("$ref"), str) and reference.startswith("#"):
            target = resolve_pointer(self._root, reference[1:])
            if target is not None:
                yield from self._alternatives(target[0], depth + 1)
        for keyword in ("anyOf", "allOf"):
            for one in schema.get(keyword, ()):
                yield from self._alternatives(one, depth + 1)
        if not schema.keys() <= _TRANSPARENT:
            yield schema


def _item_of(schema: _Schema, index: int) -> Any:
    prefix: Sequence[Any] = schema.get("prefixItems", ())
    rest = schema.get("items", {})
    if isinstance(rest, list):
        prefix, rest = rest, schema.get("additionalItems", {})
    return prefix[index] if index < len(prefix) else rest


def _values_of(schema: _Schema, name: str) -> Iterator[Any]:
    """Yield the schema of a named member, or those of all unnamed members."""
    properties = schema.get("properties", {})
    if name in properties:
        yield properties[name]
    else:
        yield from schema.get("patternProperties", {}).values()
        yield schema.get("additionalProperties", {})


def allows_repeats(schema: Json) -> bool:
    """Return whether some object may have unnamed keys, or some array has UNIQUE."""
    return any(
        isinstance(one, Mapping) and _allows_repeats(one) for one, _ in subschemas(schema, "$")
    )


def _allows_repeats(schema: _Schema) -> bool:
    if UNIQUE in schema:
        return True
    kinds = schema.get("type")
    if kinds is None and schema.keys() & IN_PLACE:
        return False
    if kinds is not None and "object" not in ([kinds] if isinstance(kinds, str) else kinds):
        return False
    return schema.get("additionalProperties") is not False or "patternProperties" in schema
