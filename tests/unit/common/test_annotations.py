"""Annotations are reported by path, and invalid schemas raise nothing."""

import json

import pytest

from services.common.annotations import unenforced, unenforced_in
from tokenwire.pb.types.v1.types_pb2 import GrammarSpec, JsonObject

SCHEMA = {
    "type": "object",
    "properties": {
        "id": {"type": "integer", "format": "int64"},
        "format": {"format": "date-time"},
        "file": {"anyOf": [{"type": "string", "format": "path"}, {"type": "null"}]},
        "json": {"contentMediaType": "application/json", "contentSchema": {"format": "x"}},
    },
    "enum": [{"format": "path"}],
    "items": [{"$ref": "#/$defs/a"}, {"format": "uuid"}, {"format": "binary"}],
    "$defs": {"a": {"format": "ipvanyaddress"}, "format": {"contentEncoding": "base64"}},
    "format": 3,
}
PATHS = [
    "properties.id.format", "properties.file.anyOf[0].format", "properties.json.contentMediaType",
    "properties.json.contentSchema", "items[2].format", "$defs.a.format",
    "$defs.format.contentEncoding",
]  # fmt: skip


def test_annotations_are_reported_by_path_in_order() -> None:
    assert unenforced(SCHEMA, "$") == [f"$.{path}" for path in PATHS]


def test_schemas_are_found_in_every_kind_of_grammar() -> None:
    text = json.dumps(SCHEMA)
    assert unenforced_in(GrammarSpec(json_schema=text), "grammar") == [
        f"grammar.json_schema.{path}" for path in PATHS
    ]
    parts = GrammarSpec(
        llguidance=json.dumps({"grammars": [1, {"json_schema": SCHEMA}, {"json_value": SCHEMA}]})
    )
    assert unenforced_in(parts, "grammar") == [
        f"grammar.llguidance.grammars[{index}].{keyword}.{path}"
        for index, keyword in ((1, "json_schema"), (2, "json_value"))
        for path in PATHS
    ]
    for spec in (
        GrammarSpec(json_object=JsonObject()),
        GrammarSpec(regex='"format"'),
        GrammarSpec(),
    ):
        assert unenforced_in(spec, "grammar") == []


@pytest.mark.parametrize(
    "text", ['{"format"', '"format"', '["format"]', '{"properties":["format"]}', '{"format":null}',
             '"format"' + "[" * 100_000, '{"grammars":{"format":1}}'],
)  # fmt: skip
def test_an_invalid_schema_has_no_annotations(text: str) -> None:
    assert unenforced_in(GrammarSpec(json_schema=text), "grammar") == []
    assert unenforced_in(GrammarSpec(llguidance=text), "grammar") == []


def test_at_most_a_hundred_annotations_are_reported() -> None:
    assert len(unenforced({"items": [{"format": "x"}] * 1000}, "$")) == 100
