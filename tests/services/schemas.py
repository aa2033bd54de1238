"""Reproducible sample of JSON Schemas as APIs, configurations, events and forms use them."""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

__all__ = ["SUPPORTED", "UNSUPPORTED", "Sample", "Unsupported"]

Schema: TypeAlias = dict[str, Any]

_NOUNS = (
    "id", "name", "title", "kind", "state", "email", "address", "city", "country", "price",
    "amount", "currency", "quantity", "tags", "labels", "owner", "parent", "created_at",
    "updated_at", "start", "end", "url", "path", "host", "port", "timeout", "retries",
    "enabled", "level", "message", "code", "reason", "score", "rating", "width", "height",
    "latitude", "longitude", "locale", "version", "checksum", "items", "notes", "phone",
    "priority", "weight", "unit", "category", "source", "target", "method", "headers",
    "user-agent", "$id", "größe", "名前", "x.y", "first\tname",
)  # fmt: skip
_WORDS = (
    "red", "green", "blue", "open", "closed", "pending", "paid", "draft", "low", "high", "admin",
    "guest", "eu-west", "us-east",
)  # fmt: skip
_SHORT_FORMATS = ("date", "ipv4", "uuid")
_FORMATS = (*_SHORT_FORMATS, "time", "date-time", "email", "ipv6", "hostname", "duration", "uri")
_SHORT_PATTERNS = (
    "^[A-Z]{2}-[0-9]{3,5}$", "^(GET|POST|PUT)$", "^#[0-9a-f]{6}$", r"^\+?[0-9]{6,12}$",
    r"^\S{1,8}$",
)  # fmt: skip
_PATTERNS = (*_SHORT_PATTERNS, r"^v\d+\.\d+$", "^[a-z]+(-[a-z]+)?$", "[0-9]", "^ab?c*$")


@dataclass(frozen=True, slots=True)
class Sample:
    """A schema; `is_bounded` is True if every value that it allows is short."""

    schema: Schema | bool
    is_bounded: bool


@dataclass(frozen=True, slots=True)
class Unsupported:
    """A schema with a keyword, at `path`, that the grammar service can't enforce."""

    schema: Schema
    keyword: str
    path: str


class _Maker:
    """Generator of random schemas; with `bounded`, they allow short values only."""

    def __init__(self, seed: int, bounded: bool) -> None:
        self._random = random.Random(seed)
        self._bounded = bounded
        self._definitions: Schema = {}

    def document(self) -> Schema:
        """Return a whole schema: mostly an object, as in practice."""
        make = self._random.choice([self._object] * 6 + [self._array, self._any_of, self._all_of])
        schema = make(0)
        if self._random.random() < 0.3:
            schema["$schema"] = "https://json-schema.org/draft/2020-12/schema"
        if self._random.random() < 0.4:
            schema |= {"title": "Thing", "description": "What is sent.", "examples": [{}]}
        if self._definitions:
            schema["$defs"] = self._definitions
        return schema

    def _value(self, depth: int) -> Schema:
        leaves: list[Callable[[int], Schema]] = [
            self._string, self._string, self._pattern, self._format, self._integer, self._integer,
            self._enum, self._const, self._boolean, self._nullable, self._multiple,
        ]  # fmt: skip
        if not self._bounded:
            leaves += [self._number, self._open_string]
        branches: list[Callable[[int], Schema]] = [
            self._object, self._array, self._tuple, self._any_of, self._one_of, self._reference,
            self._all_of, self._map,
        ]  # fmt: skip
        return self._random.choice(leaves + (branches if depth < 3 else []))(depth)

    def _string(self, depth: int) -> Schema:
        low = self._random.randint(0, 3)
        return {"type": "string", "minLength": low, "maxLength": low + self._random.randint(0, 9)}

    def _open_string(self, depth: int) -> Schema:
        return {"type": "string", "description": "Anything.", "default": ""}

    def _pattern(self, depth: int) -> Schema:
        patterns = _SHORT_PATTERNS if self._bounded else _PATTERNS
        return {"type": "string", "pattern": self._random.choice(patterns)}

    def _format(self, depth: int) -> Schema:
        formats = _SHORT_FORMATS if self._bounded else _FORMATS
        return {"type": "string", "format": self._random.choice(formats)}

    def _integer(self, depth: int) -> Schema:
        low = self._random.choice([0, 1, -40, 1024, -999])
        exclusive = self._random.random() < 0.3
        high = low + self._random.choice([3, 100, 65535])
        names = ("exclusiveMinimum", "exclusiveMaximum") if exclusive else ("minimum", "maximum")
        return {"type": "integer", names[0]: low, names[1]: high}

    def _number(self, depth: int) -> Schema:
        low = self._random.choice([0, -90, 0.5, -1.25])
        return {"type": "number", "minimum": low, "maximum": low + self._random.choice([1, 180.5])}

    def _multiple(self, depth: int) -> Schema:
        step = self._random.choice([5, 10, 7])
        return {"type": "integer", "minimum": 0, "maximum": 500, "multipleOf": step}

    def _boolean(self, depth: int) -> Schema:
        return {"type": "boolean"}

    def _enum(self, depth: int) -> Schema:
        values: list[Any] = self._random.sample(_WORDS, self._random.randint(1, 5))
        if self._random.random() < 0.3:
            values += [None, 3, True, 'say "é"\n']
        return {"enum": values}

    def _const(self, depth: int) -> Schema:
        return {"const": self._random.choice([1, "v1", True, None, {"a": [1, "b"]}, [], -2.5])}

    def _nullable(self, depth: int) -> Schema:
        return {**self._string(depth), "type": ["string", "null"]}

    def _object(self, depth: int) -> Schema:
        names = self._random.sample(_NOUNS, self._random.randint(1, 5 if depth else 7))
        required = [name for name in names if self._random.random() < 0.6]
        schema: Schema = {
            "type": "object",
            "properties": {name: self._value(depth + 1) for name in names},
            "required": required,
        }
        if self._bounded or self._random.random() < 0.7:
            schema["additionalProperties"] = False
        elif self._random.random() < 0.5:
            schema["additionalProperties"] = self._boolean(depth)
        return schema

    def _map(self, depth: int) -> Schema:
        if self._bounded:
            return self._object(depth)
        schema: Schema = {"type": "object", "additionalProperties": self._integer(depth)}
        if self._random.random() < 0.5:
            schema["patternProperties"] = {"^x-": self._string(depth)}
        return schema

    def _array(self, depth: int) -> Schema:
        low = self._random.randint(0, 2)
        schema: Schema = {"type": "array", "items": self._value(depth + 1), "minItems": low}
        if self._bounded or self._random.random() < 0.6:
            schema["maxItems"] = low + self._random.randint(0, 3)
        return schema

    def _tuple(self, depth: int) -> Schema:
        parts = [self._value(depth + 1) for _ in range(self._random.randint(1, 3))]
        return {"type": "array", "prefixItems": parts, "items": False, "minItems": len(parts)}

    def _any_of(self, depth: int) -> Schema:
        return {"anyOf": [self._value(depth + 1) for _ in range(self._random.randint(1, 3))]}

    def _one_of(self, depth: int) -> Schema:
        """Return alternatives that a constant `type` property distinguishes, as in events."""
        tags = self._random.sample(_WORDS, self._random.randint(1, 3))
        return {"oneOf": [self._tagged(tag, depth) for tag in tags]}

    def _tagged(self, tag: str, depth: int) -> Schema:
        schema = self._object(depth + 1)
        schema["properties"] = {"type": {"const": tag}, **schema["properties"]}
        schema["required"] = ["type", *schema["required"]]
        return schema

    def _all_of(self, depth: int) -> Schema:
        first, second = self._object(depth + 1), self._object(depth + 1)
        for part in (first, second):
            part.pop("additionalProperties", None)
        second["properties"] = {f"{name}_": value for name, value in second["properties"].items()}
        second["required"] = [f"{name}_" for name in second["required"]]
        merged: Schema = {"allOf": [first, second]}
        if self._bounded:
            names = [*first["properties"], *second["properties"]]
            merged |= {"properties": dict.fromkeys(names, True), "additionalProperties": False}
        return merged

    def _reference(self, depth: int) -> Schema:
        name = f"part{len(self._definitions)}"
        self._definitions[name] = {}
        self._definitions[name] = self._value(depth + 1)
        return {"$ref": f"#/$defs/{name}"}


def _nested(count: int, is_bounded: bool) -> list[Sample]:
    return [Sample(_Maker(seed, is_bounded).document(), is_bounded) for seed in range(count)]


_TREE: Schema = {
    "$defs": {
        "node": {
            "type": "object",
            "properties": {
                "value": {"type": "integer", "minimum": 0, "maximum": 9},
                "children": {"type": "array", "items": {"$ref": "#/$defs/node"}, "maxItems": 2},
            },
            "required": ["value"],
            "additionalProperties": False,
        }
    },
    "$ref": "#/$defs/node",
}
_LOGIC: Sequence[Schema] = (
    {"type": "object", "properties": {"a": {"type": "boolean"}, "b": {"type": "boolean"}},
     "additionalProperties": False, "oneOf": [{"required": ["a"]}, {"required": ["b"]}]},
    {"type": "array", "items": {"enum": ["x", "y", "z"]}, "uniqueItems": True, "minItems": 2},
    {"type": "object", "propertyNames": {"enum": ["k", "l"]}, "minProperties": 1,
     "additionalProperties": {"type": "boolean"}},
    {"type": "array", "items": {"type": "boolean"}, "contains": {"const": True}, "maxItems": 4},
    {"type": "object", "properties": {"kind": {"enum": ["s", "n"]}, "value": {"enum": ["s", 1]}},
     "required": ["kind", "value"], "additionalProperties": False,
     "if": {"properties": {"kind": {"const": "s"}}},
     "then": {"properties": {"value": {"type": "string"}}},
     "else": {"properties": {"value": {"type": "number"}}}},
    {"type": "integer", "minimum": 0, "maximum": 9, "not": {"enum": [3, 4]}},
    {"type": "object", "properties": {"size": {"const": 1}, "unit": {"const": "m"}},
     "additionalProperties": False, "dependencies": {"size": ["unit"]}},
)  # fmt: skip
SUPPORTED: Sequence[Sample] = (
    *(Sample(schema, True) for schema in _LOGIC),
    *_nested(200, True),
    *_nested(130, False),
    Sample(_TREE, False),
    Sample({"type": "object"}, False),
    Sample({}, False),
    Sample(True, False),
    Sample({"type": ["integer", "boolean"], "minimum": 1, "maximum": 20}, True),
    Sample({"const": "only"}, True),
)


def _unsupported() -> Sequence[Unsupported]:
    keywords: Sequence[tuple[str, Any]] = (
        ("unevaluatedItems", False),
        ("unevaluatedProperties", False),
        ("patternProperties", {r"^a\b": {}}),
    )
    found: list[Unsupported] = []
    for seed in range(5):
        for keyword, value in keywords:
            schema = _Maker(seed + 1000, False).document()
            schema.setdefault("properties", {})["odd one"] = {"type": "object", keyword: value}
            found.append(Unsupported(schema, keyword, "$.properties.odd one"))
    return found


UNSUPPORTED = _unsupported()
