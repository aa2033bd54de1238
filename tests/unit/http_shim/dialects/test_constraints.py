"""Constraint fields of every server are converted to a grammar."""

import json
from typing import Any

import pytest

from services.http_shim.dialects.chat.read import read_chat
from services.http_shim.dialects.completions.read import read_completion
from services.http_shim.dialects.reading import Reading
from tokenwire.errors import ServiceError
from tokenwire.pb.types.v1.types_pb2 import (
    ChoiceList,
    GrammarSpec,
    JsonObject,
    StructuralTag,
    TaggedStructure,
)

SCHEMA = {"type": "integer"}
TEXT = '{"type":"integer"}'
JSON = GrammarSpec(json_schema=TEXT)
REGEX = GrammarSpec(regex="a+")
CHOICE = GrammarSpec(choice=ChoiceList(choices=["a", "b"]))
GBNF, LARK = 'root ::= "start: a"', '%llguidance {}\nstart: "::="'
TAG = {
    "type": "structural_tag",
    "structures": [{"begin": "<f>", "schema": SCHEMA, "end": "</f>"}, {"begin": "<", "end": ""}],
    "triggers": ["<"],
}
STRUCTURES = [
    TaggedStructure(begin="<f>", schema=TEXT, end="</f>"),
    TaggedStructure(begin="<"),
]
TAGGED = GrammarSpec(structural_tag=StructuralTag(structures=STRUCTURES, triggers=["<"]))
CASES: list[tuple[dict[str, Any], str, GrammarSpec]] = [
    ({"guided_json": SCHEMA}, "guided_json", JSON),
    ({"guided_json": TEXT}, "guided_json", JSON),
    ({"guided_regex": "a+"}, "guided_regex", REGEX),
    ({"guided_choice": ["a", "b"]}, "guided_choice", CHOICE),
    ({"guided_grammar": GBNF}, "guided_grammar", GrammarSpec(gbnf=GBNF)),
    ({"guided_grammar": LARK}, "guided_grammar", GrammarSpec(lark=LARK)),
    ({"json_schema": SCHEMA}, "json_schema", JSON),
    ({"json_schema": TEXT}, "json_schema", JSON),
    ({"regex": "a+"}, "regex", REGEX),
    ({"choice": ["a", "b"]}, "choice", CHOICE),
    ({"ebnf": GBNF}, "ebnf", GrammarSpec(gbnf=GBNF)),
    ({"grammar": GBNF}, "grammar", GrammarSpec(gbnf=GBNF)),
    ({"grammar": '?start: "a"'}, "grammar", GrammarSpec(lark='?start: "a"')),
    ({"grammar": "start ::= a"}, "grammar", GrammarSpec(gbnf="start ::= a")),
    ({"structural_tag": TAG}, "structural_tag", TAGGED),
    ({"structural_tag": json.dumps(TAG)}, "structural_tag", TAGGED),
    ({"response_format": TAG}, "response_format", TAGGED),
    ({"structured_outputs": {"json": SCHEMA}}, "structured_outputs.json", JSON),
    ({"structured_outputs": {"json": TEXT}}, "structured_outputs.json", JSON),
    ({"structured_outputs": {"regex": "a+"}}, "structured_outputs.regex", REGEX),
    ({"structured_outputs": {"choice": ["a", "b"]}}, "structured_outputs.choice", CHOICE),
    (
        {"structured_outputs": {"grammar": GBNF}},
        "structured_outputs.grammar",
        GrammarSpec(gbnf=GBNF),
    ),
    (
        {"structured_outputs": {"json_object": True}},
        "structured_outputs.json_object",
        GrammarSpec(json_object=JsonObject()),
    ),
    (
        {"structured_outputs": {"structural_tag": json.dumps(TAG)}},
        "structured_outputs.structural_tag",
        TAGGED,
    ),
    ({"regex": "a+", "response_format": {"type": "text"}, "grammar": ""}, "regex", REGEX),
    ({"structured_outputs": {"disable_any_whitespace": True}, "regex": "a+"}, "regex", REGEX),
]


def readings(fields: dict[str, Any]) -> list[Reading]:
    """Return what a completion and a chat with these fields ask for."""
    messages = [{"role": "user", "content": "x"}]
    return [
        read_completion({"prompt": "x"} | fields),
        read_chat({"messages": messages} | fields),
    ]


@pytest.mark.parametrize(("fields", "param", "grammar"), CASES)
def test_constraint_becomes_a_grammar(
    fields: dict[str, Any], param: str, grammar: GrammarSpec
) -> None:
    for reading in readings(fields):
        assert reading.request.grammar == grammar
        assert reading.field("grammar") == param
        assert reading.ignored == []


def test_null_constraints_are_no_constraint() -> None:
    nothing: dict[str, Any] = {field: None for fields, _, _ in CASES for field in fields}
    nothing |= {"structured_outputs": {"json": None, "json_object": False}}
    for reading in readings(nothing):
        assert not reading.request.HasField("grammar")


def test_unsupported_options_are_reported_as_ignored() -> None:
    fields = {
        "structured_outputs": {"json": SCHEMA, "disable_fallback": True},
        "guided_decoding_backend": "xgrammar",
    }
    for reading in readings(fields):
        assert set(reading.ignored) == {
            "guided_decoding_backend",
            "structured_outputs.disable_fallback",
        }


@pytest.mark.parametrize(
    ("fields", "white_space"),
    [
        ({"guided_json": SCHEMA, "guided_whitespace_pattern": " ?"}, " ?"),
        ({"structured_outputs": {"json": SCHEMA, "whitespace_pattern": r"\s*"}}, r"\s*"),
        ({"structured_outputs": {"json_object": True, "disable_any_whitespace": True}}, ""),
        ({"structured_outputs": {"disable_any_whitespace": True}, "structural_tag": TAG}, ""),
        ({"structured_outputs": {"json": SCHEMA, "disable_any_whitespace": False}}, None),
        ({"structured_outputs": {"disable_any_whitespace": True}, "regex": "a"}, None),
        ({"guided_choice": ["a"], "guided_whitespace_pattern": " ?"}, None),
    ],
)
def test_the_white_space_of_json_is_passed_on(
    fields: dict[str, Any], white_space: str | None
) -> None:
    for reading in readings(fields):
        grammar = reading.request.grammar
        found = grammar.json_whitespace if grammar.HasField("json_whitespace") else None
        assert found == white_space


@pytest.mark.parametrize(
    ("fields", "param", "message"),
    [
        (
            {"guided_json": SCHEMA, "regex": "a"},
            "regex",
            "guided_json and regex exclude each other",
        ),
        (
            {"structured_outputs": {"regex": "a", "choice": ["a"]}},
            "structured_outputs.choice",
            "structured_outputs.regex and structured_outputs.choice exclude each other",
        ),
        (
            {"response_format": {"type": "json_object"}, "grammar": GBNF},
            "grammar",
            "response_format and grammar exclude each other",
        ),
        ({"structural_tag": "{"}, "structural_tag", "is not a structural tag"),
        ({"structural_tag": "[]"}, "structural_tag", "is not a structural tag"),
        (
            {"response_format": {"type": "structural_tag", "format": {"type": "any_text"}}},
            "response_format",
            "response_format.format is not supported",
        ),
        (
            {"structured_outputs": {"disable_additional_properties": True}},
            "structured_outputs.disable_additional_properties",
            "additionalProperties",
        ),
    ],
)
def test_invalid_constraints_are_refused(fields: dict[str, Any], param: str, message: str) -> None:
    with pytest.raises(ServiceError) as caught:
        readings(fields)
    assert caught.value.field == param
    assert message in caught.value.message


def test_type_error_has_the_path_of_its_field() -> None:
    with pytest.raises(ServiceError) as caught:
        readings({"structured_outputs": {"choice": ["a", 7]}})
    assert caught.value.field == "structured_outputs.choice[1]"
