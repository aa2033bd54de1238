"""Schemas of answers are closed as Ollama closes them, and otherwise keep their meaning."""

from typing import Any

import pytest

from services.http_shim.dialects.ollama.closed_schema import closed_schema

CITY = {"type": "object", "properties": {"city": {"type": "string"}}}
CLOSED = CITY | {"additionalProperties": False}


@pytest.mark.parametrize(
    ("schema", "closed"),
    [
        (CITY, CLOSED),
        ({"type": "object"}, {"type": "object"}),
        (CITY | {"additionalProperties": True}, CITY | {"additionalProperties": True}),
        ({"type": "array", "items": CITY}, {"type": "array", "items": CLOSED}),
        ({"anyOf": [CITY, {"type": "null"}]}, {"anyOf": [CLOSED, {"type": "null"}]}),
        (
            {"$defs": {"City": CITY}, "properties": {"home": {"$ref": "#/$defs/City"}}},
            {
                "$defs": {"City": CLOSED},
                "properties": {"home": {"$ref": "#/$defs/City"}},
                "additionalProperties": False,
            },
        ),
        ({"allOf": [CITY, CITY]}, {"allOf": [CITY, CITY]}),
        ({"allOf": 5, "items": [], "$defs": None}, {"allOf": 5, "items": [], "$defs": None}),
        (
            {"properties": {"properties": {"type": "string"}}},
            {"properties": {"properties": {"type": "string"}}, "additionalProperties": False},
        ),
    ],
    ids=str,
)
def test_objects_have_no_properties_but_those_that_they_name(
    schema: dict[str, Any], closed: dict[str, Any]
) -> None:
    before = str(schema)
    assert closed_schema(schema) == closed
    assert str(schema) == before
