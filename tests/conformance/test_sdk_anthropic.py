"""Messages through Anthropic's SDK for Python: answers, streams, tools, schemas, errors."""

import json
from typing import Any, Literal

import anthropic
import pytest
from anthropic import Anthropic, AsyncAnthropic, beta_tool
from anthropic.types import Message, MessageParam, ToolParam

from tests.stack import Stack, left_early

HELLO: MessageParam = {"role": "user", "content": "Hello!"}
QUESTION: MessageParam = {"role": "user", "content": "What is the weather in Rome?"}
WEATHER: ToolParam = {
    "name": "get_weather",
    "description": "The weather of a city",
    "input_schema": {
        "type": "object",
        "properties": {"city": {"type": "string", "maxLength": 20}},
        "required": ["city"],
        "additionalProperties": False,
    },
    "strict": True,
}
BASE: dict[str, Any] = {
    "model": "default",
    "max_tokens": 12,
    "messages": [HELLO],
    "extra_body": {"temperature": 0},
}
SCHEMA = {
    "type": "object",
    "properties": {"colour": {"enum": ["red", "green"]}},
    "required": ["colour"],
    "additionalProperties": False,
}


@pytest.fixture
def client(stack: Stack) -> Anthropic:
    return Anthropic(base_url=stack.url, api_key="none", max_retries=0)


def text_of(message: Message) -> str:
    return "".join(block.text for block in message.content if block.type == "text")


def created(client: Anthropic, **fields: Any) -> Message:
    made: Message = client.messages.create(**BASE | fields)
    return made


def streamed(client: Anthropic, **fields: Any) -> Message:
    with client.messages.stream(**BASE | fields) as stream:
        text = "".join(stream.text_stream)
        made = stream.get_final_message()
    assert text == text_of(made)
    return made


def same(message: Message, other: Message) -> bool:
    left, right = (each.model_dump(exclude={"id", "usage"}) for each in (message, other))
    for block in (*left["content"], *right["content"]):
        if block["type"] == "tool_use":
            del block["id"]
    return bool(left == right)


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"system": "Be brief.", "extra_body": {"temperature": 0, "top_p": 0.9, "top_k": 20}},
        {"system": [{"type": "text", "text": "Be brief."}], "thinking": {"type": "disabled"}},
        {"messages": [HELLO, {"role": "assistant", "content": "Hel"}]},
        {"output_config": {"format": {"type": "json_schema", "schema": SCHEMA}}, "max_tokens": 40},
        {"tools": [WEATHER], "tool_choice": {"type": "any"}, "max_tokens": 60},
        {"tools": [WEATHER], "tool_choice": {"type": "tool", "name": "get_weather"}},
        {"tools": [WEATHER], "tool_choice": {"type": "none"}},
    ],
    ids=str,
)
def test_stream_equals_the_whole_answer(client: Anthropic, fields: dict[str, Any]) -> None:
    whole, parts = created(client, **fields), streamed(client, **fields)
    assert same(whole, parts)
    assert whole.usage.output_tokens == parts.usage.output_tokens > 0
    assert whole.role == "assistant"
    assert whole.id.startswith("msg_")


def test_answer_ends_for_the_reason_that_it_names(client: Anthropic) -> None:
    cut = created(client, max_tokens=5)
    assert (cut.stop_reason, cut.usage.output_tokens) == ("max_tokens", 5)
    text = text_of(cut)
    ended = created(client, max_tokens=200)
    assert ended.stop_reason == "end_turn"
    assert text_of(ended).startswith(text)
    stop = text[len(text) // 2 :][:3]
    stopped = created(client, stop_sequences=[stop])
    assert (stopped.stop_reason, stopped.stop_sequence) == ("stop_sequence", stop)
    assert text.startswith(text_of(stopped))


def test_call_is_constrained_and_its_result_is_read(client: Anthropic) -> None:
    choice = {"type": "tool", "name": "get_weather"}
    asked = created(client, messages=[QUESTION], tools=[WEATHER], tool_choice=choice, max_tokens=60)
    assert asked.stop_reason == "tool_use"
    [call] = [block for block in asked.content if block.type == "tool_use"]
    assert isinstance(call.input["city"], str)
    history: list[MessageParam] = [
        QUESTION,
        {"role": "assistant", "content": asked.content},
        {
            "role": "user",
            "content": [{"type": "tool_result", "tool_use_id": call.id, "content": "Sunny"}],
        },
    ]
    answer = created(client, messages=history, tools=[WEATHER])
    assert answer.usage.input_tokens + (answer.usage.cache_read_input_tokens or 0) > 0
    count = client.messages.count_tokens(model="default", messages=history, tools=[WEATHER])
    usage = answer.usage
    assert count.input_tokens == usage.input_tokens + (usage.cache_read_input_tokens or 0)


@pytest.mark.parametrize("choice", [{"type": "none"}, {"type": "auto"}])
def test_count_follows_the_tool_choice(client: Anthropic, choice: Any) -> None:
    fields = {"messages": [QUESTION], "tools": [WEATHER], "tool_choice": choice}
    usage = created(client, **fields).usage
    count = client.messages.count_tokens(model="default", **fields)
    assert count.input_tokens == usage.input_tokens + (usage.cache_read_input_tokens or 0)


def test_tool_runner_goes_on_after_the_server_held_no_thread(client: Anthropic) -> None:
    @beta_tool
    def get_weather(city: Literal["Rome", "Oslo"]) -> str:
        """The weather of a city"""
        return f"Sunny in {city}"

    asked: Any = {"messages": [QUESTION], "tool_choice": {"type": "any"}, "max_tokens": 60}
    runner = client.beta.messages.tool_runner(
        model="default", tools=[get_weather], max_iterations=3, **asked
    )
    prompts = []
    for message in runner:
        assert message.stop_reason == "tool_use"
        usage = message.usage
        prompts.append(usage.input_tokens + (usage.cache_read_input_tokens or 0))
    assert prompts[0] < prompts[1] < prompts[2], "a request lacked a part of the conversation"


def test_answers_have_no_null_where_clients_expect_absence(client: Anthropic) -> None:
    """The AI SDK refuses an answer with `citations: null`."""
    raw = client.messages.with_raw_response.create(**BASE)
    nulls = {name for name, value in raw.http_response.json().items() if value is None}
    assert nulls == {"stop_sequence"}
    assert all(None not in block.values() for block in raw.http_response.json()["content"])


def test_schema_shapes_the_answer(client: Anthropic) -> None:
    config = {"format": {"type": "json_schema", "schema": SCHEMA}}
    answer = created(client, output_config=config, max_tokens=40)
    assert json.loads(text_of(answer))["colour"] in ("red", "green")


def test_tools_of_other_servers_are_left_out_and_named(client: Anthropic) -> None:
    tools: Any = [{"type": "web_search_20250305", "name": "web_search"}, WEATHER]
    raw = client.messages.with_raw_response.create(
        model="default",
        max_tokens=4,
        messages=[HELLO],
        tools=tools,
        service_tier="auto",
    )
    assert raw.headers["x-tokenwire-ignored"] == "service_tier, tools[0]"
    plain = client.messages.count_tokens(model="default", messages=[HELLO], tools=[WEATHER])
    more = client.messages.count_tokens(
        model="default",
        messages=[HELLO],
        tools=tools,
    )
    assert more == plain


@pytest.mark.parametrize(
    ("fields", "kind", "said"),
    [
        ({"model": "none"}, anthropic.NotFoundError, "none"),
        ({"max_tokens": 0}, anthropic.BadRequestError, "max_tokens"),
        ({"extra_body": {"temperature": 9}}, anthropic.BadRequestError, "temperature"),
        ({"messages": []}, anthropic.BadRequestError, "messages"),
        (
            {"messages": [{"role": "user", "content": [{"type": "x"}]}]},
            anthropic.BadRequestError, "messages[0].content",
        ),
        (
            {"messages": [{"role": "assistant", "content": [
                {"type": "tool_result", "tool_use_id": "t", "content": "4"}]}]},
            anthropic.BadRequestError, "messages[0].content[0]",
        ),
        (
            {"tools": [{"name": "no name", "input_schema": {}}]},
            anthropic.BadRequestError, "tools[0].name",
        ),
        (
            {"tools": [{"name": "f", "input_schema": {"type": 3}, "strict": True}]},
            anthropic.BadRequestError, "tools[0].input_schema",
        ),
    ],
)  # fmt: skip
@pytest.mark.parametrize("streams", [False, True])
def test_wrong_request_gets_anthropics_error(
    client: Anthropic,
    fields: dict[str, Any],
    kind: type[anthropic.APIStatusError],
    said: str,
    streams: bool,
) -> None:
    with pytest.raises(kind) as refused:
        (streamed if streams else created)(client, **fields)
    body: Any = refused.value.body
    assert body["type"] == "error"
    assert body["error"]["type"] in ("invalid_request_error", "not_found_error")
    assert said in body["error"]["message"]
    assert body["request_id"]


async def test_client_that_leaves_ends_its_request(stack: Stack) -> None:
    client = AsyncAnthropic(base_url=stack.url, api_key="none", max_retries=0)
    async with (
        left_early(stack.engine, 1_500),
        client.messages.stream(model="default", max_tokens=1_500, messages=[HELLO]) as stream,
    ):
        async for _ in stream.text_stream:
            break
