"""Types of a tool's arguments by their schema."""

from collections.abc import Mapping
from typing import Any

__all__ = ["json_types", "named_values", "object_of", "properties_of"]

_MAX_REFERENCES = 8  # references to follow, each of which leads to the next
_TYPE_OF = {
    bool: "boolean", int: "integer", float: "number", type(None): "null", list: "array",
    dict: "object",
}  # fmt: skip


def json_types(schema: Any, root: Mapping[str, Any], depth: int = 0) -> frozenset[str]:
    """Return the JSON types that a schema allows; "string" if it does not say."""
    if not isinstance(schema, Mapping) or depth > _MAX_REFERENCES:
        return frozenset({"string"})
    named = schema.get("type")
    if isinstance(named, str):
        return frozenset({named})
    if isinstance(named, list):
        return frozenset(map(str, named))
    if values := named_values(schema):
        return frozenset(_TYPE_OF.get(type(value), "string") for value in values)
    if isinstance(reference := schema.get("$ref"), str):
        return json_types(_resolved(reference, root), root, depth + 1)
    options = [
        option
        for keyword in ("anyOf", "oneOf", "allOf")
        if isinstance(parts := schema.get(keyword), list)
        for option in parts
    ]
    kinds = [json_types(option, root, depth + 1) for option in options]
    return frozenset().union(*kinds) if kinds else frozenset({"string"})


def object_of(root: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the part of a schema that describes the object: the target of a bare reference."""
    schema = root
    for _ in range(_MAX_REFERENCES):
        reference = schema.get("$ref")
        if "properties" in schema or not isinstance(reference, str):
            break
        found = _resolved(reference, root)
        if not isinstance(found, Mapping):
            break
        schema = found
    return schema


def properties_of(root: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the schemas of an object's members by name; {} if "properties" is not an object."""
    properties = object_of(root).get("properties")
    return properties if isinstance(properties, dict) else {}


def named_values(schema: Mapping[str, Any]) -> list[Any]:
    """Return the values that a schema lists; [] if it lists none."""
    if isinstance(values := schema.get("enum"), list):
        return values
    return [schema["const"]] if "const" in schema else []


def _resolved(reference: str, root: Mapping[str, Any]) -> Any:
    """Return the target of a reference into the schema; None without one."""
    found: Any = root
    for part in reference.removeprefix("#").split("/")[1:]:
        found = found.get(part) if isinstance(found, Mapping) else None
    return found
