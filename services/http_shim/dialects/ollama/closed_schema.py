"""Schemas of answers as Ollama reads them: an object has no properties but those that it names."""

from collections.abc import Iterator
from typing import Any

from services.http_shim.dialects.fields import JsonObject

__all__ = ["closed_schema"]

_LISTS = ("anyOf", "oneOf", "prefixItems")
_MAPS = ("properties", "$defs", "definitions")
_SINGLE = ("items", "additionalProperties")
_OPENING = ("additionalProperties", "unevaluatedProperties", "patternProperties", "allOf", "$ref")
"""Keywords of an object that names further properties, or may"""


def closed_schema(schema: JsonObject) -> JsonObject:
    """Return a schema whose objects with properties allow no others, unless they say so.

    A schema that joins several others by `allOf` stays as it is: each of them would exclude what
    the others name.
    """
    if any(_joins_several(each) for each in _schemas(schema)):
        return schema
    return _closed(schema)


def _joins_several(schema: JsonObject) -> bool:
    joined = schema.get("allOf")
    return isinstance(joined, list) and len(joined) > 1


def _schemas(schema: JsonObject) -> Iterator[JsonObject]:
    """Yield a schema and those within it."""
    yield schema
    for name in (*_LISTS, "allOf"):
        values = schema.get(name)
        for each in values if isinstance(values, list) else ():
            if isinstance(each, dict):
                yield from _schemas(each)
    for name in _MAPS:
        values = schema.get(name)
        for each in values.values() if isinstance(values, dict) else ():
            if isinstance(each, dict):
                yield from _schemas(each)
    for name in _SINGLE:
        if isinstance(each := schema.get(name), dict):
            yield from _schemas(each)


def _closed_part(part: Any) -> Any:
    return _closed(part) if isinstance(part, dict) else part


def _closed(schema: JsonObject) -> JsonObject:
    made = dict(schema)
    for name, value in schema.items():
        if name in _LISTS and isinstance(value, list):
            made[name] = [_closed_part(each) for each in value]
        elif name in _MAPS and isinstance(value, dict):
            made[name] = {key: _closed_part(each) for key, each in value.items()}
        elif name in _SINGLE:
            made[name] = _closed_part(value)
    if isinstance(schema.get("properties"), dict) and not schema.keys() & set(_OPENING):
        made["additionalProperties"] = False
    return made
