"""HTTP shim over the whole stack: chat completions."""

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest

from tests.services.shim import assert_documented
from tests.stack import Stack, is_busy, left_early, watch_load

_STOPS = ("stop_reason", "matched_stop")
SYSTEM = {"role": "system", "content": "You are a helpful assistant."}
HELLO = {"role": "user", "content": "Hello!"}
QUESTION = {"role": "user", "content": "What is the weather in Rome?"}
WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather of a city",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "maxLength": 20}},
            "required": ["city"],
            "additionalProperties": False,
        },
    },
}
CLOCK = {"type": "function", "function": {"name": "now", "description": "The time"}}


@pytest.fixture
async def http(stack: Stack) -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(base_url=stack.url, timeout=60) as client:
        yield client


async def chat(http: httpx.AsyncClient, **fields: object) -> Any:
    body = {"messages": [SYSTEM, HELLO], "temperature": 0, "max_tokens": 16} | fields
    response = await http.post("/v1/chat/completions", json=body)
    assert response.status_code == 200, response.text
    answer = response.json()
    assert_documented(answer, "ChatCompletion")
    return answer


async def stream(http: httpx.AsyncClient, **fields: object) -> list[Any]:
    """Return the chunks of a stream, without its [DONE]."""
    body = {"messages": [SYSTEM, HELLO], "temperature": 0, "max_tokens": 16, "stream": True}
    async with http.stream("POST", "/v1/chat/completions", json=body | fields) as response:
        assert response.status_code == 200, await response.aread()
        lines = [line async for line in response.aiter_lines() if line.startswith("data: ")]
    assert lines.pop() == "data: [DONE]"
    chunks = [json.loads(line.removeprefix("data: ")) for line in lines]
    for chunk in chunks:
        assert_documented(chunk, "ChatCompletionChunk")
        assert len(chunk["choices"]) <= 1
    return chunks


def joined(chunks: list[Any]) -> list[Any]:
    """Join chunks to the choices of an unstreamed answer."""
    choices: dict[int, Any] = {}
    for choice in (choice for chunk in chunks for choice in chunk["choices"]):
        delta, index = choice["delta"], choice["index"]
        if index not in choices:
            assert delta["role"] == "assistant"
            assert not delta.get("tool_calls")
            message = {"role": "assistant", "content": delta["content"], "refusal": None}
            choices[index] = {"index": index, "message": message, "logprobs": None}
            choices[index] |= dict.fromkeys(("finish_reason", *_STOPS))
        else:
            assert "role" not in delta
            assert choices[index]["finish_reason"] is None, "a choice went on after its end"
            _add(choices[index]["message"], delta)
        if choice["logprobs"] is not None:
            known = choices[index]["logprobs"] or {"content": [], "refusal": None}
            known["content"] += choice["logprobs"]["content"]
            choices[index]["logprobs"] = known
        if choice["finish_reason"] is not None:
            assert delta == {}
            choices[index]["finish_reason"] = choice["finish_reason"]
            choices[index] |= {name: choice[name] for name in _STOPS}
    assert all(choice["finish_reason"] for choice in choices.values())
    return [choices[index] for index in sorted(choices)]


def _add(message: Any, delta: Any) -> None:
    for name in ("content", "reasoning_content", "reasoning"):
        if name in delta:
            message[name] = (message.get(name) or "") + delta[name]
    for call in delta.get("tool_calls", ()):
        calls = message.setdefault("tool_calls", [])
        index = call.pop("index")
        if index == len(calls):
            assert call["function"]["arguments"] == ""
            assert set(call) == {"id", "type", "function"}
            calls.append(call)
        else:
            assert set(call) == {"function"}
            assert set(call["function"]) == {"arguments"}
            calls[index]["function"]["arguments"] += call["function"]["arguments"]


def without_ids(choices: list[Any]) -> list[Any]:
    """Remove the ids of tool calls: they are random."""
    for choice in choices:
        for call in choice["message"].get("tool_calls", ()):
            assert call.pop("id").startswith("call_")
    return choices


async def test_chat_completion_has_the_fields_of_the_openai_object(
    http: httpx.AsyncClient, stack: Stack
) -> None:
    body = {"messages": [HELLO], "max_tokens": 4, "ignore_eos": True, "temperature": 0}
    response = await http.post("/chat/completions", json=body | {"temprature": 1})
    answer = response.json()
    assert answer["id"].startswith("chatcmpl-")
    assert answer["object"] == "chat.completion"
    assert answer["model"] == stack.model_id
    assert answer["system_fingerprint"]
    (choice,) = answer["choices"]
    assert choice["finish_reason"] == "length"
    assert choice["message"]["role"] == "assistant"
    assert choice["message"]["content"]
    usage = answer["usage"]
    assert usage["completion_tokens"] == 4
    assert usage["prompt_tokens_details"]["cached_tokens"] == usage["cached_input_tokens"]
    assert response.headers["x-tokens-used"] == str(usage["total_tokens"])
    assert response.headers["x-request-id"]
    assert response.headers["x-tokenwire-ignored"] == "temprature"


async def test_tokenize_returns_the_prompt_ids_of_a_chat(http: httpx.AsyncClient) -> None:
    asked = {"messages": [SYSTEM, QUESTION], "tools": [WEATHER]}
    tokenized = await http.post("/tokenize", json=asked | {"return_token_strs": True})
    assert_documented(tokenized.json(), "Tokenized")
    told = tokenized.json()
    assert len(told["tokens"]) == len(told["token_strs"]) == told["count"]
    assert told["token_strs"][0] == "<|im_start|>"
    answer = await chat(http, **asked, return_token_ids=True)
    assert answer["choices"][0]["prompt_token_ids"] == told["tokens"]
    back = (await http.post("/detokenize", json={"tokens": told["tokens"]})).json()["prompt"]
    assert "get_weather" in back
    assert back.endswith("<|im_start|>assistant\n")


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"n": 3, "seed": 5, "temperature": 1.5, "logprobs": True, "top_logprobs": 3},
        {"stop": ["!", "?"], "include_stop_str_in_output": True},
        {"max_tokens": 2, "ignore_eos": True, "logprobs": True},
        {"response_format": {"type": "json_object"}, "max_tokens": 40, "seed": 1},
        {"tools": [WEATHER, CLOCK], "messages": [QUESTION], "max_tokens": 60},
        {
            "tools": [WEATHER, CLOCK],
            "messages": [QUESTION],
            "tool_choice": "required",
            "n": 4,
            "seed": 2,
            "temperature": 1,
            "max_tokens": 80,
        },
        {
            "tools": [WEATHER, CLOCK],
            "tool_choice": {"type": "function", "function": {"name": "now"}},
            "max_tokens": 60,
            "logprobs": True,
        },
    ],
)
async def test_streamed_equals_unstreamed(http: httpx.AsyncClient, fields: dict[str, Any]) -> None:
    whole = without_ids((await chat(http, **fields))["choices"])
    streamed = without_ids(joined(await stream(http, **fields)))
    for choice, other in zip(whole, streamed, strict=True):
        scores, others = choice.pop("logprobs"), other.pop("logprobs")
        entries = [] if scores is None else scores["content"]
        other_entries = [] if others is None else others["content"]
        assert [entry["bytes"] for entry in entries] == [entry["bytes"] for entry in other_entries]
        assert [entry["logprob"] for entry in entries] == pytest.approx(
            [entry["logprob"] for entry in other_entries], abs=1e-3
        )
    assert streamed == whole


async def test_stream_options_control_the_usage_chunk(http: httpx.AsyncClient) -> None:
    *before, finish = await stream(http)
    assert all("usage" not in chunk for chunk in before)
    assert finish["usage"]["total_tokens"] > finish["usage"]["prompt_tokens"]
    assert all(
        "usage" not in chunk
        for chunk in await stream(http, stream_options={"include_usage": False})
    )
    *chunks, last = await stream(http, stream_options={"include_usage": True})
    assert all(chunk["usage"] is None for chunk in chunks)
    assert last["choices"] == []
    assert last["usage"]["total_tokens"] > last["usage"]["prompt_tokens"]


async def test_logprob_bytes_join_to_the_content(http: httpx.AsyncClient) -> None:
    fields = {"n": 2, "seed": 3, "temperature": 1.2, "max_tokens": 24}
    for choice in (await chat(http, **fields, logprobs=True, top_logprobs=20))["choices"]:
        entries = choice["logprobs"]["content"]
        data = b"".join(bytes(entry["bytes"]) for entry in entries)
        assert data.decode() == choice["message"]["content"]
        for entry in entries:
            scores = [top["logprob"] for top in entry["top_logprobs"]]
            assert len(scores) == 20
            assert scores == sorted(scores, reverse=True)
            assert entry["logprob"] <= scores[0]
    bare = (await chat(http, logprobs=True))["choices"][0]["logprobs"]["content"]
    assert all(entry["top_logprobs"] == [] for entry in bare)


async def test_second_turn_reuses_the_cached_blocks_of_the_first(http: httpx.AsyncClient) -> None:
    """Without prefix hits, every turn prefills the whole conversation again."""
    messages = [SYSTEM, {"role": "user", "content": "Tell me a story of a fox. " * 12}]
    first = await chat(http, messages=messages, max_tokens=40)
    messages += [first["choices"][0]["message"], {"role": "user", "content": "Go on."}]
    second = await chat(http, messages=messages)
    cached = second["usage"]["prompt_tokens_details"]["cached_tokens"]
    assert cached >= first["usage"]["prompt_tokens"] - 32


async def test_chat_without_max_tokens_fills_the_context(http: httpx.AsyncClient) -> None:
    [model] = (await http.get("/v1/models")).json()["data"]
    long = {"role": "user", "content": "x y z " * 640}
    answer = await chat(http, messages=[long], max_tokens=None, ignore_eos=True)
    assert answer["usage"]["total_tokens"] == model["max_model_len"]
    assert answer["choices"][0]["finish_reason"] == "length"


async def test_continue_final_message_continues_the_assistant_text(http: httpx.AsyncClient) -> None:
    start = {"role": "assistant", "content": "The three primary colors are red,"}
    fields = {"messages": [HELLO, start], "continue_final_message": True}
    asked = {"messages": [HELLO, start], "continue_final_message": True}
    tokens = (await http.post("/tokenize", json=asked)).json()["tokens"]
    text = (await http.post("/detokenize", json={"tokens": tokens})).json()["prompt"]
    assert text.endswith("red,")
    answer = await chat(http, **fields, return_token_ids=True)
    assert answer["choices"][0]["prompt_token_ids"] == tokens
    unprompted = {"messages": [HELLO], "add_generation_prompt": False}
    tokens = (await http.post("/tokenize", json=unprompted)).json()["tokens"]
    answer = await chat(http, **unprompted, return_token_ids=True)
    assert answer["choices"][0]["prompt_token_ids"] == tokens


async def test_tool_result_reaches_the_prompt(http: httpx.AsyncClient) -> None:
    """Full round: the model calls a tool, the client answers, the model continues."""
    messages: list[Any] = [QUESTION]
    tools = [WEATHER]
    forced = {"type": "function", "function": {"name": "get_weather"}}
    answer = await chat(http, messages=messages, tools=tools, tool_choice=forced, max_tokens=60)
    (choice,) = answer["choices"]
    assert choice["finish_reason"] == "stop", "OpenAI uses stop for a named tool_choice"
    (call,) = choice["message"]["tool_calls"]
    arguments = json.loads(call["function"]["arguments"])
    assert set(arguments) == {"city"}
    messages += [
        choice["message"],
        {"role": "tool", "tool_call_id": call["id"], "content": "Sunny, 21 degrees"},
    ]
    told = await http.post("/tokenize", json={"messages": messages, "tools": tools})
    text = (await http.post("/detokenize", json={"tokens": told.json()["tokens"]})).json()["prompt"]
    assert text.index("get_weather") < text.index("Sunny, 21 degrees")
    assert (await chat(http, messages=messages, tools=tools))["choices"][0]["message"]


@pytest.mark.parametrize("strict", [False, True])
async def test_call_of_a_tool_that_takes_a_set_repeats_no_item(
    http: httpx.AsyncClient, strict: bool
) -> None:
    """pydantic describes a `set` so."""
    digits = {"type": "array", "items": {"enum": [1, 2, 3]}, "minItems": 3, "uniqueItems": True}
    parameters = {
        "type": "object",
        "properties": {"digits": digits},
        "required": ["digits"],
        "additionalProperties": False,
    }
    function = {"name": "f", "parameters": parameters, "strict": strict}
    tools = [{"type": "function", "function": function}]
    forced = {"type": "function", "function": {"name": "f"}}
    body = {"messages": [HELLO], "tools": tools, "tool_choice": forced, "max_tokens": 200}
    for seed in range(4):
        fields = {"temperature": 1.5, "seed": seed}
        response = await http.post("/v1/chat/completions", json=body | fields)
        assert response.status_code == 200, response.text
        assert "x-tokenwire-ignored" not in response.headers
        (call,) = response.json()["choices"][0]["message"]["tool_calls"]
        assert sorted(json.loads(call["function"]["arguments"])["digits"]) == [1, 2, 3]


@pytest.mark.parametrize("streams", [False, True])
async def test_required_tool_choice_yields_a_call(http: httpx.AsyncClient, streams: bool) -> None:
    fields = {"messages": [HELLO], "tools": [CLOCK], "tool_choice": "required", "max_tokens": 60}
    choices = (
        joined(await stream(http, **fields)) if streams else (await chat(http, **fields))["choices"]
    )
    (choice,) = choices
    assert choice["finish_reason"] == "tool_calls"
    assert choice["message"]["content"] is None
    calls = choice["message"]["tool_calls"]
    assert {call["function"]["name"] for call in calls} == {"now"}
    assert {call["function"]["arguments"] for call in calls} == {"{}"}


@pytest.mark.parametrize(
    "tool_choice", ["required", {"type": "function", "function": {"name": "now"}}]
)
async def test_tool_call_cut_before_its_name_does_not_become_content(
    http: httpx.AsyncClient, tool_choice: object
) -> None:
    """A stream does not show it either: users must not see the markup of a call."""
    fields = {"messages": [HELLO], "tools": [CLOCK], "tool_choice": tool_choice}
    for ending in ({"max_tokens": 1}, {"max_tokens": 4}, {"stop": "name", "max_tokens": 60}):
        (whole,) = (await chat(http, **fields, **ending))["choices"]
        chunks = await stream(http, **fields, **ending)
        assert not any(
            choice["delta"].get("content") for chunk in chunks for choice in chunk["choices"]
        )
        (streamed,) = joined(chunks)
        message = {"role": "assistant", "content": None, "refusal": None}
        assert whole["message"] == streamed["message"] == message
        assert whole["finish_reason"] == ("stop" if "stop" in ending else "length")
        answer = await chat(http, messages=[HELLO, whole["message"], HELLO], max_tokens=1)
        assert answer["choices"]


async def test_disabled_parallel_tool_calls_yield_at_most_one_call(http: httpx.AsyncClient) -> None:
    fields = {"tools": [WEATHER, CLOCK], "tool_choice": "required", "parallel_tool_calls": False}
    answer = await chat(http, **fields, n=4, temperature=1, seed=1, max_tokens=120)
    for choice in answer["choices"]:
        assert len(choice["message"]["tool_calls"]) == 1


async def test_content_satisfies_response_format_and_grammar(http: httpx.AsyncClient) -> None:
    schema = {
        "type": "object",
        "properties": {"a": {"type": "integer", "maximum": 9}, "b": {"enum": ["x", "y"]}},
        "required": ["a", "b"],
        "additionalProperties": False,
    }
    form = {"type": "json_schema", "json_schema": {"name": "pair", "schema": schema}}
    (choice,) = (await chat(http, response_format=form, max_tokens=100))["choices"]
    assert choice["finish_reason"] == "stop"
    assert set(json.loads(choice["message"]["content"])) == {"a", "b"}
    grammar = {"type": "regex", "value": "yes|no"}
    assert (await chat(http, grammar=grammar))["choices"][0]["message"]["content"] in ("yes", "no")


def of(role: str, **fields: object) -> dict[str, object]:
    return {"role": role, **fields}


@pytest.mark.parametrize(
    ("fields", "status", "param"),
    [
        ({"messages": None}, 400, "messages"),
        ({"messages": []}, 400, "messages"),
        ({"messages": [of("function", content="a")]}, 400, "messages[0].role"),
        ({"messages": [HELLO, of("user")]}, 400, "messages[1].content"),
        ({"messages": [HELLO, of("tool", content="a")]}, 400, "messages[1].tool_call_id"),
        (
            {"messages": [of("user", content="a", tool_call_id="c")]},
            400,
            "messages[0].tool_call_id",
        ),
        (
            {
                "messages": [
                    of("user", content=[{"type": "image_url", "image_url": {"url": "data:"}}])
                ]
            },
            400,
            "messages[0].content[0].image_url.url",
        ),
        (
            {"messages": [of("user", content=[{"type": "input_audio"}])]},
            400,
            "messages[0].content[0].type",
        ),
        (
            {
                "messages": [
                    of(
                        "assistant",
                        tool_calls=[{"id": "c", "function": {"name": "f", "arguments": 5}}],
                    )
                ]
            },
            400,
            "messages[0].tool_calls[0].function.arguments",
        ),
        (
            {
                "messages": [
                    of(
                        "assistant",
                        tool_calls=[{"id": "", "function": {"name": "f", "arguments": ""}}],
                    )
                ]
            },
            400,
            "messages[0].tool_calls[0].id",
        ),
        ({"tools": [{"type": "web_search"}]}, 400, "tools[0].type"),
        ({"tools": [CLOCK, CLOCK]}, 400, "tools[1].function.name"),
        ({"tools": [CLOCK] * 129}, 400, "tools"),
        (
            {"tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": 5}}}]},
            400,
            "tools[0].function.parameters",
        ),
        ({"tool_choice": "required"}, 400, "tool_choice"),
        (
            {"tools": [CLOCK], "tool_choice": {"type": "function", "function": {"name": "g"}}},
            400,
            "tool_choice",
        ),
        ({"top_logprobs": 1}, 400, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, 400, "top_logprobs"),
        ({"n": 129}, 400, "n"),
        ({"temperature": 3}, 400, "temperature"),
        ({"max_tokens": 0}, 400, "max_tokens"),
        ({"stop": [""]}, 400, "stop"),
        ({"response_format": {"type": "json_schema"}}, 400, "response_format"),
        (
            {"response_format": {"type": "json_object", "schema": {"type": 5}}},
            400,
            "response_format",
        ),
        ({"grammar": {"type": "regex", "value": "("}}, 400, "grammar"),
        ({"functions": [{"name": "f"}]}, 400, "functions"),
        ({"chat_template": "none"}, 400, "chat_template"),
        ({"chat_template_kwargs": {"messages": []}}, 400, "chat_template_kwargs"),
        ({"continue_final_message": True}, 400, "continue_final_message"),
        ({"messages": [of("user", content="x " * 4_000)]}, 400, "messages"),
        ({"stream_options": {}, "stream": False}, 400, "stream_options"),
        ({"model": "gpt-4"}, 404, "model"),
    ],
)
@pytest.mark.parametrize("streams", [False, True])
async def test_invalid_chat_is_refused_with_status_and_param(
    http: httpx.AsyncClient, fields: dict[str, object], status: int, param: str, streams: bool
) -> None:
    """A stream is refused before its status 200 as well."""
    body = {"messages": [HELLO], "stream": streams} | fields
    response = await http.post("/v1/chat/completions", json=body)
    assert response.status_code == status, response.text
    assert_documented(response.json(), "ErrorBody")
    assert response.json()["error"]["param"] == param
    assert "x-tokens-used" not in response.headers


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "prompt"),
        ({"prompt": "a", "messages": [HELLO]}, "prompt"),
        ({"prompt": "a", "tools": []}, "tools"),
        ({"prompt": "a", "continue_final_message": True}, "continue_final_message"),
        ({"messages": []}, "messages"),
        ({"messages": [of("tool", content="a")]}, "messages[0].tool_call_id"),
        ({"messages": [HELLO], "chat_template": "x"}, "chat_template"),
        ({"messages": [HELLO], "tools": [CLOCK, CLOCK]}, "tools[1].function.name"),
    ],
)
async def test_invalid_tokenize_request_is_refused_with_param(
    http: httpx.AsyncClient, body: dict[str, object], param: str
) -> None:
    response = await http.post("/tokenize", json=body)
    assert (response.status_code, response.json()["error"]["param"]) == (400, param)


@pytest.mark.parametrize("streams", [False, True])
async def test_disconnected_client_stops_its_chat(
    http: httpx.AsyncClient, stack: Stack, streams: bool
) -> None:
    body = {"messages": [HELLO], "max_tokens": 2000, "ignore_eos": True, "n": 8, "stream": streams}
    async with left_early(stack.engine, 8 * 2000):
        asking = asyncio.ensure_future(http.post("/v1/chat/completions", json=body))
        await watch_load(stack.engine, until=is_busy)
        asking.cancel()


async def test_metrics_count_chats_under_their_route(http: httpx.AsyncClient) -> None:
    name = 'tokenwire_http_requests_total{model="",route="/v1/chat/completions",status="404"}'

    async def count() -> float:
        lines = (await http.get("/metrics")).text.splitlines()
        return sum(float(line.split()[-1]) for line in lines if line.startswith(name))

    before = await count()
    await http.post("/chat/completions", json={"messages": [HELLO], "model": "nope"})
    assert await count() == before + 1
