"""What no template is shown: conversations too large, and JSON that templates can't write."""

from collections.abc import Sequence

import pytest

from services.tokenizer.chat.conversation import (
    TemplateFacts,
    check_messages,
    read_arguments,
    template_messages,
)
from tokenwire.completion.v1 import completion_pb2 as completion
from tokenwire.errors import ServiceError

_TEXT = completion.ContentPart(text="a")
_USER = completion.Message(role=completion.ROLE_USER, parts=[_TEXT])
_CALL = completion.ToolCall(id="c", name="f", arguments_json='{"x": "é"}')


def _assistant(**fields: object) -> completion.Message:
    return completion.Message(role=completion.ROLE_ASSISTANT, **fields)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("field", "messages"),
    [
        ("messages", []),
        ("messages", [_USER] * 4_097),
        ("messages[1].role", [_USER, completion.Message(role=9, parts=[_TEXT])]),  # type: ignore[arg-type]
        ("messages[0].parts", [completion.Message(role=completion.ROLE_USER)]),
        (
            "messages[0].parts",
            [completion.Message(role=completion.ROLE_USER, parts=[_TEXT] * 1_025)],
        ),
        (
            "messages[0].parts[0]",
            [completion.Message(role=completion.ROLE_USER, parts=[completion.ContentPart()])],
        ),
        ("messages[0].tool_calls", [_assistant(tool_calls=[_CALL] * 129)]),
        (
            "messages[0].tool_calls",
            [completion.Message(role=completion.ROLE_USER, parts=[_TEXT], tool_calls=[_CALL])],
        ),
        ("messages[0].tool_calls[0].id", [_assistant(tool_calls=[completion.ToolCall(name="f")])]),
        ("messages[0].tool_calls[0].name", [_assistant(tool_calls=[completion.ToolCall(id="c")])]),
        (
            "messages[0].reasoning",
            [completion.Message(role=completion.ROLE_USER, parts=[_TEXT], reasoning="b")],
        ),
        (
            "messages[0].tool_call_id",
            [completion.Message(role=completion.ROLE_USER, parts=[_TEXT], tool_call_id="c")],
        ),
    ],
)
def test_the_first_wrong_part_of_a_conversation_is_named(
    field: str, messages: Sequence[completion.Message]
) -> None:
    with pytest.raises(ServiceError) as caught:
        check_messages(messages, "m", continues_last=False)
    assert caught.value.field == field


@pytest.mark.parametrize(
    "text", ["{", "[]", '"a"', '{"a": NaN}', '{"a": "\\ud800"}', '{"a":' * 70 + "1" + "}" * 70,
             "[" * 100_000],
)  # fmt: skip
def test_arguments_that_are_no_plain_object_are_refused(text: str) -> None:
    with pytest.raises(ServiceError) as caught:
        read_arguments(text, "there")
    assert caught.value.field == "there"
    assert read_arguments("", "there") == {}


def test_messages_are_written_as_the_template_wants_them() -> None:
    messages = [
        completion.Message(role=completion.ROLE_DEVELOPER, parts=[_TEXT, _TEXT]),
        _assistant(tool_calls=[_CALL], reasoning="hm"),
        completion.Message(role=completion.ROLE_TOOL, parts=[_TEXT], tool_call_id="c"),
    ]
    call = {"name": "f", "arguments": {"x": "é"}}
    assert template_messages(messages, TemplateFacts()) == [
        {"role": "system", "content": "a\na"},
        {
            "role": "assistant",
            "content": None,
            "reasoning_content": "hm",
            "tool_calls": [{"id": "c", "type": "function", "function": call}],
        },
        {"role": "tool", "content": "a", "tool_call_id": "c", "name": "f"},
    ]
    facts = TemplateFacts(
        knows_developer=True, takes_parts=True, empty_content="", arguments_are_text=True,
        short_ids=True,
    )  # fmt: skip
    developer, assistant, tool = template_messages(messages, facts)
    text = {"type": "text", "text": "a"}
    assert developer == {"role": "developer", "content": [text, text]}
    assert isinstance(assistant, dict)
    assert assistant["content"] == ""
    assert assistant["tool_calls"] == [
        {
            "id": "00000000c",
            "type": "function",
            "function": {"name": "f", "arguments": '{"x": "é"}'},
        }
    ]
    assert isinstance(tool, dict)
    assert tool["tool_call_id"] == "00000000c"
