"""Responses through OpenAI's SDK for Python: answers, streams, tools, what is kept, errors."""

import json
import re
from collections.abc import Iterable
from typing import Any, Literal

import openai
import pytest
from openai import OpenAI
from openai.types.responses import (
    Response,
    ResponseFunctionToolCall,
    ResponseOutputMessage,
)
from pydantic import BaseModel, ConfigDict

from tests.stack import Stack

BASE: dict[str, Any] = {
    "model": "default",
    "input": "Hello!",
    "temperature": 0,
    "max_output_tokens": 12,
}
WEATHER: dict[str, Any] = {
    "type": "function",
    "name": "get_weather",
    "description": "The weather of a city",
    "parameters": {
        "type": "object",
        "properties": {"city": {"type": "string", "maxLength": 20}},
        "required": ["city"],
        "additionalProperties": False,
    },
    "strict": True,
}
SCHEMA = {
    "type": "object",
    "properties": {"colour": {"enum": ["red", "green"]}},
    "required": ["colour"],
    "additionalProperties": False,
}
CALLS = {"tools": [WEATHER], "tool_choice": "required", "max_output_tokens": 60}
FORMS: list[dict[str, Any]] = [
    {},
    {"instructions": "Be brief."},
    {"input": [{"role": "user", "content": [{"type": "input_text", "text": "Hello!"}]}]},
    {"input": [{"role": "developer", "content": "Be brief."}, {"role": "user", "content": "Hi"}]},
    {"text": {"format": {"type": "json_schema", "name": "colour", "schema": SCHEMA}}},
    {"text": {"format": {"type": "json_object"}}},
    CALLS,
    {"tools": [WEATHER], "tool_choice": {"type": "function", "name": "get_weather"}},
    {"include": ["message.output_text.logprobs"], "top_logprobs": 2},
    {"reasoning": {"effort": "low"}, "metadata": {"a": "b"}, "store": False},
]


@pytest.fixture
def client(stack: Stack) -> OpenAI:
    return OpenAI(base_url=f"{stack.url}/v1", api_key="none", max_retries=0)


def created(client: OpenAI, **fields: Any) -> Response:
    made: Response = client.responses.create(**BASE | fields)
    return made


def contents(items: Iterable[Any]) -> list[Any]:
    return [item.content for item in items]


def input_tokens(response: Response) -> int:
    assert response.usage is not None
    return response.usage.input_tokens


def without_ids(response: Response) -> dict[str, Any]:
    """Return what two answers to the same request have in common."""

    def clean(value: Any) -> Any:
        if isinstance(value, dict):
            left = {"id", "call_id", "created_at", "completed_at", "input_tokens_details"}
            left |= {"parsed", "parsed_arguments"}  # the SDK adds them to streams
            return {name: clean(inner) for name, inner in value.items() if name not in left}
        return [clean(inner) for inner in value] if isinstance(value, list) else value

    cleaned: dict[str, Any] = clean(response.model_dump())
    return cleaned


def test_answer_has_what_clients_read(client: OpenAI) -> None:
    fields = {"metadata": {"a": "b"}, "instructions": "Be brief.", "max_output_tokens": 3}
    response = created(client, **fields)
    [message] = response.output
    assert isinstance(message, ResponseOutputMessage)
    assert (message.role, message.status) == ("assistant", "incomplete")
    assert response.output_text
    assert response.status == "incomplete"
    assert response.incomplete_details is not None
    assert response.incomplete_details.reason == "max_output_tokens"
    assert response.metadata == {"a": "b"}
    assert response.instructions == "Be brief."
    assert response.usage is not None
    assert response.usage.output_tokens == 3
    assert response.usage.total_tokens == 3 + response.usage.input_tokens


@pytest.mark.parametrize("fields", FORMS, ids=lambda each: ", ".join(each) or "plain")
def test_stream_ends_with_the_whole_answer(client: OpenAI, fields: dict[str, Any]) -> None:
    whole = created(client, **fields)
    with client.responses.stream(**BASE | fields) as stream:
        events: list[Any] = list(stream)
    assert without_ids(events[-1].response) == without_ids(whole)
    assert [event.sequence_number for event in events] == [*range(len(events))]
    kinds = [event.type for event in events]
    assert kinds[:2] == ["response.created", "response.in_progress"]
    assert kinds[-1] == f"response.{whole.status}"
    text = "".join(each.delta for each in events if each.type == "response.output_text.delta")
    assert text == whole.output_text
    added = kinds.count("response.output_item.added")
    assert added == kinds.count("response.output_item.done") == len(whole.output)


@pytest.mark.parametrize("fields", FORMS, ids=lambda each: ", ".join(each) or "plain")
def test_count_is_the_usage_of_the_response(client: OpenAI, fields: dict[str, Any]) -> None:
    others = ("input", "instructions", "text", "tools", "tool_choice", "reasoning")
    asked: Any = {name: value for name, value in (BASE | fields).items() if name in others}
    counted = client.responses.input_tokens.count(model="default", **asked)
    assert counted.input_tokens == input_tokens(created(client, **fields))
    assert counted.object == "response.input_tokens"


def test_count_covers_what_a_response_continues(client: OpenAI) -> None:
    first = created(client)
    asked: Any = {"input": "And now?", "previous_response_id": first.id}
    counted = client.responses.input_tokens.count(model="default", **asked)
    assert counted.input_tokens == input_tokens(created(client, **asked))
    with pytest.raises(openai.NotFoundError):
        client.responses.input_tokens.count(previous_response_id="resp_none", input="x")


def test_answer_is_that_of_a_chat(client: OpenAI) -> None:
    chat = client.chat.completions.create(
        model="default",
        messages=[
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": "Hello!"},
        ],
        temperature=0,
        max_tokens=12,
    )
    assert created(client, instructions="Be brief.").output_text == chat.choices[0].message.content


def test_schema_constrains_the_answer(client: OpenAI) -> None:
    class Colour(BaseModel):
        model_config = ConfigDict(extra="forbid")
        colour: Literal["red", "green"]

    parsed = client.responses.parse(**BASE | {"max_output_tokens": 40}, text_format=Colour)
    assert parsed.output_parsed is not None
    assert parsed.output_parsed.colour in ("red", "green")
    form = {"type": "json_schema", "name": "colour", "schema": SCHEMA, "strict": True}
    answer = created(client, text={"format": form}, max_output_tokens=40)
    assert json.loads(answer.output_text)["colour"] in ("red", "green")


def test_call_and_its_result_make_a_conversation(client: OpenAI) -> None:
    asked = created(client, **CALLS)
    call = next(item for item in asked.output if isinstance(item, ResponseFunctionToolCall))
    assert call.name == "get_weather"
    assert "city" in json.loads(call.arguments)
    output = {"type": "function_call_output", "call_id": call.call_id, "output": "sunny"}
    kept = created(client, input=[output], tools=[WEATHER], previous_response_id=asked.id)
    question = {"role": "user", "content": "Hello!"}
    items = [question, *(item.model_dump() for item in asked.output), output]
    sent = created(client, input=items, tools=[WEATHER])
    assert kept.output_text == sent.output_text
    assert kept.previous_response_id == asked.id


def test_responses_are_kept_read_listed_and_dropped(client: OpenAI) -> None:
    first = created(client, instructions="Be brief.")
    assert client.responses.retrieve(first.id).model_dump() == first.model_dump()
    second = created(client, input="And now?", previous_response_id=first.id)
    asked = client.responses.input_items.list(second.id).data
    assert contents(asked) == ["And now?"]
    client.responses.delete(first.id)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(first.id)
    third = created(client, input="More", previous_response_id=second.id)  # holds what it needs
    assert third.usage is not None
    assert second.usage is not None
    assert third.usage.input_tokens > second.usage.input_tokens


def test_response_that_is_not_to_be_kept_is_not(client: OpenAI) -> None:
    response = created(client, store=False)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(response.id)


def test_stream_is_kept_too(client: OpenAI) -> None:
    with client.responses.stream(**BASE) as stream:
        final = stream.get_final_response()
    assert client.responses.retrieve(final.id).output_text == final.output_text


def test_items_of_input_come_in_pages(client: OpenAI) -> None:
    messages = [{"role": "user", "content": text} for text in ("a", "b", "c")]
    response = created(client, input=messages)
    page = client.responses.input_items.list(response.id, limit=2, order="asc")
    assert contents(page.data) == ["a", "b"]
    assert contents(page) == ["a", "b", "c"]  # fetches the next page


@pytest.mark.parametrize("wrong", [{"limit": 0}, {"order": "up"}, {"after": "msg_none"}])
def test_wrong_pages_are_refused_with_their_names(client: OpenAI, wrong: dict[str, Any]) -> None:
    response = created(client)
    with pytest.raises(openai.BadRequestError) as caught:
        client.responses.input_items.list(response.id, **wrong)
    assert caught.value.param == next(iter(wrong))


def test_tools_of_openais_servers_are_left_out_and_named(client: OpenAI) -> None:
    fields = BASE | {"tools": [{"type": "web_search"}, WEATHER]}
    raw = client.responses.with_raw_response.create(**fields)
    assert raw.headers["x-tokenwire-ignored"] == "tools[0]"
    left, without = raw.parse().usage, created(client, tools=[WEATHER]).usage
    assert left is not None
    assert without is not None
    assert left.total_tokens == without.total_tokens


@pytest.mark.parametrize("stream", [False, True])
def test_custom_tool_is_called_with_text(client: OpenAI, stream: bool) -> None:
    form = {"type": "grammar", "syntax": "regex", "definition": '(ls|pwd) "/[a-z]{1,4}"'}
    shell = {"type": "custom", "name": "shell", "description": "A shell", "format": form}
    chosen = {"type": "custom", "name": "shell"}
    fields = CALLS | {"tools": [shell, WEATHER], "tool_choice": chosen}
    events: list[Any] = []
    if stream:
        events = list(client.responses.create(**BASE | fields, stream=True))
        response = events[-1].response
    else:
        response = created(client, **fields)
    [call] = [item for item in response.output if item.type == "custom_tool_call"]
    assert call.name == "shell"
    assert re.fullmatch(form["definition"], call.input)
    assert response.tools[0].type == "custom"
    if stream:
        deltas = [e for e in events if e.type == "response.custom_tool_call_input.delta"]
        assert "".join(event.delta for event in deltas) == call.input
        [done] = [e for e in events if e.type == "response.custom_tool_call_input.done"]
        assert done.input == call.input
    output = {"type": "custom_tool_call_output", "call_id": call.call_id, "output": "none"}
    kept = created(client, input=[output], tools=[shell], previous_response_id=response.id)
    items = [{"role": "user", "content": "Hello!"}, call.model_dump(), output]
    assert created(client, input=items, tools=[shell]).output_text == kept.output_text


def test_lark_grammar_of_a_custom_tool_is_named(client: OpenAI) -> None:
    form = {"type": "grammar", "syntax": "lark", "definition": 'start: "a"'}
    tool = {"type": "custom", "name": "patch", "format": form}
    fields = BASE | {"tools": [WEATHER, tool]}
    raw = client.responses.with_raw_response.create(**fields)
    assert raw.headers["x-tokenwire-ignored"] == "tools[1].format"


def test_only_allowed_functions_are_called(client: OpenAI) -> None:
    other = WEATHER | {"name": "get_time"}
    allowed = {"type": "allowed_tools", "mode": "required", "tools": [{"name": "get_time"}]}
    fields = CALLS | {"tools": [WEATHER, other], "tool_choice": allowed}
    calls = [each for each in created(client, **fields).output if each.type == "function_call"]
    assert {call.name for call in calls} == {"get_time"}


def test_oldest_turns_of_a_long_conversation_are_left_out(client: OpenAI) -> None:
    turns: list[dict[str, Any]] = [{"role": "system", "content": "Be brief."}]
    for number in range(40):
        question = {"role": "user", "content": f"{number:02}: " + "x = 1\n" * 10}
        turns += [question, {"role": "assistant", "content": "No."}]
    turns.append({"role": "user", "content": "Hello!"})

    def asked(turn: int) -> Response:
        return created(client, input=[turns[0], *turns[1 + 2 * turn :]])

    none, one = (input_tokens(asked(turn)) for turn in (40, 39))
    most = (2048 - BASE["max_output_tokens"] - none) // (one - none)
    cut = created(client, input=turns, truncation="auto")
    assert cut.truncation == "auto"
    assert input_tokens(cut) == none + most * (one - none)
    assert cut.output_text == asked(40 - most).output_text


def test_last_question_that_is_too_long_is_refused(client: OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        created(client, input="x = 1\n" * 4000, truncation="auto")
    assert caught.value.code == "context_length_exceeded"


def test_parts_without_effect_are_named(client: OpenAI) -> None:
    raw = client.responses.with_raw_response.create(
        **BASE,
        include=["reasoning.encrypted_content"],
        reasoning={"summary": "auto"},
    )
    assert raw.headers["x-tokenwire-ignored"] == "include[0], reasoning.summary"


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"input": None}, "input"),
        ({"input": [{"role": "robot", "content": "x"}]}, "input[0].role"),
        (
            {"input": [{"role": "user", "content": [{"type": "input_audio"}]}]},
            "input[0].content[0].type",
        ),
        ({"input": [{"type": "function_call", "name": "f"}]}, "input[0].call_id"),
        ({"input": [{"type": "web_search_call"}]}, "input"),
        ({"input": [{"type": "item_reference", "id": "msg_1"}]}, "input[0]"),
        ({"conversation": "conv_1"}, "conversation"),
        ({"prompt": {"id": "p"}}, "prompt"),
        ({"temperature": 9.0}, "temperature"),
        ({"top_logprobs": 1000}, "top_logprobs"),
        ({"max_output_tokens": -1}, "max_output_tokens"),
        ({"tool_choice": "sometimes"}, "tool_choice"),
        ({"tools": [{"type": "function"}]}, "tools[0].name"),
        ({"tools": [{"type": "x"}, WEATHER | {"name": "a b"}]}, "tools[1].name"),
        ({"tools": [{"type": "custom", "name": "f", "format": 1}]}, "tools[0].format"),
        ({"tools": [{"type": "custom", "name": ["f"]}]}, "tools[0].name"),
        (
            {
                "tools": [
                    {
                        "type": "custom",
                        "name": "f",
                        "format": {"type": "grammar", "syntax": "regex", "definition": "("},
                    }
                ]
            },
            "tools[0].format.definition",
        ),
        ({"text": {"format": {"type": "json_schema"}}}, "text.format.schema"),
        ({"reasoning": {"effort": "x" * 1000}}, "reasoning.effort"),
    ],
    ids=lambda each: str(each)[:40],
)
def test_wrong_input_is_refused_with_its_name(
    client: OpenAI, fields: dict[str, Any], param: str
) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        created(client, **fields)
    assert caught.value.param == param


def test_unknown_ids_are_not_found(client: OpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as caught:
        created(client, previous_response_id="resp_none")
    assert caught.value.param == "previous_response_id"
    for call in (client.responses.retrieve, client.responses.delete, client.responses.cancel):
        with pytest.raises(openai.NotFoundError):
            call("resp_none")


def test_only_responses_in_the_background_are_cancelled(client: OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="background"):
        client.responses.cancel(created(client).id)
