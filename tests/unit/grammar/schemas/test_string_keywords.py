"""Strings of a schema are enforced exactly, or refused with their place."""

import json
from copy import deepcopy
from typing import Any

import pytest

from services.grammar import GrammarError
from services.grammar.matching.prototype import compile_prototype
from services.grammar.schemas.string_keywords import lower_strings
from services.grammar.specification import locate, translate
from tests.unit.grammar.drawing import BYTES, Drawing
from tokenwire.pb.types.v1.types_pb2 import GrammarSpec

NAMES = {"properties": {"a\u0001": {"const": 1}}, "required": ["a\u0001", "\u007f"]}


@pytest.mark.parametrize(
    ("schema", "place"),
    [
        ({"const": "a\u0001b"}, "$.const has U+0001"),
        ({"items": {"enum": ["x", ["\u007f"]]}}, "$.items.enum[1][0] has U+007F"),
        ({"properties": {"a": {"const": {"k": "\u001f"}}}}, "$.properties.a.const.k has U+001F"),
        ({"$ref": "#/x/y", "x": {"y": {"enum": ["\u0000"]}}}, "$.x.y.enum[0] has U+0000"),
        (
            {"items": {"pattern": r"^\x01$"}},
            "matches the pattern at $.items.pattern",
        ),
        ({"items": {"pattern": r"a\b"}}, r"The pattern at $.items.pattern can't be enforced: \b"),
        ({"patternProperties": {"(": {}}}, "The pattern at $.patternProperties.( can't be"),
        ({"patternProperties": {"^(?=a)": {}}}, "at $.patternProperties.^(?=a): (?=…) is not"),
        ({"patternProperties": {"^a": {}, "^(a)": {}}}, "^(a) equals another one"),
        (NAMES | {"patternProperties": {r"^b": {}}}, r'The property "a\u0001" at $ has a control'),
    ],
)
def test_an_unenforceable_string_is_refused_with_its_place(schema: Any, place: str) -> None:
    with pytest.raises(GrammarError) as caught:
        Drawing(schema)
    assert place in str(caught.value)


@pytest.mark.parametrize("text", ['a"b\\c', "\b\t\n\f\r", "é😀\u2028\u0085/", "", "</tool_call>"])
def test_constants_are_generated_exactly(text: str) -> None:
    values = [{"const": text}, {"enum": [1, text]}, {"const": {text: [text]}}]
    for schema, value in zip(values, [text, text, {text: [text]}], strict=True):
        assert value in Drawing(schema).draw(20)


def test_names_may_have_control_characters() -> None:
    value = Drawing(NAMES | {"type": "object", "additionalProperties": {"const": 2}}).draw(20)[0]
    assert value["a\u0001"] == 1
    assert value["\u007f"] == 2


def test_a_name_pattern_of_unsupported_characters_allows_no_member() -> None:
    schema = {"type": "object", "patternProperties": {r"\x01": {}}, "additionalProperties": False}
    assert Drawing(schema).draw(5) == [{}] * 5


@pytest.mark.parametrize("name", ["int32", "double", "byte", "password", "path", "unknown", ""])
@pytest.mark.parametrize("kind", ["string", "integer", "number", ["string", "null"]])
def test_an_annotation_format_changes_nothing(name: str, kind: Any) -> None:
    schema = {"type": kind, "maxLength": 3, "maximum": 9, "minimum": 0}
    assert Drawing(schema | {"format": name}).draw(20) == Drawing(schema).draw(20)


def test_string_keywords_do_not_constrain_other_types() -> None:
    schema = {"type": "integer", "minimum": 1, "maximum": 9, "format": "date", "pattern": r"\b"}
    assert all(value in range(1, 10) for value in Drawing(schema).draw(20))
    anything = Drawing({"maxLength": 2, "format": "date-time"})
    assert [anything.allows(text) for text in ("1", '"a"', "[]", "null")] == [
        True,
        False,
        True,
        True,
    ]


def test_property_names_like_keywords_are_kept() -> None:
    schema: Any = {
        "properties": {"format": {"const": 1}, "pattern": {"const": 2}},
        "required": ["format"],
        "default": {"pattern": r"\b"},
        "x-note": {"pattern": r"\b"},
    }
    assert lower_strings(schema) == schema


def test_the_given_schema_is_not_changed() -> None:
    schema: Any = {
        "allOf": [{"format": "email", "pattern": "^a"}],
        "format": "email",
        "patternProperties": {"^a": {"format": "int32"}},
    }
    before = deepcopy(schema)
    held = lower_strings(schema)
    assert schema == before
    assert held != before


def test_several_patterns_are_enforced_together() -> None:
    schema = {"type": "string", "pattern": r"^(?=.*1)..$", "allOf": [{"pattern": "^[12]"}]}
    for text in Drawing(schema).draw(100):
        assert len(text) == 2
        assert text[0] == "1" or text == "21"


@pytest.mark.parametrize(
    ("schema", "words"),
    [
        ({"patternProperties": {"^a": {}, "[b]$": {}}}, ["/^a/", "/[b]$/", "not disjoint"]),
        ({"pattern": "^a/", "maxLength": 1}, ["Regex is empty", "/^a/", "Look at $.pattern."]),
        ({"format": "date", "maxLength": 3}, ["Regex is empty", "/date/"]),
    ],
)
def test_reasons_of_llguidance_quote_the_client_pattern(schema: Any, words: list[str]) -> None:
    spec = GrammarSpec(
        json_schema=json.dumps(
            schema | {"type": "object" if "patternProperties" in schema else "string"}
        )
    )
    with pytest.raises(GrammarError) as caught:
        compile_prototype(BYTES, translate(spec))
    reason = locate(spec, str(caught.value))
    assert all(word in reason for word in words), reason
    parts = json.dumps({"grammars": [{"json_schema": json.loads(spec.json_schema)}]})
    reason = locate(GrammarSpec(llguidance=parts), str(caught.value))
    assert all(word in reason for word in words if "Look at" not in word), reason
