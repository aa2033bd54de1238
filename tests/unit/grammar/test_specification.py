"""The translation of a grammar has the meaning of the original."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from llguidance import LLMatcher, LLTokenizer

from services.grammar import GrammarError
from services.grammar.matching.prototype import compile_prototype
from services.grammar.specification import check, check_white_space, identity, locate, translate
from tokenwire.pb.types.v1.types_pb2 import ChoiceList, GrammarSpec, JsonObject, StructuralTag

BYTES = LLTokenizer("byte")


def accepts(spec: GrammarSpec, *texts: str) -> list[bool]:
    check(spec)
    prototype = compile_prototype(BYTES, translate(spec))
    return [matches(prototype.deep_copy(), list(text.encode())) for text in texts]


def matches(matcher: LLMatcher, content: list[int]) -> bool:
    return matcher.try_consume_tokens(content) == len(content) and matcher.is_accepting()


@settings(max_examples=50)
@given(st.lists(st.text(st.characters(exclude_categories=["Cs"]), min_size=1), min_size=1))
def test_exactly_the_choices_are_accepted(choices: list[str]) -> None:
    spec = GrammarSpec(choice=ChoiceList(choices=choices))
    longest = max(choices, key=lambda choice: len(choice.encode()))
    assert accepts(spec, *choices) == [True] * len(choices)
    assert accepts(spec, longest + "x", "") == [False, False]


@pytest.mark.parametrize(
    "schema", ["{}", " { } ", "true", '{"type":"array"}', '\n{ "type":"array"}']
)
def test_json_has_the_white_space_that_models_write(schema: str) -> None:
    """A model that may write compact JSON only leaves the texts that it knows, and errs."""
    spec = GrammarSpec(json_schema=schema)
    value = [1, {"a": "b c", "d": [], "e": {}}, [True, None]]
    for indent in (None, 1, 2, 4, 8, "\t"):
        assert accepts(spec, json.dumps(value, indent=indent)) == [True]
    assert accepts(spec, '[1,{"a":"b c"}]', '[ 1 , { "a" : [ ] } ]', "[\n]") == [True] * 3


def test_white_space_in_json_is_bounded() -> None:
    """Without a bound, a model may write white space until its tokens end."""
    spec = GrammarSpec(json_schema='{"type":"array"}')
    texts = [
        "[1,  2]",
        "[1,\n\n2]",
        "[1, \n2]",
        f"[\n{' ' * 33}1]",
        "[1,\r2]",
        " [1]",
        "[1] ",
        "[1]\n",
    ]
    assert accepts(spec, *texts) == [False] * len(texts)
    assert accepts(spec, f"[\n{' ' * 32}1]", "[\n\t\t1]") == [True, True]


@pytest.mark.parametrize(
    ("white_space", "allowed", "forbidden"),
    [
        ("", ['{"a":[1,2]}'], ['{"a": [1,2]}', '{"a":[1,\n2]}']),
        (" ?", ['{"a":[1,2]}', '{ "a" : [ 1 , 2 ] }'], ['{"a":  1}', '{"a":\n1}']),
        (r"[\n ]*", ['{"a":  [1,\n \n 2]}', f"{{{' ' * 64}}}"], ['{"a":\t1}', f"{{{' ' * 65}}}"]),
        (r"\s+|\n{2}", ['{"a":\t\r\n 1}'], ['{"a":\u00a01}', '{"a":\x0b1}']),
    ],
)
def test_a_request_may_choose_the_white_space(
    white_space: str, allowed: list[str], forbidden: list[str]
) -> None:
    for kind in (
        {"json_schema": "{}"},
        {"json_object": JsonObject()},
        {"llguidance": '{"grammars": [{"json_schema": {}}]}'},
        {"llguidance": '{"grammars": [{"lark_grammar": "start: %json {}"}]}'},
        {"lark": "start: %json {}"},
    ):
        spec = GrammarSpec(**kind, json_whitespace=white_space)
        assert accepts(spec, *allowed) == [True] * len(allowed)
        assert accepts(spec, *forbidden) == [False] * len(forbidden)


@pytest.mark.parametrize(
    "lark",
    [
        'start: "%json {" %json {"type": "array"}',
        'start: HEAD %json{\n"type": "array"} // %json {\nHEAD: /%json \\{/ # "',
        'start: "%json {" part\npart: %json {"type": "array"}',
    ],
)
def test_white_space_of_json_in_lark_is_bounded(lark: str) -> None:
    """A model writes line breaks without end there, too. Texts and comments stay as they are."""
    for spec in (
        GrammarSpec(lark=lark),
        GrammarSpec(llguidance=json.dumps({"grammars": [{"lark_grammar": lark}]})),
    ):
        assert accepts(spec, "%json {[1, 2]", "%json {[\n\t1]") == [True, True]
        assert accepts(spec, "%json {[1,  2]", "%json {[\n\n1]") == [False, False]


def test_options_of_a_schema_in_lark_win() -> None:
    spec = GrammarSpec(lark='start: %json {"x-guidance": {"whitespace_flexible": false}}')
    assert accepts(spec, "[1,2]", "[1, 2]") == [True, False]


def test_a_key_has_one_spelling() -> None:
    """Otherwise escapes could hide a key that the schema forbids or types."""
    spec = GrammarSpec(json_schema=json.dumps({
        "properties": {"x": {"type": "integer"}, "no": False},
        "patternProperties": {"^b": {"type": "null"}},
    }))  # fmt: skip
    allowed = ['{"x":1,"y":"s"}', '{"b1":null}', r'{"a\"\\\n":"\t"}']
    forbidden = [r'{"x":1,"\u0078":"s"}', r'{"\u006eo":1}', r'{"\u0062":1}', r'{"x\/":1}']
    assert accepts(spec, *allowed) == [True] * len(allowed)
    assert accepts(spec, *forbidden) == [False] * len(forbidden)


def test_min_properties_holds_although_the_compiler_counts_repeated_keys() -> None:
    schema = {"required": ["a"], "minProperties": 2, "additionalProperties": {"type": "integer"}}
    spec = GrammarSpec(json_schema=json.dumps({"type": "object"} | schema))
    assert accepts(spec, '{"a":1,"b":2}', '{"a":1}', '{"a":1,"a":2}') == [True, False, False]


def test_json_object_accepts_only_objects() -> None:
    spec = GrammarSpec(json_object=JsonObject())
    assert accepts(spec, '{"a":[1,null]}', "[]") == [True, False]


def test_a_regex_matches_the_whole_output() -> None:
    spec = GrammarSpec(regex='a/b"|é+')
    assert accepts(spec, 'a/b"', "éé", "é a") == [True, True, False]


def test_grammars_of_different_kinds_never_share_an_id() -> None:
    specs = [
        GrammarSpec(regex="a"),
        GrammarSpec(lark="a"),
        GrammarSpec(json_schema="a"),
        GrammarSpec(llguidance="a"),
        GrammarSpec(choice=ChoiceList(choices=["a"])),
        GrammarSpec(choice=ChoiceList(choices=["a", "b"])),
        GrammarSpec(choice=ChoiceList(choices=['a", "b'])),
        GrammarSpec(json_object=JsonObject()),
        GrammarSpec(json_object=JsonObject(), json_whitespace=""),
        GrammarSpec(json_schema="a", json_whitespace=""),
        GrammarSpec(json_schema="a", json_whitespace=" "),
        GrammarSpec(regex=""),
        GrammarSpec(gbnf="a"),
        GrammarSpec(structural_tag=StructuralTag(triggers=["a"])),
        GrammarSpec(structural_tag=StructuralTag(triggers=["b"])),
    ]
    assert len({identity(spec) for spec in specs}) == len(specs)
    assert identity(GrammarSpec(regex="a")) == identity(GrammarSpec(regex="a"))


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        (GrammarSpec(), "one of the kinds"),
        (GrammarSpec(llguidance='start: "a"'), "not JSON"),
        (GrammarSpec(llguidance="{}"), '"grammars"'),
        (
            GrammarSpec(llguidance=json.dumps({"grammars": [{"json_schema": {"extends": {}}}]})),
            r"\$\.grammars\[0\]\.json_schema",
        ),
        (
            GrammarSpec(llguidance=json.dumps({"grammars": [{"json_value": {"extends": {}}}]})),
            r"\$\.grammars\[0\]\.json_value",
        ),
        (
            GrammarSpec(
                llguidance=json.dumps({"grammars": [{"json_schema": {"uniqueItems": True}}]})
            ),
            '"uniqueItems"',
        ),
    ],
)
def test_invalid_grammars_are_refused(spec: GrammarSpec, message: str) -> None:
    with pytest.raises(GrammarError, match=message):
        check(spec)


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        (GrammarSpec(regex="a", json_whitespace=""), "kind regex has no white space"),
        (GrammarSpec(json_schema="{}", json_whitespace="[ x]"), "more than white space"),
        (GrammarSpec(json_schema="{}", json_whitespace="( "), r"not closed \(character 1\)"),
        (GrammarSpec(json_schema="{}", json_whitespace="^ $"), "anchors"),
        (GrammarSpec(json_schema="{}", json_whitespace="\v"), "no other white space"),
        (GrammarSpec(json_schema="{}", json_whitespace=" " * 1001), "more than 1000 characters"),
    ],
)
def test_other_white_space_is_refused(spec: GrammarSpec, message: str) -> None:
    with pytest.raises(GrammarError, match=message):
        check_white_space(spec)


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        (GrammarSpec(regex="(a"), "unclosed group"),
        (GrammarSpec(lark="start: foo"), "foo"),
        (GrammarSpec(json_schema='{"$ref":"#"}'), "No text satisfies"),
        (
            GrammarSpec(lark='start: %json {"x-guidance":{"lenient":true},"not":{}}'),
            "would not be enforced in full",
        ),
    ],
)
def test_reasons_of_llguidance_are_passed_on(spec: GrammarSpec, message: str) -> None:
    with pytest.raises(GrammarError, match=message):
        compile_prototype(BYTES, translate(spec))


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        (
            GrammarSpec(regex="a(b"),
            "regex parse error:\n    a(b\n     ^\nerror: unclosed group",
        ),
        (GrammarSpec(lark='start: "a" foo'), 'at 1(8): unknown name: "foo"'),
        (GrammarSpec(lark="start: %json {} foo"), 'at 1(8): unknown name: "foo"'),
        (
            GrammarSpec(llguidance='{\n"grammars": [\n{"lark_grammar": 7}]}'),
            "invalid type: integer `7`, expected a string",
        ),
    ],
)
def test_places_refer_to_the_grammar_as_sent(spec: GrammarSpec, message: str) -> None:
    """The client never sees the translation."""
    with pytest.raises(GrammarError) as caught:
        compile_prototype(BYTES, translate(spec))
    reason = locate(spec, str(caught.value))
    assert "x-guidance" not in reason
    first, _, _ = reason.partition("\n   1 |")  # llguidance quotes Lark
    assert first == message
