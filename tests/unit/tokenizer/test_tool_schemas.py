"""Tools: requests that force a call, the schema of the call, invalid tools."""

import json
from typing import Any

import jsonschema
import pytest

from services.tokenizer.tool_schemas import check_tools, tool_call_grammar, without_unique_items
from tokenwire.errors import ServiceError
from tokenwire.pb.completion.v1 import completion_pb2 as completion

_MODES = {
    "none": completion.TOOL_MODE_NONE,
    "auto": completion.TOOL_MODE_AUTO,
    "required": completion.TOOL_MODE_REQUIRED,
}


def _tool(name: str, parameters: Any = None, *, strict: bool = False) -> completion.Tool:
    text = "" if parameters is None else json.dumps(parameters)
    return completion.Tool(name=name, parameters_json=text, strict=strict)


def _choice(choice: str) -> completion.ToolChoice:
    if choice in _MODES:
        return completion.ToolChoice(mode=_MODES[choice])
    return completion.ToolChoice(name=choice) if choice else completion.ToolChoice()


def _accepts(call: object, tools: list[completion.Tool], choice: str = "required") -> bool:
    grammar = tool_call_grammar(tools, _choice(choice))
    assert grammar is not None
    validator = jsonschema.Draft202012Validator(json.loads(grammar.json_schema))
    return bool(validator.is_valid(call))


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("choice", ["", "none", "auto", "required", "f"])
def test_call_is_forced_by_the_choice_or_by_a_strict_tool(choice: str, strict: bool) -> None:
    tools = [_tool("f", strict=strict), _tool("g")]
    forced = choice in ("required", "f") or (strict and choice != "none")
    assert (tool_call_grammar(tools, _choice(choice)) is not None) == forced


def test_schema_requires_a_tool_name_and_its_arguments() -> None:
    count = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}
    tools = [_tool("f", count), _tool("g")]
    assert _accepts({"name": "f", "arguments": {"n": 3}}, tools)
    assert _accepts({"name": "g", "arguments": {}}, tools)
    wrongs: list[object] = [
        {"name": "f", "arguments": {}},
        {"name": "f", "arguments": {"n": "3"}},
        {"name": "g", "arguments": {"n": 3}},  # no parameters
        {"name": "h", "arguments": {}},
        {"name": "g"},
        [],
    ]
    for wrong in wrongs:
        assert not _accepts(wrong, tools)
    assert not _accepts({"name": "g", "arguments": {}}, tools, "f")  # the choice names another tool


@pytest.mark.parametrize(
    ("others", "is_open"),
    [
        ({}, False),
        ({"required": ["n"]}, False),
        ({"required": ["other"]}, True),
        ({"additionalProperties": True}, True),
        ({"additionalProperties": {"type": "integer"}}, True),
        ({"patternProperties": {"^o": {}}}, True),
        ({"anyOf": [{"required": ["other"]}, {}]}, True),
        ({"minProperties": 2}, True),
    ],
)
def test_arguments_without_a_name_need_a_keyword(others: dict[str, Any], is_open: bool) -> None:
    """A model invents arguments wherever it may, and no function takes them."""
    tools = [_tool("f", {"type": "object", "properties": {"n": {}}} | others)]
    assert _accepts({"name": "f", "arguments": {"n": 1, "other": 2}}, tools) == is_open
    assert _accepts({"name": "f", "arguments": {"n": 1, "other": 2}}, [_tool("f", {})])


def test_references_hold_inside_the_schema_of_the_call() -> None:
    tree = {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "$id": "https://example.com/tree",
        "properties": {
            "color": {"$ref": "#/$defs/color"},
            "left": {"$ref": "#"},
            "const": {"$ref": "#/$defs/color"},  # a name here, not a keyword
            "text": {"const": {"$ref": "#/$defs/color"}},  # a value, not a reference
        },
        "additionalProperties": False,
        "$defs": {"color": {"enum": ["red", "blue"]}},
    }
    tools = [_tool("f", tree)]

    def accepts(arguments: object) -> bool:
        return _accepts({"name": "f", "arguments": arguments}, tools)

    assert accepts({"color": "red", "left": {"color": "blue", "const": "red"}})
    assert accepts({"text": {"$ref": "#/$defs/color"}})
    assert not accepts({"color": "green"})
    assert not accepts({"left": {"left": {"color": "green"}}})
    assert not accepts({"const": "green"})
    assert not accepts("red")  # arguments are an object, even if the schema has no type


def test_unique_items_are_left_out_where_they_are_a_keyword() -> None:
    schema = {
        "properties": {
            "uniqueItems": {"const": {"uniqueItems": True}},  # a name, and a value
            "a": {"anyOf": [{"type": "array", "uniqueItems": True}, {"type": "null"}]},
            "b": {"type": "array", "uniqueItems": False},
        }
    }
    (index, tool), left_out = without_unique_items((3, _tool("f", schema)))
    assert index == 3
    assert left_out == ["tools[3].parameters_json.properties.a.anyOf[0].uniqueItems"]
    kept = json.loads(tool.parameters_json)
    assert kept["properties"].pop("a") == {"anyOf": [{"type": "array"}, {"type": "null"}]}
    assert kept["properties"] == {name: schema["properties"][name] for name in kept["properties"]}
    strict = (0, _tool("f", schema, strict=True))
    assert without_unique_items(strict) == (strict, [])


@pytest.mark.parametrize(
    ("tools", "field"),
    [
        ([_tool("f"), _tool("f")], "tools[1].name"),
        ([_tool("f", {"type": "array"})], "tools[0].parameters_json"),
        ([_tool("f", [])], "tools[0].parameters_json"),
        *(
            ([completion.Tool(name="f", parameters_json=text)], "tools[0].parameters_json")
            for text in (
                "{",
                "[" * 100_000,
                '{"a":' * 900 + "1" + "}" * 900,
                '{"a": NaN}',
                "9" * 9_999,
            )
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_invalid_tool_is_refused_by_its_field(tools: list[completion.Tool], field: str) -> None:
    with pytest.raises(ServiceError) as caught:
        check_tools(tools, completion.ToolChoice())
    assert caught.value.field == field
