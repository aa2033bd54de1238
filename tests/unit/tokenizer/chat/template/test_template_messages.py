"""Messages of a conversation: wrong fields are refused, and templates get the form they need."""

from collections.abc import Sequence

import pytest

from services.common.json_values import Json
from services.tokenizer.chat.template.template_messages import (
    EmptyContent,
    TemplateFacts,
    check_messages,
    template_messages,
)
from tokenwire.errors import ServiceError
from tokenwire.pb.completion.v1 import completion_pb2 as completion

_TEXT = completion.ContentPart(text="a")
_USER = completion.Message(role=completion.ROLE_USER, parts=[_TEXT])
_CALL = completion.ToolCall(id="c", name="f", arguments_json='{"x": "é"}')


def _assistant(**fields: object) -> completion.Message:
    return completion.Message(role=completion.ROLE_ASSISTANT, **fields)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("field", "messages"),
    [
        ("conversation.messages[0].parts", [completion.Message(role=completion.ROLE_USER)]),
        (
            "conversation.messages[0].tool_calls",
            [completion.Message(role=completion.ROLE_USER, parts=[_TEXT], tool_calls=[_CALL])],
        ),
        (
            "conversation.messages[0].reasoning",
            [completion.Message(role=completion.ROLE_USER, parts=[_TEXT], reasoning="b")],
        ),
        (
            "conversation.messages[0].tool_call_id",
            [completion.Message(role=completion.ROLE_USER, parts=[_TEXT], tool_call_id="c")],
        ),
    ],
)
def test_error_names_the_first_wrong_field_of_a_conversation(
    field: str, messages: Sequence[completion.Message]
) -> None:
    with pytest.raises(ServiceError) as caught:
        check_messages(messages, continues_last=False)
    assert caught.value.field == field


def test_answer_without_content_is_accepted_in_the_next_turn() -> None:
    """Clients send back an answer that was cut before its call's name, or that is all reasoning."""
    messages = [_USER, _assistant(), _assistant(reasoning="hm"), _USER]
    check_messages(messages, continues_last=False)
    _, empty, reasoned, _ = template_messages(messages, TemplateFacts())
    assert empty == {"role": "assistant", "content": ""}
    thought = {"reasoning_content": "hm", "thinking": "hm"}  # as transformers names it
    assert reasoned == {"role": "assistant", "content": "", **thought}
    with pytest.raises(ServiceError):
        check_messages([_USER, _assistant()], continues_last=True)


def test_messages_have_the_form_that_the_template_expects() -> None:
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
            "content": "",
            "reasoning_content": "hm",
            "thinking": "hm",
            "tool_calls": [{"id": "c", "type": "function", "function": call}],
        },
        {"role": "tool", "content": "a", "tool_call_id": "c", "name": "f"},
    ]
    facts = TemplateFacts(
        knows_developer=True, takes_parts=True, empty_content=EmptyContent.ABSENT,
        arguments_are_text=True, short_ids=True,
    )  # fmt: skip
    developer, assistant, tool = template_messages(messages, facts)
    text = {"type": "text", "text": "a"}
    assert developer == {"role": "developer", "content": [text, text]}
    assert isinstance(assistant, dict)
    assert "content" not in assistant
    assert assistant["tool_calls"] == [
        {
            "id": "00000000c",
            "type": "function",
            "function": {"name": "f", "arguments": '{"x": "é"}'},
        }
    ]
    assert isinstance(tool, dict)
    assert tool["tool_call_id"] == "00000000c"


@pytest.mark.parametrize(
    ("text", "as_object", "as_text"),
    [
        ('{"s":"ab', {"s": "ab"}, '{"s":"ab'),
        ('{ "s":"ab"}', {"s": "ab"}, '{ "s":"ab"}'),
        ("", {}, "{}"),
        ("Paris", {"text": "Paris"}, "Paris"),
    ],
)
def test_broken_arguments_have_the_form_that_the_template_expects(
    text: str, as_object: Json, as_text: str
) -> None:
    """One call that max_tokens cut would end its conversation."""
    call = completion.ToolCall(id="c", name="f", arguments_json=text)
    messages = [_assistant(tool_calls=[call])]
    check_messages(messages, continues_last=False)

    def written(facts: TemplateFacts) -> Json:
        [message] = template_messages(messages, facts)
        return message["tool_calls"][0]["function"]["arguments"]  # type: ignore[index,call-overload]

    assert written(TemplateFacts()) == as_object
    assert written(TemplateFacts(arguments_are_text=True)) == as_text
    is_object = text in ('{ "s":"ab"}', "")
    assert written(TemplateFacts(keeps_broken_arguments=True)) == (
        as_object if is_object else as_text
    )
