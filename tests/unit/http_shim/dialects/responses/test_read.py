"""Bodies of responses with anything in them: a request, or a typed refusal."""

import contextlib
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.http_shim.dialects.bodies import decoded
from services.http_shim.dialects.reading import Reading
from services.http_shim.dialects.responses.read import (
    NO_ITEMS,
    read_counted_response,
    read_response,
)
from services.http_shim.dialects.responses.write import KeptResponse
from tokenwire.errors import ServiceError

NAMES = st.sampled_from(["f", "g", "", "a b"])
JUNK = st.recursive(
    st.none() | st.booleans() | st.integers(-2, 2) | NAMES,
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(NAMES, inner, max_size=2),
    max_leaves=4,
)


async def keep(_: KeptResponse) -> None:
    """Keep nothing."""


def read(fields: dict[str, Any], context: bytes = NO_ITEMS) -> Reading:
    return read_response(fields, context, keep)


def some(fields: dict[str, st.SearchStrategy[Any]]) -> st.SearchStrategy[dict[str, Any]]:
    """Draw some of the fields, each of which may be anything."""
    return st.fixed_dictionaries({}, optional={name: each | JUNK for name, each in fields.items()})


FORMATS = some(
    {
        "type": st.sampled_from(["text", "grammar", "json_schema"]),
        "syntax": st.sampled_from(["lark", "regex"]),
        "definition": st.sampled_from(["a", "(", "start: X"]),
    }
)
TOOLS = some(
    {
        "type": st.sampled_from(["function", "custom", "web_search"]),
        "name": NAMES,
        "description": NAMES,
        "parameters": st.just({"type": "object"}),
        "format": FORMATS,
    }
)
KINDS = [
    *("message", "function_call", "function_call_output", "reasoning", "item_reference"),
    *("custom_tool_call", "custom_tool_call_output", "web_search_call"),
]
PARTS = some(
    {
        "type": st.sampled_from(["input_text", "output_text", "refusal", "input_image"]),
        "text": NAMES,
        "refusal": NAMES,
        "image_url": st.just("data:image/png;base64,AAAA"),
    }
)
ITEMS = some(
    {
        "type": st.sampled_from(KINDS),
        "role": st.sampled_from(["user", "system", "assistant", "robot"]),
        "content": NAMES | st.lists(PARTS, max_size=2),
        "output": NAMES | st.lists(PARTS, max_size=2),
        "summary": st.lists(PARTS, max_size=1),
        "call_id": NAMES,
        "name": NAMES,
        "arguments": NAMES,
        "input": NAMES,
    }
)
CHOICES = st.sampled_from(["auto", "required"]) | some(
    {
        "type": st.sampled_from(["function", "custom", "allowed_tools"]),
        "name": NAMES,
        "mode": st.sampled_from(["auto", "required"]),
        "tools": st.lists(TOOLS, max_size=2),
    }
)
BODIES = some(
    {
        "input": NAMES | st.lists(ITEMS, max_size=3),
        "instructions": NAMES,
        "tools": st.lists(TOOLS, max_size=3),
        "tool_choice": CHOICES,
        "text": some({"format": FORMATS}),
        "reasoning": some({"effort": NAMES, "summary": NAMES}),
        "include": st.lists(NAMES, max_size=2),
        "truncation": st.sampled_from(["auto", "disabled"]),
        "background": st.booleans(),
        "store": st.booleans(),
        "stream": st.booleans(),
    }
)


@given(BODIES, st.lists(ITEMS, max_size=2))
def test_any_body_becomes_a_request_or_is_refused(
    body: dict[str, Any], context: list[dict[str, Any]]
) -> None:
    with contextlib.suppress(ServiceError):
        fields = decoded(msgspec.json.encode(body))
        reading = read(fields, msgspec.json.encode(context))
        assert reading.request.SerializeToString()
        counted = read_counted_response(fields, msgspec.json.encode(context)).request
        assert counted.conversation == reading.request.conversation
        assert list(counted.tools) == list(reading.request.tools)
        assert len(reading.images) == sum(
            part.WhichOneof("part") == "image"
            for message in reading.request.conversation.messages
            for part in message.parts
        )
        tools = fields.get("tools") or ()
        customs = {tool["name"] for tool in tools if tool.get("type") == "custom"}
        assert {tool.name for tool in reading.request.tools} >= customs or (
            isinstance(fields.get("tool_choice"), dict)  # it may leave out some
        )


@pytest.mark.parametrize(
    "form", ["text", {"type": "grammar"}, {"type": "grammar", "syntax": "ebnf", "definition": "a"}]
)
def test_other_formats_of_a_custom_tool_are_refused(form: Any) -> None:
    tools = [{"type": "function", "name": "f"}, {"type": "custom", "name": "g", "format": form}]
    body = {"input": "a", "tools": tools}
    with pytest.raises(ServiceError) as caught:
        read(body)
    assert caught.value.field == "tools[1].format"


def test_type_of_an_item_is_a_text() -> None:
    with pytest.raises(ServiceError) as caught:
        read({"input": [{"role": "user", "content": "a"}, {"type": ["message"]}]})
    assert caught.value.field == "input[1].type"
