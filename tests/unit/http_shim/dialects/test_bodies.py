"""Parsing of request bodies, and the errors of invalid ones."""

import json
import re
from typing import Any

import grpc
import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.http_shim.dialects.bodies import body_of, decoded
from services.http_shim.dialects.chat.types import ChatBody
from services.http_shim.dialects.completions.read import read_completion
from services.http_shim.dialects.completions.types import CompletionBody
from services.http_shim.errors import error_body, http_status
from tokenwire.errors import ServiceError

FUNCTION = {"type": "function", "function": {"name": "f"}}
FUNCTION_CALL = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
_OPTIONAL = [name for name in CompletionBody.__struct_fields__ if name != "prompt"]


def read(body: bytes) -> CompletionBody:
    return body_of(CompletionBody, decoded(body))[0]


@pytest.mark.parametrize("name", _OPTIONAL)
def test_null_means_absent(name: str) -> None:
    """SDKs send null for fields that their caller omits."""
    absent, null = read_completion({"prompt": "x"}), read_completion({"prompt": "x", name: None})
    assert null.request == absent.request
    assert null.ignored == []


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"[]",
        b"null",
        b'"text"',
        b'{"prompt": "x"} trailing',
        b'{"prompt": NaN}',
        b'{"prompt": "x", "temperature": Infinity}',
        b'{"prompt": "\xff"}',
        b'{"unknown": "\xff"}',
        b'{"prompt": "a\x00b"}',
        b'{"prompt": "\\ud800"}',
        b'{"\\udfff": 1}',
        b'{"stop": ["\\ud83dx"]}',
        b"\xef\xbb\xbf{}",
        b'{"unknown": ' + b"[" * 100_000 + b"]" * 100_000 + b"}",
        b'{"response_format": {"type": "json_object", "schema": {"a": '
        + b'{"a":' * 100_000 + b"1" + b"}" * 100_000 + b"}}}",
    ],
)  # fmt: skip
def test_malformed_body_is_an_invalid_request(body: bytes) -> None:
    with pytest.raises(ServiceError) as caught:
        read(body)
    assert http_status(caught.value.code) == 400
    assert json.loads(error_body(caught.value))["error"]["type"] == "invalid_request_error"


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("model", 1),
        ("prompt", {"text": "x"}),
        ("prompt", [1.5]),
        ("prompt", [None]),
        ("prompt", [-1]),
        ("prompt", [2**32]),
        ("prompt", [[True]]),
        ("prompt", [["a"]]),
        ("prompt", [True]),
        ("max_tokens", True),
        ("max_tokens", -1),
        ("max_tokens", 1.5),
        ("max_tokens", "16"),
        ("max_tokens", 2**32),
        ("max_tokens", 10**30),
        ("seed", 2**63),
        ("seed", -(2**63) - 1),
        ("top_k", -2),
        ("temperature", "hot"),
        ("temperature", True),
        ("stop", 3),
        ("stop", ["a", None]),
        ("stop_token_ids", [-1]),
        ("logit_bias", [1]),
        ("echo", 1),
        ("logprobs", True),
        ("stream", "true"),
        ("stream_options", []),
        ("context_length_exceeded_behavior", "explode"),
        ("response_format", {"type": "xml"}),
        ("response_format", {}),
        ("response_format", "json"),
        ("grammar", {"type": "regex"}),
        ("grammar", {"type": "regex", "value": {}}),
        ("tools", {"type": "function"}),
        ("tool_choice", "some"),
        ("images", "data:"),
    ],
)
def test_type_error_names_the_field(field: str, value: object) -> None:
    with pytest.raises(ServiceError) as caught:
        read(json.dumps({"prompt": "x", field: value}).encode())
    assert http_status(caught.value.code) == 400
    assert caught.value.field == field


def test_type_error_of_an_image_names_its_index() -> None:
    with pytest.raises(ServiceError) as caught:
        read(b'{"prompt": "x", "images": ["data:", 5]}')
    assert caught.value.field == "images[1]"


@pytest.mark.parametrize("literal", ["4", "4.0", "4e0", "40e-1"])
def test_whole_number_is_an_integer_however_it_is_written(literal: str) -> None:
    """JSON Schema counts 4.0 as an integer, and so does the OpenAPI document."""
    body = f'{{"prompt": [[{literal}]], "max_tokens": {literal}, "temperature": 1.0}}'.encode()
    parsed = read(body)
    assert (parsed.prompt, parsed.max_tokens, parsed.temperature) == ([[4]], 4, 1.0)


@pytest.mark.parametrize("number", ["1e400", "-1e400", "1" + "0" * 5_000])
@pytest.mark.parametrize(
    ("body", "field", "path"),
    [
        ('{"prompt": "x", "temperature": %s}', "temperature", "temperature"),
        ('{"a": "1e400", "b": {"c": [1, {}, %s]}}', "b", "b.c[2]"),
        ('\n {"messages": [{"role": "user"}, {"x": %s}]}', "messages[1].x", "messages[1].x"),
        ('{"guided_json": {"maximum": %s}}', "guided_json", "guided_json.maximum"),
        ('{"x": [[[[[[[[[%s]]]]]]]]]}', "x", "x[0][0][0][0][0][0][0]"),
    ],
)
def test_number_out_of_range_is_named(number: str, body: str, field: str, path: str) -> None:
    with pytest.raises(ServiceError) as caught:
        decoded((body % number).encode())
    assert caught.value.field == field
    assert caught.value.message.startswith(f"{path}: ")
    assert "out of range" in caught.value.message


def test_long_key_of_logit_bias_is_refused() -> None:
    with pytest.raises(ServiceError) as caught:
        read(json.dumps({"prompt": "x", "logit_bias": {"1" * 5_000: 1}}).encode())
    assert caught.value.field.startswith("logit_bias.1")


@pytest.mark.parametrize("rest", [b", bad}", b"", b', "\\ud800": 1}', b', "\xff": 1}'])
def test_what_is_malformed_after_a_number_out_of_range_is_refused(rest: bytes) -> None:
    with pytest.raises(ServiceError) as caught:
        decoded(b'{"temperature": 1e999' + rest)
    assert caught.value.code is grpc.StatusCode.INVALID_ARGUMENT


@pytest.mark.parametrize(
    ("biases", "message"),
    [
        ({"7": 1, "x": 1}, "logit_bias.x: the key must be a token id."),
        ({"-1": 1}, "logit_bias.-1: the key must be a token id."),
        ({"07": 1}, "logit_bias.07: the key must be a token id."),
        ({"7": 1, "8": "2"}, "logit_bias.8 must be a number, got a string."),
    ],
)
def test_error_of_logit_bias_names_the_key(biases: dict[str, object], message: str) -> None:
    with pytest.raises(ServiceError) as caught:
        read(json.dumps({"prompt": "x", "logit_bias": biases}).encode())
    assert caught.value.message == message
    assert caught.value.field == message.partition(" ")[0].rstrip(":")


@pytest.mark.parametrize(
    ("tools", "param"),
    [
        ([{"type": "function"}], "tools[0].function"),
        ([{"type": "function", "function": {}}], "tools[0].function.name"),
        ([FUNCTION, {"type": "web_search"}], "tools[1].type"),
        ([{"type": "function", "function": {"name": 1}}], "tools[0].function.name"),
        ([{"type": "custom"}], "tools[0].custom"),
        ([FUNCTION, FUNCTION | {"custom": {"name": "f"}}], "tools[1]"),
        (
            [{"type": "custom", "custom": {"name": "f", "format": {"type": "json"}}}],
            "tools[0].custom.format.type",
        ),
    ],
)
@pytest.mark.parametrize("body_type", [CompletionBody, ChatBody])
def test_error_of_a_tool_has_its_path(
    body_type: type[CompletionBody | ChatBody], tools: list[object], param: str
) -> None:
    with pytest.raises(ServiceError) as caught:
        body_of(body_type, {"tools": tools})
    assert caught.value.field == param


def test_unknown_fields_are_reported() -> None:
    """A client must learn that it misspelled a field."""
    _, unknown = body_of(CompletionBody, {"prompt": "x", "temprature": 1, "n": 1, "x": {}})
    assert unknown == ["temprature", "x"]


TEXT = {"type": "text", "text": "x"}


def ignored(fields: dict[str, object]) -> list[str]:
    return body_of(ChatBody, fields)[1]


@pytest.mark.parametrize(
    ("fields", "path"),
    [
        ({"stream_options": {"x": 1, "include_usage": True}}, "stream_options.x"),
        ({"response_format": {"type": "json_object", "json_schema": {}}},
         "response_format.json_schema"),
        ({"response_format": {"type": "json_schema", "json_schema": {"schema": {}, "x": {}}}},
         "response_format.json_schema.x"),
        ({"grammar": {"type": "regex", "value": "a", "flags": "i"}}, "grammar.flags"),
        ({"tools": [FUNCTION, FUNCTION | {"x": 1}]}, "tools[1].x"),
        ({"tools": [{"function": {"name": "f", "x": 1}}]}, "tools[0].function.x"),
        ({"tool_choice": FUNCTION | {"x": 1}}, "tool_choice.x"),
        ({"messages": [{"role": "user", "content": "x", "x": 1}]}, "messages[0].x"),
        ({"messages": [{"role": "user", "content": [TEXT, TEXT | {"x": 1}]}]},
         "messages[0].content[1].x"),
        ({"messages": [{"role": "user", "tool_calls": [FUNCTION_CALL | {"index": 0}]}]},
         "messages[0].tool_calls[0].index"),
    ],
)  # fmt: skip
def test_nested_unknown_fields_are_reported_by_path(fields: dict[str, object], path: str) -> None:
    """A misspelled nested field changes the answer as much."""
    assert ignored(fields) == [path]


@pytest.mark.parametrize(
    "fields",
    [
        {"chat_template_kwargs": {"x": {"y": 1}}},
        {"logit_bias": {"7": 1}},
        {"response_format": {"type": "json_object", "schema": {"x": {"y": [{"z": 1}]}}}},
        {"grammar": {"type": "llguidance", "value": {"x": [{"y": 1}]}}},
        {"tools": [{"type": "function", "function": {"name": "f", "parameters": {"x": {}}}}]},
        {"messages": [{"role": "user", "function_call": {"x": 1}}], "functions": [{"x": 1}]},
    ],
)
def test_arbitrary_json_has_no_unknown_fields(fields: dict[str, object]) -> None:
    assert ignored(fields) == []


def test_message_of_an_answer_has_no_unknown_fields() -> None:
    """Clients send answers back unchanged, with their nulls."""
    answered = {"role": "assistant", "content": "x", "refusal": None}
    assert ignored({"messages": [answered], "x": None}) == []


def test_repeated_unknown_field_is_reported_once() -> None:
    """Otherwise it would crowd others out of the header."""
    messages = [{"role": "user", "x": 1}] * 100 + [{"role": "user", "y": 1}]
    assert ignored({"messages": messages, "z": 1}) == ["z", "messages[0].x", "messages[100].y"]


def test_last_of_equal_keys_applies() -> None:
    assert read(b'{"prompt": "a", "prompt": "b"}').prompt == "b"


_json = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**70), 2**70)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(st.characters(exclude_categories=["Cs"]), max_size=4),
    lambda children: (
        st.lists(children, max_size=3)
        | st.dictionaries(
            st.sampled_from(["type", "value", "schema", "json_schema", "function", "name", "1"]),
            children,
            max_size=3,
        )
    ),
    max_leaves=6,
)


def refusal(body: bytes) -> ServiceError | None:
    try:
        assert read_completion(decoded(body)).request.SerializeToString()
    except ServiceError as error:
        return error
    return None


@given(st.dictionaries(st.sampled_from(CompletionBody.__struct_fields__), _json, max_size=4))
def test_any_json_is_accepted_or_a_400_with_a_field(fields: dict[str, Any]) -> None:
    """No body may cause a 500."""
    error = refusal(json.dumps(fields).encode())
    assert error is None or http_status(error.code) == 400
    assert error is None or re.split(r"[.\[]", error.field)[0] in CompletionBody.__struct_fields__
