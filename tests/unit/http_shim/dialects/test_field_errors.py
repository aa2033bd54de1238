"""Sentences for refused fields: what must stand there, in JSON's words, and what does."""

from typing import Any

import pytest

from services.http_shim.dialects.bodies import body_of, decoded
from services.http_shim.dialects.chat.types import ChatBody
from services.http_shim.dialects.completions.types import CompletionBody
from services.http_shim.dialects.messages.types import MessagesBody
from services.http_shim.dialects.responses.read import read_counted_response
from services.http_shim.dialects.responses.types import ResponseBody
from services.http_shim.endpoints.batches import BatchBody
from services.http_shim.vectors.embeddings import EmbeddingBody
from tokenwire.errors import ServiceError

TALK = [{"role": "user", "content": "x"}]


@pytest.mark.parametrize(
    ("kind", "body", "sentence"),
    [
        (
            ChatBody,
            {"messages": [{"role": "users"}]},
            "messages[0].role must be one of 'assistant', 'developer', 'system', 'tool', 'user'; "
            "got 'users'.",
        ),
        (
            ChatBody,
            {"messages": TALK, "temperature": "hot"},
            "temperature must be a number or null, got a string.",
        ),
        (
            ChatBody,
            {"messages": [{"role": "user", "content": [{"type": "smell"}]}]},
            "messages[0].content[0].type must be one of 'text', 'refusal', 'image_url', 'file'; "
            "got 'smell'.",
        ),
        (ChatBody, {"messages": [{}]}, "messages[0].role is required."),
        (ChatBody, {"max_tokens": -1}, "max_tokens must be at least 0, got -1."),
        (ChatBody, {"max_tokens": 1.5}, "max_tokens must be an integer or null, got 1.5."),
        (ChatBody, {"stream": "true"}, "stream must be a boolean or null, got a string."),
        (ChatBody, {"timeout": 0}, "timeout must be more than 0, got 0."),
        (ChatBody, {"stop": ["a"] * 5_000}, "stop must have at most 4096 items, got 5000."),
        (
            ChatBody,
            {"tool_choice": "some"},
            "tool_choice must be one of 'auto', 'none', 'required', or an object; got 'some'.",
        ),
        (
            ChatBody,
            {"tools": [{"type": "function", "function": {}}]},
            "tools[0].function.name is required.",
        ),
        (
            CompletionBody,
            {"prompt": {"text": "x"}},
            "prompt must be a string, an array or null, got an object.",
        ),
        (
            CompletionBody,
            {"logit_bias": {"1": "x"}},
            "logit_bias.1 must be a number, got a string.",
        ),
        (
            MessagesBody,
            {"messages": [{"role": "bot", "content": "x"}]},
            "messages[0].role must be one of 'assistant', 'system', 'user'; got 'bot'.",
        ),
        (
            ResponseBody,
            {"input": "x", "truncation": "some"},
            "truncation must be one of 'auto', 'disabled'; got 'some'.",
        ),
        (EmbeddingBody, {"input": 3}, "input must be a string, an array or null, got 3."),
        (BatchBody, {"endpoint": 3}, "endpoint must be a string or null, got 3."),
    ],
)
def test_refused_field_says_what_must_stand_there(
    kind: Any, body: dict[str, Any], sentence: str
) -> None:
    with pytest.raises(ServiceError) as caught:
        body_of(kind, body)
    assert caught.value.message == sentence


def test_item_of_a_response_has_its_whole_path() -> None:
    body = {"input": [{"type": "message", "role": "user", "content": 3}]}
    with pytest.raises(ServiceError) as caught:
        read_counted_response(body, b"[]")
    assert caught.value.message.startswith("input[0].content must be ")
    assert caught.value.field == "input[0].content"


def test_long_value_of_a_stranger_is_cut() -> None:
    with pytest.raises(ServiceError) as caught:
        body_of(ChatBody, {"messages": [{"role": "x" * 100_000}]})
    assert len(caught.value.message) < 300


@pytest.mark.parametrize(("text", "got"), [(b"[]", "an array"), (b"3", "3"), (b'"x"', "a string")])
def test_body_that_is_no_object_is_named(text: bytes, got: str) -> None:
    with pytest.raises(ServiceError) as caught:
        decoded(text)
    assert caught.value.message == f"The body must be an object, got {got}."
