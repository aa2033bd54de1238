"""Which parts of a plain JSON Schema speak of a place in a text."""

import functools
import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeAlias

from services.common.json_values import Json
from services.grammar.schemas.json_schema import subschemas
from services.grammar.schemas.word_sets import WordSet

__all__ = ["UNIQUE", "JsonPositions", "Position", "may_repeat"]

UNIQUE = "x-tokenwire-unique"  # marks arrays in plain schemas; llguidance takes no notice of it

Position: TypeAlias = frozenset[int]
"""Numbers of the schemas that may be meant at a place"""

_LEADING = frozenset({"$defs", "$ref", "allOf", "anyOf", "definitions", "description", "title"})
_ELSEWHERE = frozenset({"$ref", "allOf", "anyOf", "const", "enum", "oneOf"})

_Schema: TypeAlias = Mapping[str, Any]


class JsonPositions:
    """Finds the schemas of members and items as a text goes on.

    Where a place may be of one schema or another, both are meant: what one of them forbids is
    avoided.
    """

    def __init__(self, schema: _Schema, options: _Schema) -> None:
        """`options`: the members of a schema that tell llguidance how JSON is written."""
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
        """The texts that items can be; None for any."""
        items: list[Any] = []
        for schema in self._of(position):
            if schema.get("type", "array") == "array":
                items += [*schema.get("prefixItems", ()), schema.get("items", {})]
        if not items or any(item in ({}, True) for item in items):
            return None
        return self._words({"anyOf": items})

    def _keys_of(self, position: Position) -> WordSet | None:
        """The texts that keys can be that match patterns; None where others may come, too."""
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
            self._number(plain) for schema in schemas for plain in self._plain(schema, 0)
        )

    def _of(self, position: Position) -> list[_Schema]:
        return [self._schemas[number] for number in sorted(position)]

    def _number(self, schema: _Schema) -> int:
        number = self._numbers.get(id(schema))
        if number is None:
            number = self._numbers[id(schema)] = len(self._schemas)
            self._schemas.append(schema)
        return number

    def _plain(self, schema: Any, depth: int) -> Iterator[_Schema]:
        """The alternatives of a schema."""
        if not isinstance(schema, Mapping) or depth > 100:
            return
        if isinstance(reference := schema.get("$ref"), str) and reference.startswith("#"):
            found: Any = self._root
            for part in reference.split("/")[1:]:
                name = part.replace("~1", "/").replace("~0", "~")
                if isinstance(found, list) and name.isdecimal() and int(name) < len(found):
                    found = found[int(name)]
                else:
                    found = found.get(name, {}) if isinstance(found, Mapping) else {}
            yield from self._plain(found, depth + 1)
        for keyword in ("anyOf", "allOf"):
            for one in schema.get(keyword, ()):
                yield from self._plain(one, depth + 1)
        if not schema.keys() <= _LEADING:
            yield schema


def _item_of(schema: _Schema, index: int) -> Any:
    prefix: Sequence[Any] = schema.get("prefixItems", ())
    rest = schema.get("items", {})
    if isinstance(rest, list):
        prefix, rest = rest, schema.get("additionalItems", {})
    return prefix[index] if index < len(prefix) else rest


def _values_of(schema: _Schema, name: str) -> Iterator[Any]:
    """What a member may be: its own schema, or any of those for keys that are not named."""
    properties = schema.get("properties", {})
    if name in properties:
        yield properties[name]
    else:
        yield from schema.get("patternProperties", {}).values()
        yield schema.get("additionalProperties", {})


def may_repeat(schema: Json) -> bool:
    """Whether some object may have keys that are not named, or some array is marked."""
    return any(isinstance(one, Mapping) and _may_repeat(one) for one, _ in subschemas(schema, "$"))


def _may_repeat(schema: _Schema) -> bool:
    if UNIQUE in schema:
        return True
    kinds = schema.get("type")
    if kinds is None and schema.keys() & _ELSEWHERE:
        return False
    if kinds is not None and "object" not in ([kinds] if isinstance(kinds, str) else kinds):
        return False
    return schema.get("additionalProperties") is not False or "patternProperties" in schema
