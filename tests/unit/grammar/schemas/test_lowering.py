"""A lowered schema allows exactly the values of the original."""

import json
from collections.abc import Mapping
from typing import Any

import jsonschema
import pytest
from llguidance import LLTokenizer

from services.grammar import GrammarError
from services.grammar.matching.initial_state import initial_state
from services.grammar.matching.matcher import Matcher, RefusedTokenError
from services.grammar.matching.prototype import compile_prototype
from services.grammar.matching.token_index import TokenIndex
from services.grammar.matching.vocabulary import Vocabulary
from services.grammar.schemas.lowering import lower
from services.grammar.specification import check, translate
from tokenwire.pb.types.v1.types_pb2 import GrammarSpec

BYTES = LLTokenizer("byte")
VOCABULARY = Vocabulary(BYTES, BYTES.vocab_size, tuple(BYTES.eos_tokens), "")
INDEX = TokenIndex(VOCABULARY)

MEMBERS: list[dict[str, Any]] = [
    {}, {"a": 1}, {"a": "x"}, {"b": 1}, {"b": "y"}, {"a": 1, "b": 1}, {"a": "x", "b": "y"},
    {"a": "x", "b": 1}, {"c": None}, {"d": 1}, {"t": "cat"}, {"t": "dog"},
    {"t": "cat", "c": 1}, {"t": "dog", "d": 1}, {"t": "bird", "d": 1}, {"a": {"a": 1}},
    {"a": {"b": "y"}},
]  # fmt: skip
VALUES: list[Any] = [
    *MEMBERS, None, True, False, 0, 1, 2, 3, 4, 10, 12, -1, 0.5, 1.5, "", "a", "ab", "abc", "b",
    "cat", "dog", "foo", "foobar", "xfoo", [], [1], [1, 2], [1, 1], ["a"], ["a", 1], [1, "a"],
    ["a", "b"], ["a", "a"], [None, 1, "a"], [1, 2, 3], [[1], [1]], [{"a": 1}, {"a": 1}],
    [{"a": 1}, {"a": "x"}], ["a", "b", "a"],
]  # fmt: skip
DRAFT_07 = "http://json-schema.org/draft-07/schema#"
A, B = {"required": ["a"]}, {"required": ["b"]}
CAT = {"properties": {"t": {"const": "cat"}, "c": {}}, "required": ["t", "c"]}
DOG = {"properties": {"t": {"const": "dog"}, "d": {}}, "required": ["t", "d"]}
SCHEMAS: dict[str, Any] = {
    "one of two with other keys": {"type": "object", "oneOf": [A, B]},
    "one of two that are closed": {
        "oneOf": [
            {"properties": {"a": {"type": "integer"}}, "additionalProperties": False},
            {"properties": {"a": {}, "b": {}}, "additionalProperties": False, "required": ["a"]},
        ]
    },
    "one of two with a discriminator": {"type": "object", "oneOf": [CAT, DOG]},
    "one of three of a kind": {"oneOf": [{"minimum": 2}, {"maximum": 3}, {"type": "string"}]},
    "one of, nested": {"oneOf": [{"oneOf": [A, B]}, {"type": "array"}],
                       "type": ["array", "object"]},
    "one of two by reference": {
        "oneOf": [{"$ref": "#/$defs/text"}, {"$ref": "#/$defs/number"}],
        "$defs": {"text": {"type": "string"}, "number": {"type": "number"}},
    },
    "not a type": {"not": {"type": ["array", "string"]}},
    "not some constants": {"not": {"enum": ["a", "ab", 1, None, True, {"a": 1}, [1, 2]]}},
    "not a key": {"type": "object", "not": {"required": ["a"]}},
    "not two keys": {"type": "object", "not": {"required": ["a", "b"]}},
    "neither of two": {"type": "object", "not": {"anyOf": [A, B]}},
    "not both": {"type": "object", "not": {"allOf": [A, B]}},
    "not not": {"not": {"not": {"type": "string"}}},
    "not short": {"type": "string", "not": {"maxLength": 1}},
    "not led by": {"type": "string", "not": {"pattern": "^foo"}},
    "not a bound": {"type": "integer", "not": {"minimum": 2}},
    "not one number": {"type": "integer", "not": {"minimum": 2, "maximum": 2}},
    "not an impossible number": {"not": {"minimum": 3, "maximum": 2}},
    "not an item": {"type": "array", "not": {"items": {"type": "integer"}}},
    "not a member": {"type": "object", "not": {"properties": {"a": {"type": "integer"}}}},
    "not a conditional": {"type": "object", "not": {"if": A, "then": B}},
    "dependencies": {"$schema": DRAFT_07, "dependencies": {"a": ["b"], "c": {"required": ["a"]}}},
    "dependent": {"dependentRequired": {"a": ["b"]},
                  "dependentSchemas": {"c": {"maxProperties": 1}}},
    "not dependent": {"type": "object", "not": {"dependentRequired": {"a": ["b"]}}},
    "if, then, else": {"type": "object", "if": {"properties": {"t": {"const": "cat"}}},
                       "then": {"required": ["c"]}, "else": {"required": ["d"]}},
    "many ifs": {"allOf": [
        {"if": {"properties": {"t": {"const": t}}, "required": ["t"]}, "then": {"required": [k]}}
        for t, k in (("cat", "c"), ("dog", "d"), ("bird", "b"), ("fish", "f"), ("fox", "x"))
    ]},
    "names by pattern": {"type": "object", "propertyNames": {"pattern": "^[ab]$"}},
    "names of a list": {"type": "object", "propertyNames": {"enum": ["a", "t"]}},
    "names that are not": {"type": "object", "propertyNames": {"not": {"enum": ["a", "t"]}}},
    "contains": {"type": "array", "contains": {"type": "string"}},
    "contains two": {"type": "array", "contains": {"type": "integer"}, "minContains": 2},
    "contains one at most": {"type": "array", "contains": {"type": "integer"}, "maxContains": 1},
    "does not contain": {"type": "array", "not": {"contains": {"type": "string"}}},
    "most of those that may come": {"properties": {"a": {}, "b": {}, "c": {}}, "maxProperties": 1},
    "fewest of those that may come": {"properties": {"a": {}, "b": {}}, "minProperties": 2},
    "bounds that are fractions": {"minItems": 1.0, "maxLength": 2.0, "maxProperties": 1.0},
    "integers as fractions": {"enum": [4.0, 1e1, "a"]},
    "beside a reference": {
        "type": "object", "properties": {"a": {"$ref": "#", "required": ["a"]}},
        "maxProperties": 1.0,
    },
    "unique": {"type": "array", "uniqueItems": True},
    "unique of a list": {"type": "array", "items": {"enum": ["a", "b"]}, "uniqueItems": True},
    "tuples": {"allOf": [{"items": [{"type": "integer"}, {"type": "string"}]}],
               "items": [{"type": "integer"}], "additionalItems": {"type": "boolean"}},
    "open below": {"minimum": 1, "allOf": [{"type": "integer"}], "exclusiveMinimum": True,
                   "$schema": "http://json-schema.org/draft-04/schema#"},
}  # fmt: skip


def matcher_of(schema: object) -> Matcher:
    spec = GrammarSpec(json_schema=json.dumps(schema))
    check(spec)
    prototype = compile_prototype(BYTES, translate(spec))
    return Matcher(prototype.deep_copy(), (400,), initial_state(spec, INDEX))


def accepts(matcher: Matcher, value: object) -> bool:
    try:
        matcher.accept(list(json.dumps(value, separators=(",", ":")).encode()), 256)
    except RefusedTokenError:
        return False
    return matcher.may_end


@pytest.mark.parametrize("name", SCHEMAS)
def test_exactly_the_valid_values_are_accepted(name: str) -> None:
    schema = SCHEMAS[name]
    kind = jsonschema.validators.validator_for(schema, jsonschema.Draft202012Validator)
    if name == "tuples":
        kind = jsonschema.Draft7Validator
    validator = kind(schema)
    start = matcher_of(schema)
    wrong = [value for value in VALUES if accepts(start.fork(), value) != validator.is_valid(value)]
    assert wrong == []


def test_a_native_schema_is_returned_unchanged() -> None:
    schema: dict[str, Any] = {
        "type": "object",
        "properties": {"a": {"anyOf": [{"type": "string"}, {"type": "null"}]}, "b": {"$ref": "#"}},
        "required": ["a"],
    }
    assert lower(schema) is schema


@pytest.mark.parametrize(
    ("schema", "message"),
    [
        ({"properties": {"a": {"type": "string", "not": {"format": "date"}}}},
         r'"not" over the format "date" can\'t be enforced at \$\.properties\.a'),
        ({"type": "array", "not": {"uniqueItems": True}}, '"not" over "uniqueItems"'),
        ({"items": {"propertyNames": {"format": "date"}}}, r"\$\.items\.propertyNames"),
        ({"anyOf": [{"not": {"$ref": "#"}}]}, "refers to itself without end"),
        ({"items": {"contains": {}, "minContains": -1}}, r"minContains at \$\.items must be"),
        ({"items": {"minItems": 1.5}, "not": {"minItems": 1.5}}, "whole number"),
        ({"properties": {"a": {"oneOf": {}}}}, r"\$\.properties\.a\.oneOf must be an array"),
        ({"oneOf": [{"$ref": "#/$defs/b"}]}, r'"#/\$defs/b"'),
        ({"not": {}}, "No text satisfies"),
    ],
)  # fmt: skip
def test_an_unenforceable_schema_is_refused_with_keyword_and_path(
    schema: Mapping[str, Any], message: str
) -> None:
    with pytest.raises(GrammarError, match=message):
        lower(json.loads(json.dumps(schema)))


def test_the_size_of_the_lowered_schema_is_bounded() -> None:
    parts = [{"oneOf": [{"required": [f"{i}{j}"]} for j in range(8)]} for i in range(12)]
    lowered = lower({"type": "object", "allOf": parts})
    assert len(json.dumps(lowered)) < 1_000_000
