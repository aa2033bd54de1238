"""Chat through OpenAI's SDKs for Python and Node.js: every field, streams, parsing helpers."""

import inspect
import json
import re
from collections.abc import Mapping
from typing import Any, Literal

import openai
import pytest
from openai import AsyncOpenAI, OpenAI
from openai.resources.chat import Completions
from openai.types.chat import ChatCompletionUserMessageParam as UserMessage
from pydantic import BaseModel, Field

from services.http_shim.dialects.chat.types import ChatBody
from tests.conformance.sdk import (
    ENDLESS,
    NEWLINE,
    OWN_PARAMETERS,
    SCHEMA,
    SHARED_BAD,
    SHARED_CALLS,
    Answer,
    Call,
    Fields,
    Node,
    create,
    first,
    has_output,
)
from tests.stack import Stack, left_early

HELLO: UserMessage = {"role": "user", "content": "Hello!"}
QUESTION: UserMessage = {"role": "user", "content": "What is the weather in Rome?"}
BASE: Fields = {"model": "default", "messages": [HELLO], "max_tokens": 6, "seed": 7}
CITY = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 12}},
    "required": ["city"],
    "additionalProperties": False,
}
WEATHER = {
    "type": "function",
    "function": {"name": "get_weather", "strict": True, "parameters": CITY},
}
NAMED = {"type": "function", "function": {"name": "get_weather"}}
COMMAND = '(ls|pwd) "/[a-z]{1,4}"'
"""A regular expression"""
SHELL = {
    "type": "custom",
    "custom": {
        "name": "shell",
        "description": "A shell",
        "format": {
            "type": "grammar",
            "grammar": {"syntax": "regex", "definition": COMMAND},
        },
    },
}
LONG = {"max_tokens": 80}
HISTORY = [
    {"role": "developer", "content": "Be brief."},
    {"role": "system", "content": [{"type": "text", "text": "Be kind."}]},
    {"role": "user", "content": [{"type": "text", "text": "Rome?"}], "name": "ada"},
    {
        "role": "assistant",
        "content": None,
        "tool_calls": [
            {
                "id": "call_1",
                "type": "function",
                "function": {"name": "get_weather", "arguments": '{"city": "Rome"}'},
            }
        ],
    },
    {"role": "tool", "tool_call_id": "call_1", "content": "Sunny"},
]


def content(answer: Answer) -> str:
    text = first(answer)["message"]["content"]
    assert isinstance(text, str)
    return text


def calls_weather(answer: Answer) -> bool:
    calls = first(answer)["message"]["tool_calls"]
    functions = [call["function"] for call in calls]
    return bool(functions) and all(
        function["name"] == "get_weather" and set(json.loads(function["arguments"])) == {"city"}
        for function in functions
    )


CALLS: Mapping[str, Call] = {
    **SHARED_CALLS,
    "messages": ({"messages": HISTORY}, lambda answer: answer["usage"]["prompt_tokens"] > 20),
    "stop": (
        {"stop": ["zz", "\n"], "logit_bias": {NEWLINE: 100}},
        lambda answer: (
            (first(answer)["message"]["content"], first(answer)["stop_reason"]) == (None, "\n")
        ),
    ),
    "include_stop_str_in_output": (
        {"stop": "\n", "logit_bias": {NEWLINE: 100}, "include_stop_str_in_output": True},
        lambda answer: content(answer) == "\n",
    ),
    "logprobs": (
        {"logprobs": True},
        lambda answer: (
            b"".join(bytes(entry["bytes"]) for entry in first(answer)["logprobs"]["content"])
            == content(answer).encode()
        ),
    ),
    "prediction": (
        {"prediction": {"type": "content", "content": [{"type": "text", "text": "def f():"}]}},
        lambda answer: (
            answer["usage"]["completion_tokens_details"]["rejected_prediction_tokens"] >= 0
        ),
    ),
    "top_logprobs": (
        {"logprobs": True, "top_logprobs": 4},
        lambda answer: len(first(answer)["logprobs"]["content"][0]["top_logprobs"]) == 4,
    ),
    "response_format": (
        {
            "response_format": {
                "type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA}
            }
        } | LONG,
        lambda answer: json.loads(content(answer))["a"] in (1, 2),
    ),
    "grammar": (
        {"grammar": {"type": "regex", "value": "yes|no"}},
        lambda answer: content(answer) in ("yes", "no"),
    ),
    "tools": ({"tools": [WEATHER], "tool_choice": "required"} | LONG, calls_weather),
    "tool_choice": ({"tools": [WEATHER], "tool_choice": NAMED} | LONG, calls_weather),
    "parallel_tool_calls": (
        {"tools": [WEATHER], "tool_choice": "required", "parallel_tool_calls": False} | LONG,
        lambda answer: len(first(answer)["message"]["tool_calls"]) == 1,
    ),
    "chat_template": ({"chat_template": "default"}, has_output),
    "chat_template_kwargs": ({"chat_template_kwargs": {"enable_thinking": False}}, has_output),
    "add_generation_prompt": (
        {"add_generation_prompt": False, "return_token_ids": True, "ignore_eos": True},
        lambda answer: len(first(answer)["prompt_token_ids"]) == answer["usage"]["prompt_tokens"],
    ),
    "continue_final_message": (
        {
            "messages": [HELLO, {"role": "assistant", "content": "Hello! How"}],
            "continue_final_message": True,
        },
        has_output,
    ),
    "prompt_logprobs": (
        {"prompt_logprobs": 0},
        lambda answer: (
            len(answer["prompt_logprobs"]) == answer["usage"]["prompt_tokens"]
            and [len(row) for row in answer["prompt_logprobs"][1:]]
            == [1] * (answer["usage"]["prompt_tokens"] - 1)
        ),
    ),
    "reasoning_effort": ({"reasoning_effort": "low"}, has_output),
    "truncation": (
        {
            "messages": [
                {"role": "user", "content": "x = 1\n" * 2000},
                {"role": "assistant", "content": "No."},
                HELLO,
            ],
            "truncation": "auto",
        },
        lambda answer: answer["usage"]["prompt_tokens"] < 100,
    ),
    "echo": (
        {
            "messages": [HELLO, {"role": "assistant", "content": "Hello! How"}],
            "continue_final_message": True,
            "echo": True,
        },
        lambda answer: content(answer).startswith("Hello! How"),
    ),
    "return_tokens_as_token_ids": (
        {"return_tokens_as_token_ids": True, "logprobs": True},
        lambda answer: (
            first(answer)["logprobs"]["content"][0]["token"].startswith("token_id:")
        ),
    ),
}  # fmt: skip
BAD: Mapping[str, tuple[Fields, str]] = {
    **{name: (fields, name) for name, fields in SHARED_BAD.items()},
    "logprobs": ({"logprobs": 2}, "logprobs"),
    "top_logprobs": ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
    "role": ({"messages": [{"role": "robot", "content": "a"}]}, "messages[0].role"),
    "tool": ({"tools": [{"type": "function", "function": {}}]}, "tools[0].function.name"),
    "tool_choice": ({"tool_choice": NAMED}, "tool_choice"),
    "custom tool": ({"tools": [{"type": "custom"}]}, "tools[0].custom"),
    "custom tool's name": (
        {"tools": [WEATHER, {"type": "custom", "custom": {"name": "a b"}}]},
        "tools[1].custom.name",
    ),
    "custom tool's grammar": (
        {
            "tools": [
                {
                    "type": "custom",
                    "custom": {
                        "name": "f",
                        "format": {
                            "type": "grammar",
                            "grammar": {"syntax": "regex", "definition": "("},
                        },
                    },
                }
            ]
        },
        "tools[0].custom.format.grammar.definition",
    ),
    "chat_template": ({"chat_template": "x"}, "chat_template"),
    "functions": ({"functions": [{"name": "f"}]}, "functions"),
    "function_call": ({"function_call": "auto"}, "function_call"),
    "reasoning_effort": ({"reasoning_effort": "much"}, "reasoning_effort"),
    "truncation": ({"truncation": "auto", "truncate_prompt_tokens": 5}, "truncation"),
    "echo": ({"echo": "x"}, "echo"),
    "logit_bias": (SHARED_BAD["logit_bias"], "logit_bias.300"),
    "audio": ({"audio": {"voice": "alloy", "format": "wav"}}, "audio"),
    "modalities": ({"modalities": ["text", "audio"]}, "modalities"),
    "web_search_options": ({"web_search_options": {}}, "web_search_options"),
    "prediction": ({"prediction": {"type": "content", "content": "a"}, "n": 2}, "prediction"),
    "prediction's type": ({"prediction": {"type": "text", "text": "a"}}, "prediction"),
    "prediction's content": ({"prediction": {"type": "content"}}, "prediction"),
    "long prediction": (
        {"prediction": {"type": "content", "content": "a b " * 50_000}},
        "prediction",
    ),
}
# The server ignores these fields of OpenAI's, and names them in a response header.
IGNORED = {
    "metadata", "moderation", "prompt_cache_key", "prompt_cache_options",
    "prompt_cache_retention", "safety_identifier", "service_tier", "store", "verbosity",
}  # fmt: skip


def joined(chunks: list[Answer]) -> Answer:
    """Return the whole answer of a stream with one choice."""
    choices = [choice for chunk in chunks for choice in chunk["choices"]]
    text = "".join(choice["delta"].get("content") or "" for choice in choices)
    assert choices[0]["delta"]["role"] == "assistant"
    usage = next(chunk["usage"] for chunk in reversed(chunks) if chunk.get("usage"))
    choice = {"message": {"content": text}, "finish_reason": choices[-1]["finish_reason"]}
    return chunks[0] | {"choices": [choice], "usage": usage}


def test_every_chat_field_is_tested() -> None:
    refused = {fields for fields in BAD if fields in ChatBody.__struct_fields__}
    assert {*CALLS, *refused} == set(ChatBody.__struct_fields__)
    of_openai = set(inspect.signature(Completions.create).parameters) - OWN_PARAMETERS
    assert of_openai - IGNORED <= {*CALLS, *BAD}


@pytest.mark.parametrize("name", CALLS)
def test_python_sdk_gets_an_answer_that_follows_the_field(client: OpenAI, name: str) -> None:
    fields, is_right = CALLS[name]
    answer = create(client.chat.completions.create, BASE | fields, joined)
    assert is_right(answer), answer


@pytest.mark.parametrize("name", BAD)
def test_python_sdk_raises_bad_request_that_names_the_field(client: OpenAI, name: str) -> None:
    fields, param = BAD[name]
    with pytest.raises(openai.BadRequestError) as refused:
        create(client.chat.completions.create, BASE | fields, joined)
    assert refused.value.param == param


def test_ignored_fields_are_named_in_a_header(client: OpenAI) -> None:
    raw = client.chat.completions.with_raw_response.create(
        **BASE, metadata={"a": "b"}, store=True, service_tier="auto", verbosity="low"
    )
    assert set(raw.headers["x-tokenwire-ignored"].split(", ")) == {
        "metadata", "service_tier", "store", "verbosity",
    }  # fmt: skip
    assert raw.parse().choices


@pytest.fixture(scope="module")
def answers(node: Node) -> dict[str, Answer]:
    """Answers to all calls through Node.js, by name."""
    calls = {name: BASE | fields for name, (fields, _) in CALLS.items()}
    return node("chat", calls | {f"bad {name}": BASE | BAD[name][0] for name in BAD})


@pytest.mark.parametrize("name", CALLS)
def test_node_sdk_gets_an_answer_that_follows_the_field(
    answers: dict[str, Answer], name: str
) -> None:
    answer = answers[name]
    assert "error" not in answer, answer
    assert CALLS[name][1](joined(answer["chunks"]) if "chunks" in answer else answer), answer


@pytest.mark.parametrize("name", BAD)
def test_node_sdk_raises_bad_request_that_names_the_field(
    answers: dict[str, Answer], name: str
) -> None:
    error = answers[f"bad {name}"]["error"]
    assert error == {"class": "BadRequestError", "status": 400, "param": BAD[name][1]}


# Helpers of the Python SDK: parsing, streaming, conversations.


class Item(BaseModel):
    """A line of an order."""

    name: str = Field(max_length=8)
    size: Literal["small", "large"]


class Order(BaseModel):
    """An order with nested lines."""

    items: list[Item] = Field(max_length=2)
    is_paid: bool


class GetWeather(BaseModel):
    """The weather of a city."""

    city: Literal["Rome", "Oslo"]
    days: int = Field(ge=1, le=9)


def test_parse_returns_the_answer_as_a_pydantic_model(client: OpenAI) -> None:
    answer = client.chat.completions.parse(
        model="default", messages=[HELLO], response_format=Order, seed=1, max_tokens=200
    )
    (choice,) = answer.choices
    assert choice.finish_reason == "stop"
    assert isinstance(choice.message.parsed, Order)
    assert choice.message.refusal is None


def test_parse_returns_tool_arguments_as_a_pydantic_model(client: OpenAI) -> None:
    answer = client.chat.completions.parse(
        model="default",
        messages=[QUESTION],
        tools=[openai.pydantic_function_tool(GetWeather, name="get_weather")],
        tool_choice="required",
        max_tokens=100,
        seed=1,
    )
    (choice,) = answer.choices
    assert choice.finish_reason == "tool_calls"
    parsed = [call.function.parsed_arguments for call in choice.message.tool_calls or ()]
    assert {type(arguments) for arguments in parsed} == {GetWeather}


async def test_streaming_helper_gets_the_content_and_logprobs_of_a_whole_answer(
    stack: Stack,
) -> None:
    async with (
        AsyncOpenAI(base_url=f"{stack.url}/v1", api_key="none", max_retries=0) as client,
        client.chat.completions.stream(
            model="default",
            messages=[HELLO],
            logprobs=True,
            top_logprobs=2,
            temperature=0,
            max_tokens=24,
            stream_options={"include_usage": True},
        ) as stream,
    ):
        events = [event async for event in stream]
        final = await stream.get_final_completion()
        whole = await client.chat.completions.create(
            model="default", messages=[HELLO], temperature=0, max_tokens=24
        )
    text = "".join(event.delta for event in events if event.type == "content.delta")
    assert [e.content for e in events if e.type == "content.done"] == [text]
    (choice,) = final.choices
    assert choice.message.content == text == whole.choices[0].message.content
    assert choice.finish_reason == whole.choices[0].finish_reason
    assert choice.logprobs is not None
    entries = choice.logprobs.content or []
    assert b"".join(bytes(entry.bytes or ()) for entry in entries) == text.encode()
    assert final.usage is not None
    assert whole.usage is not None
    assert final.usage.completion_tokens == whole.usage.completion_tokens


async def test_streaming_helper_parses_tool_arguments(stack: Stack) -> None:
    async with (
        AsyncOpenAI(base_url=f"{stack.url}/v1", api_key="none", max_retries=0) as client,
        client.chat.completions.stream(
            model="default",
            messages=[QUESTION],
            tools=[openai.pydantic_function_tool(GetWeather, name="get_weather")],
            tool_choice="required",
            parallel_tool_calls=False,
            seed=3,
            max_tokens=100,
        ) as stream,
    ):
        events = [event async for event in stream]
        final = await stream.get_final_completion()
    (done,) = [e for e in events if e.type == "tool_calls.function.arguments.done"]
    parts = [e for e in events if e.type == "tool_calls.function.arguments.delta"]
    assert "".join(part.arguments_delta for part in parts) == done.arguments
    assert isinstance(done.parsed_arguments, GetWeather)
    (choice,) = final.choices
    assert choice.finish_reason == "tool_calls"
    assert choice.message.content is None
    [call] = choice.message.tool_calls or []
    assert call.id.startswith("call_")
    assert call.function.parsed_arguments == done.parsed_arguments


def test_conversation_continues_with_the_messages_of_the_sdk(client: OpenAI) -> None:
    """Agents send the answer's message back unchanged."""
    messages: list[Any] = [QUESTION]
    asked: Fields = {"model": "default", "tools": [WEATHER], "max_tokens": 80, "seed": 1}
    answer = client.chat.completions.create(**asked, messages=messages, tool_choice="required")
    message = answer.choices[0].message
    messages.append(message)
    messages += [
        {"role": "tool", "tool_call_id": call.id, "content": "21 degrees"}
        for call in message.tool_calls or ()
    ]
    assert client.chat.completions.create(**asked, messages=messages).choices[0].finish_reason
    messages[1] = message.model_dump()  # includes the null fields
    assert client.chat.completions.create(**asked, messages=messages).choices[0].finish_reason


def called(client: OpenAI, *, stream: bool, **fields: Any) -> list[Any]:
    """Return the tool calls of an answer."""
    if not stream:
        message = client.chat.completions.create(**BASE | LONG | fields).choices[0].message
        return [call.to_dict() for call in message.tool_calls or ()]
    calls: dict[int, Any] = {}
    for chunk in client.chat.completions.create(**BASE | LONG | fields, stream=True):
        delta: Any = chunk.choices[0].delta.to_dict()
        for part in delta.get("tool_calls", ()):
            call = calls.setdefault(part.pop("index"), part)
            if call is not part:
                call["custom"]["input"] += part["custom"]["input"]
    return [*calls.values()]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("is_named", [False, True])
def test_custom_tool_is_called_with_text(client: OpenAI, stream: bool, is_named: bool) -> None:
    named = {"type": "custom", "custom": {"name": "shell"}}
    allowed = {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": [named]}}
    choice = named if is_named else allowed
    calls = called(client, stream=stream, tools=[WEATHER, SHELL], tool_choice=choice)
    assert calls
    for call in calls:
        assert call.keys() == {"id", "type", "custom"}
        assert (call["type"], call["custom"]["name"]) == ("custom", "shell")
        assert re.fullmatch(COMMAND, call["custom"]["input"])


def test_conversation_continues_after_a_custom_tool(client: OpenAI) -> None:
    """The model sees its call and the result."""
    messages: list[Any] = [QUESTION]
    asked: Fields = {"model": "default", "tools": [SHELL], "max_tokens": 80, "seed": 1}
    answer = client.chat.completions.create(**asked, messages=messages, tool_choice="required")
    assert answer.choices[0].finish_reason == "tool_calls"
    message = answer.choices[0].message
    messages.append(message)
    messages += [
        {"role": "tool", "tool_call_id": call.id, "content": "none"}
        for call in message.tool_calls or ()
    ]
    first = client.chat.completions.create(**asked, messages=messages)
    messages[1] = message.model_dump()  # includes the null fields
    second = client.chat.completions.create(**asked, messages=messages)
    assert first.choices[0].message.content == second.choices[0].message.content
    assert first.usage is not None
    assert answer.usage is not None
    assert first.usage.prompt_tokens > answer.usage.prompt_tokens


def test_lark_grammar_of_a_custom_tool_is_named(client: OpenAI) -> None:
    form = {"type": "grammar", "grammar": {"syntax": "lark", "definition": 'start: "a"'}}
    tool = {"type": "custom", "custom": {"name": "patch", "format": form}}
    fields = BASE | {"tools": [WEATHER, tool], "tool_choice": "none"}
    raw = client.chat.completions.with_raw_response.create(**fields)
    assert raw.headers["x-tokenwire-ignored"] == "tools[1].custom.format"


async def test_stream_closed_early_stops_its_generation(stack: Stack) -> None:
    async with (
        AsyncOpenAI(base_url=f"{stack.url}/v1", api_key="none", max_retries=0) as client,
        left_early(stack.engine, 16 * 1500),
    ):
        stream = await client.chat.completions.create(
            model="default",
            messages=[HELLO],
            n=16,
            max_tokens=1500,
            stream=True,
            extra_body=ENDLESS,
        )
        await anext(aiter(stream))
        await stream.close()
