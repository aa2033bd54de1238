"""Ollama's API through its client for Python: chats, streams, tools, schemas, models."""

import base64
import json
from collections.abc import Iterable
from typing import Any

import httpx
import ollama
import pytest
from ollama import AsyncClient, ChatResponse, Client, GenerateResponse, ResponseError

from tests.stack import Stack, left_early

HELLO = {"role": "user", "content": "Hello!"}
QUESTION = {"role": "user", "content": "What is the weather in Rome?"}
GREEDY: dict[str, Any] = {"temperature": 0, "num_predict": 12}
SCHEMA = {
    "type": "object",
    "properties": {"colour": {"enum": ["red", "green"]}},
    "required": ["colour"],
    "additionalProperties": False,
}
PIXEL = base64.b64encode(b"no image").decode()


def get_weather(city: str) -> str:
    """Return the weather.

    Args:
        city: The name of the city

    Returns:
        The weather
    """
    return f"Sunny in {city}"


@pytest.fixture
def client(stack: Stack) -> Client:
    return Client(host=stack.url)


def chat(client: Client, model: str, **fields: Any) -> ChatResponse:
    base: dict[str, Any] = {"messages": [HELLO], "options": GREEDY}
    answer: ChatResponse = client.chat(model, **(base | fields))
    return answer


def streamed(client: Client, model: str, **fields: Any) -> list[ChatResponse]:
    base: dict[str, Any] = {"messages": [HELLO], "options": GREEDY, "stream": True}
    return list(client.chat(model, **(base | fields)))


def text_of(parts: Iterable[ChatResponse]) -> str:
    return "".join(part.message.content or "" for part in parts)


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"messages": [{"role": "system", "content": "Be brief."}, HELLO]},
        {"messages": [HELLO, {"role": "assistant", "content": "Hel"}]},
        {"options": GREEDY | {"repeat_penalty": 1.3, "repeat_last_n": 8, "num_ctx": 64}},
        {"options": GREEDY | {"num_gpu": 99, "num_thread": 4, "use_mmap": True, "num_keep": 4}},
        {"format": "json", "options": GREEDY | {"num_predict": 200}},
        {"format": SCHEMA, "options": GREEDY | {"num_predict": 40}},
        {"think": False, "keep_alive": "5m"},
    ],
    ids=str,
)
def test_stream_equals_the_whole_answer(
    client: Client, stack: Stack, fields: dict[str, Any]
) -> None:
    whole, parts = (
        chat(client, stack.model_id, **fields),
        streamed(client, stack.model_id, **fields),
    )
    last = parts[-1]
    assert text_of(parts) == whole.message.content
    assert [part.done for part in parts] == [False] * (len(parts) - 1) + [True]
    assert (last.done_reason, last.eval_count) == (whole.done_reason, whole.eval_count)
    assert last.prompt_eval_count == whole.prompt_eval_count
    assert (last.prompt_eval_count or 0) > 0
    for times in (whole, last):
        total, eval_time = times.total_duration or 0, times.eval_duration or 0
        assert 0 < eval_time + (times.prompt_eval_duration or 0) <= total
    assert whole.model == stack.model_id


def test_answer_ends_for_the_reason_that_it_names(client: Client, stack: Stack) -> None:
    cut = chat(client, stack.model_id, options=GREEDY | {"num_predict": 5})
    assert (cut.done_reason, cut.eval_count) == ("length", 5)
    ended = chat(client, stack.model_id, options=GREEDY | {"num_predict": -1})
    assert ended.done_reason == "stop"
    text = ended.message.content or ""
    stopped = chat(client, stack.model_id, options=GREEDY | {"stop": [text[3:6]]})
    assert (stopped.done_reason, stopped.message.content) == ("stop", text[:3])


def test_same_seed_gives_the_same_text(client: Client, stack: Stack) -> None:
    options = {"seed": 5, "num_predict": 24}
    first, second = (chat(client, stack.model_id, options=options) for _ in range(2))
    assert first.message.content == second.message.content


def test_function_is_called_and_its_result_is_read(client: Client, stack: Stack) -> None:
    """As in Ollama's own example, whose calls and results have no ids."""
    messages: list[Any] = [QUESTION]
    asked = chat(
        client, stack.model_id, messages=messages, tools=[get_weather],
        options=GREEDY | {"num_predict": 80},
    )  # fmt: skip
    [call] = asked.message.tool_calls or []
    assert call.function.name == "get_weather"
    result = get_weather(**call.function.arguments)
    messages += [asked.message, {"role": "tool", "content": result, "tool_name": "get_weather"}]
    answer = chat(client, stack.model_id, messages=messages, tools=[get_weather])
    assert answer.message.content
    parts = streamed(
        client, stack.model_id, messages=[QUESTION], tools=[get_weather],
        options=GREEDY | {"num_predict": 80},
    )  # fmt: skip
    calls = [call for part in parts for call in part.message.tool_calls or ()]
    assert calls == asked.message.tool_calls
    assert not parts[-1].message.tool_calls


def test_schema_and_logprobs(client: Client, stack: Stack) -> None:
    answer = chat(
        client, stack.model_id, format=SCHEMA, logprobs=True, top_logprobs=2,
        options=GREEDY | {"num_predict": 40},
    )  # fmt: skip
    assert json.loads(answer.message.content or "")["colour"] in ("red", "green")
    scores = answer.logprobs or []
    assert "".join(each.token for each in scores).startswith(answer.message.content or "")
    assert {len(each.top_logprobs or ()) for each in scores} == {2}
    parts = streamed(client, stack.model_id, logprobs=True, top_logprobs=1)
    tokens = [each.token for part in parts for each in part.logprobs or ()]
    assert "".join(tokens).startswith(text_of(parts))


def test_generation_continues_the_context_of_an_earlier_one(client: Client, stack: Stack) -> None:
    first: GenerateResponse = client.generate(stack.model_id, "Hello!", options=GREEDY)
    assert first.context
    second: GenerateResponse = client.generate(
        stack.model_id, "And now?", options=GREEDY, context=first.context
    )
    assert second.context is not None
    assert second.context[: len(first.context)] == first.context
    assert (second.prompt_eval_count or 0) > (first.prompt_eval_count or 0)
    parts = list(client.generate(stack.model_id, "Hello!", options=GREEDY, stream=True))
    assert "".join(part.response or "" for part in parts) == first.response
    assert parts[-1].context == first.context


def test_raw_prompt_and_gap_are_continued_without_a_template(client: Client, stack: Stack) -> None:
    raw: GenerateResponse = client.generate(
        stack.model_id, "def add(a, b):", raw=True, options=GREEDY
    )
    with httpx.Client(base_url=stack.url) as http:
        body = {"prompt": "def add(a, b):", "temperature": 0, "max_tokens": 12}
        expected = http.post("/v1/completions", json=body).json()["choices"][0]["text"]
        infill = http.post("/v1/completions", json=body | {"suffix": "\n"}).json()
    assert raw.response == expected
    assert raw.context is None
    filled: GenerateResponse = client.generate(
        stack.model_id, "def add(a, b):", suffix="\n", options=GREEDY
    )
    assert filled.response == infill["choices"][0]["text"]


def test_raw_prompt_may_fill_the_context(client: Client, stack: Stack) -> None:
    answer: GenerateResponse = client.generate(
        stack.model_id, "def ", raw=True, options={"temperature": 0, "num_ctx": 40}
    )
    assert (answer.done_reason, answer.prompt_eval_count, answer.eval_count) in {
        ("length", tokens, 40 - tokens) for tokens in range(1, 40)
    } | {("stop", answer.prompt_eval_count, answer.eval_count)}
    assert (answer.eval_count or 0) > 16


def test_request_without_input_loads_the_model(client: Client, stack: Stack) -> None:
    assert client.generate(stack.model_id).done_reason == "load"
    loaded = client.chat(f"{stack.model_id}:latest", messages=[])
    assert (loaded.done, loaded.done_reason) == (True, "load")
    assert (loaded.message.role, loaded.message.content) == ("assistant", "")


def test_models_are_listed_and_described(client: Client, stack: Stack) -> None:
    name = f"{stack.model_id}:latest"
    [listed] = client.list().models
    assert (listed.model, (listed.size or 0) > 0) == (name, True)
    assert listed.details is not None
    assert listed.details.family == "llama"
    assert (listed.details.format, listed.details.quantization_level) == ("safetensors", "BF16")
    shown = client.show(name)
    assert {"completion", "tools", "insert"} <= set(shown.capabilities or ())
    assert "thinking" not in (shown.capabilities or ())
    assert "messages" in (shown.template or "")
    info = shown.modelinfo or {}
    assert info[f"{info['general.architecture']}.context_length"] == 2048
    [running] = client.ps().models
    assert (running.model, running.context_length) == (name, 2048)
    assert running.expires_at is not None


def test_unknown_model_is_not_found_in_ollamas_words(client: Client, stack: Stack) -> None:
    """Clients look for the status and the words before they pull a model."""
    for call in (
        lambda: chat(client, "no-such"),
        lambda: streamed(client, "no-such"),
        lambda: client.generate("no-such", "x"),
        lambda: client.generate("no-such"),
        lambda: client.show("no-such"),
        lambda: client.embed("no-such", "x"),
    ):
        with pytest.raises(ResponseError, match="model 'no-such' not found") as caught:
            call()
        assert caught.value.status_code == 404


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"think": True}, "does not support thinking"),
        ({"options": {"temperature": 3}}, "options.temperature"),
        ({"options": {"typical_p": 0.5}}, "typical_p is not supported"),
        ({"options": {"mirostat": 1}}, "options.mirostat"),
        ({"options": {"mirostat_tau": 0, "mirostat": 2}}, "options.mirostat_tau"),
        ({"options": {"top_k": 1000}}, "options.top_k"),
        ({"options": {"repeat_last_n": -2}}, "options.repeat_last_n"),
        ({"keep_alive": "soon"}, "keep_alive"),
        ({"messages": [HELLO | {"images": [PIXEL]}]}, "images"),
        ({"messages": [{"role": "robot", "content": "x"}]}, r"messages\[0\].role"),
    ],
    ids=str,
)
def test_what_would_change_the_answer_is_refused_by_name(
    client: Client, stack: Stack, fields: dict[str, Any], message: str
) -> None:
    with pytest.raises(ResponseError, match=message) as caught:
        chat(client, stack.model_id, **fields)
    assert caught.value.status_code == 400


def test_template_is_refused(client: Client, stack: Stack) -> None:
    with pytest.raises(ResponseError, match="template is not supported"):
        client.generate(stack.model_id, "x", template="{{ .Prompt }}")


def test_what_makes_models_is_not_supported(client: Client, stack: Stack) -> None:
    with pytest.raises(ResponseError, match="is not supported") as caught:
        client.create("x", from_=stack.model_id)
    assert caught.value.status_code == 501
    with pytest.raises(ResponseError, match="is not supported"):
        client.copy(stack.model_id, "x")


def test_curl_needs_no_content_type_but_web_pages_do(stack: Stack) -> None:
    """`curl -d` sends a form's type, as a page of another origin could without a preflight."""
    body = f'{{"model": "{stack.model_id}", "prompt": "x", "options": {{"num_predict": 1}}}}'
    form = {"content-type": "application/x-www-form-urlencoded"}
    with httpx.Client(base_url=stack.url) as http:
        assert http.post("/api/generate", content=body, headers=form).status_code == 200
        foreign = form | {"origin": "http://example.com"}
        refused = http.post("/api/generate", content=body, headers=foreign)
        assert refused.status_code == 400
        assert "content-type" in refused.json()["error"]


def test_server_is_found_as_ollama_is(stack: Stack) -> None:
    """Clients probe HEAD / and the version."""
    with httpx.Client(base_url=stack.url) as http:
        assert http.head("/").status_code == 200
        version = http.get("/api/version").json()["version"]
        assert [int(part) for part in version.split(".")] >= [0, 6, 4]
        stream = http.post("/api/chat", json={"model": stack.model_id, "messages": [HELLO]})
        assert stream.headers["content-type"] == "application/x-ndjson"


async def test_engine_stops_when_the_client_leaves(stack: Stack) -> None:
    options = {"num_predict": 2000, "temperature": 0}
    body = {"model": stack.model_id, "prompt": "def ", "raw": True, "options": options}
    async with left_early(stack.engine, 1000), httpx.AsyncClient(base_url=stack.url) as http:
        async with http.stream("POST", "/api/generate", json=body) as response:
            line = await anext(response.aiter_lines())
        assert json.loads(line)["done"] is False


async def test_async_client_streams(stack: Stack) -> None:
    client = AsyncClient(host=stack.url)
    parts = [
        part
        async for part in await client.chat(
            stack.model_id, messages=[HELLO], options=GREEDY, stream=True
        )
    ]
    whole = ollama.Client(host=stack.url).chat(stack.model_id, messages=[HELLO], options=GREEDY)
    assert text_of(parts) == whole.message.content
