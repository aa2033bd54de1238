"""HTTP shim over the whole stack: completions, tokenization, models, metrics."""

import asyncio
import json
from collections.abc import AsyncIterator
from importlib.metadata import version
from typing import Any

import httpx
import openai
import pytest

from tests.services.shim import assert_documented
from tests.stack import Stack, is_busy, left_early, watch_load

PIXEL = (
    "data:image/png;base64,"
    "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAIAAACQd1PeAAAADElEQVR4nGP4//8/AAX+Av4N70a4AAAAAElFTkSuQmCC"
)
PROMPT = "def add(a, b):\n    return a +"


@pytest.fixture
async def http(stack: Stack) -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(base_url=stack.url, timeout=60) as client:
        yield client


@pytest.fixture
async def sdk(stack: Stack) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(
        base_url=f"{stack.url}/v1", api_key="none", max_retries=0
    ) as client:
        yield client


async def complete(http: httpx.AsyncClient, **fields: object) -> Any:
    response = await http.post("/v1/completions", json={"temperature": 0} | fields)
    assert response.status_code == 200, response.text
    return response.json()


async def stream(http: httpx.AsyncClient, **fields: object) -> list[Any]:
    """Return the events of a stream, without its [DONE]."""
    body = {"temperature": 0, "stream": True} | fields
    async with http.stream("POST", "/v1/completions", json=body) as response:
        assert response.status_code == 200, await response.aread()
        assert response.headers["content-type"].startswith("text/event-stream")
        assert response.headers["cache-control"] == "no-cache"
        assert response.headers["x-request-id"]
        lines = [line async for line in response.aiter_lines() if line.startswith("data: ")]
    assert lines.pop() == "data: [DONE]"
    return [json.loads(line.removeprefix("data: ")) for line in lines]


async def ids_of(http: httpx.AsyncClient, text: str) -> list[int]:
    response = await http.post("/tokenize", json={"prompt": text})
    tokens: list[int] = response.json()["tokens"]
    return tokens


async def test_greedy_text_is_equal_for_text_or_ids_streamed_or_whole(
    sdk: openai.AsyncOpenAI, http: httpx.AsyncClient, stack: Stack
) -> None:
    texts = set()
    for prompt in (PROMPT, await ids_of(http, PROMPT)):
        whole = await sdk.completions.create(
            model=stack.model_id, prompt=prompt, max_tokens=24, temperature=0
        )
        chunks = await sdk.completions.create(
            model="default", prompt=prompt, max_tokens=24, temperature=0, stream=True
        )
        texts |= {whole.choices[0].text}
        texts |= {"".join([c.choices[0].text async for c in chunks if c.choices])}
    assert len(texts) == 1


async def test_completion_has_the_fields_of_the_openai_object(
    http: httpx.AsyncClient, stack: Stack
) -> None:
    response = await http.post(
        "/completions", json={"prompt": PROMPT, "max_tokens": 4, "ignore_eos": True}
    )
    answer = response.json()
    assert answer["id"].startswith("cmpl-")
    assert answer["object"] == "text_completion"
    assert answer["model"] == stack.model_id
    assert answer["system_fingerprint"]
    (choice,) = answer["choices"]
    assert choice["finish_reason"] == "length"
    assert choice["logprobs"] is None
    usage = answer["usage"]
    assert usage["completion_tokens"] == 4
    assert usage["total_tokens"] == usage["prompt_tokens"] + 4
    assert usage["prompt_tokens_details"]["cached_tokens"] == usage["cached_input_tokens"]
    assert response.headers["x-tokens-used"] == str(usage["total_tokens"])


async def test_choices_are_indexed_by_prompt(http: httpx.AsyncClient) -> None:
    fields = {"prompt": ["import", PROMPT], "n": 3, "seed": 5, "temperature": 2, "max_tokens": 8}
    whole = await complete(http, **fields)
    assert [choice["index"] for choice in whole["choices"]] == list(range(6))
    joined = [""] * 6
    finishes = 0
    for chunk in await stream(http, **fields):
        (choice,) = chunk["choices"]
        joined[choice["index"]] += choice["text"]
        finishes += choice["finish_reason"] is not None
    assert joined == [choice["text"] for choice in whole["choices"]]
    assert finishes == 6
    assert len(set(joined[:3])) > 1, "choices of one prompt must differ"


async def test_stream_reports_usage_in_the_last_chunk(http: httpx.AsyncClient) -> None:
    fields = {"prompt": PROMPT, "max_tokens": 3, "ignore_eos": True}
    plain = await stream(http, **fields)
    assert ["usage" in chunk for chunk in plain] == [False] * (len(plain) - 1) + [True]
    *chunks, last = await stream(http, **fields, stream_options={"include_usage": True})
    assert all(chunk["usage"] is None for chunk in chunks)
    assert last["choices"] == []
    assert last["usage"]["completion_tokens"] == plain[-1]["usage"]["completion_tokens"] == 3


async def test_echo_logprobs_have_one_entry_per_token(http: httpx.AsyncClient) -> None:
    """lm-eval slices the logprobs by the context's number of ids."""
    ids = await ids_of(http, PROMPT)
    scored = await complete(http, prompt=[ids], max_tokens=1, echo=True, logprobs=1)
    logprobs = scored["choices"][0]["logprobs"]
    assert {len(column) for column in logprobs.values()} == {len(ids) + 1}
    assert logprobs["token_logprobs"][0] is None
    assert logprobs["top_logprobs"][0] is None
    assert all(score <= 0 for score in logprobs["token_logprobs"][1:])
    assert all(1 <= len(row) <= 2 for row in logprobs["top_logprobs"][1:])
    text = scored["choices"][0]["text"]
    assert "".join(logprobs["tokens"]) == text
    for offset, token in zip(logprobs["text_offset"], logprobs["tokens"], strict=True):
        assert text[offset:].startswith(token)
    zero = await complete(http, prompt=[ids], max_tokens=0, echo=True, logprobs=1)
    scores = zero["choices"][0]["logprobs"]["token_logprobs"]
    assert scores[1:] == pytest.approx(logprobs["token_logprobs"][1:-1], abs=1e-4)


async def test_long_answer_has_the_content_of_a_short_one(http: httpx.AsyncClient) -> None:
    """The shim builds a long answer in a thread, so that it does not delay other requests."""
    ids = (await ids_of(http, PROMPT) * 200)[:1_000]
    fields = {"prompt": [ids], "max_tokens": 1, "echo": True, "logprobs": 5}
    [short] = (await complete(http, **fields))["choices"]
    long = (await complete(http, **fields, n=12))["choices"]
    assert [choice["index"] for choice in long] == list(range(12))
    for choice in long:
        assert choice["text"] == short["text"]
        assert choice["logprobs"]["tokens"] == short["logprobs"]["tokens"]


async def test_streamed_logprobs_join_to_the_unstreamed_ones(http: httpx.AsyncClient) -> None:
    fields = {"prompt": PROMPT, "max_tokens": 6, "echo": True, "logprobs": 2}
    whole = (await complete(http, **fields))["choices"][0]["logprobs"]
    chunks = [chunk["choices"][0]["logprobs"] for chunk in await stream(http, **fields)]
    for column in ("tokens", "text_offset"):
        assert [entry for chunk in chunks for entry in chunk[column]] == whole[column]
    scores = [score for chunk in chunks for score in chunk["token_logprobs"]]
    assert scores[1:] == pytest.approx(whole["token_logprobs"][1:], abs=1e-4)


async def test_stop_reason_is_the_matched_string_or_token(http: httpx.AsyncClient) -> None:
    free = await complete(http, prompt=PROMPT, max_tokens=12, return_token_ids=True)
    text, ids = free["choices"][0]["text"], free["choices"][0]["token_ids"]
    stop = text[4:7]
    (by_text,) = (await complete(http, prompt=PROMPT, max_tokens=12, stop=stop))["choices"]
    assert by_text["text"] == text[: text.index(stop)]
    assert (by_text["finish_reason"], by_text["stop_reason"]) == ("stop", stop)
    stopped = await complete(http, prompt=PROMPT, max_tokens=12, stop_token_ids=[ids[3]])
    assert stopped["choices"][0]["stop_reason"] == ids[3]


async def test_constrained_output_is_json(http: httpx.AsyncClient) -> None:
    schema = {
        "type": "object",
        "properties": {"a": {"type": "integer", "maximum": 9}, "b": {"enum": ["x", "y"]}},
        "required": ["a", "b"],
        "additionalProperties": False,
    }
    form = {"type": "json_schema", "json_schema": {"name": "pair", "schema": schema}}
    answer = await complete(http, prompt=PROMPT, max_tokens=100, response_format=form)
    (choice,) = answer["choices"]
    assert choice["finish_reason"] == "stop"
    assert set(json.loads(choice["text"])) == {"a", "b"}


@pytest.mark.parametrize(
    ("fields", "status", "param", "code"),
    [
        ({"temperature": 3}, 400, "temperature", None),
        ({"top_p": -0.1}, 400, "top_p", None),
        ({"top_k": 200}, 400, "top_k", None),
        ({"min_p": 2}, 400, "min_p", None),
        ({"n": 0}, 400, "n", None),
        ({"n": 129}, 400, "n", None),
        ({"prompt": ["a"] * 65, "n": 2}, 400, "n", None),
        ({"prompt": []}, 400, "prompt", None),
        ({"prompt": [[]]}, 400, "prompt", None),
        ({"prompt": [10**6]}, 400, "prompt", None),
        ({"max_tokens": 0}, 400, "max_tokens", None),
        ({"min_tokens": 9, "max_tokens": 3}, 400, "min_tokens", None),
        ({"logprobs": 6}, 400, "logprobs", None),
        ({"stop": ""}, 400, "stop", None),
        ({"stop": ["a"] * 17}, 400, "stop", None),
        ({"logit_bias": {"999999": 1}}, 400, "logit_bias.999999", None),
        ({"logit_bias": {"5": 100.5}}, 400, "logit_bias.5", None),
        ({"frequency_penalty": -2.1}, 400, "frequency_penalty", None),
        ({"presence_penalty": 2.1}, 400, "presence_penalty", None),
        ({"repetition_penalty": 1e-300}, 400, "repetition_penalty", None),
        ({"dry_multiplier": -1}, 400, "dry_multiplier", None),
        ({"dry_multiplier": 1, "dry_base": 1e300}, 400, "dry_base", None),
        ({"mirostat_target": 1e-300}, 400, "mirostat_target", None),
        ({"mirostat_lr": 1e300}, 400, "mirostat_lr", None),
        ({"mirostat_target": 2, "top_k": 5}, 400, "top_k", None),
        ({"mirostat_target": 2, "temperature": 0}, 400, "temperature", None),
        ({"use_beam_search": True, "temperature": 0.5}, 400, "temperature", None),
        ({"use_beam_search": True, "presence_penalty": 1}, 400, "presence_penalty", None),
        (
            {"use_beam_search": True, "grammar": {"type": "regex", "value": "a"}},
            400, "grammar", None,
        ),
        ({"use_beam_search": True, "length_penalty": -11}, 400, "length_penalty", None),
        ({"length_penalty": 2}, 400, "length_penalty", None),
        ({"early_stopping": True}, 400, "early_stopping", None),
        ({"stop_token_ids": [10**6]}, 400, "stop_token_ids", None),
        ({"model": "gpt-4"}, 404, "model", "model_not_found"),
        ({"prompt": [5] * 4000}, 400, "prompt", "context_length_exceeded"),
        (
            {"max_tokens": 10**5, "context_length_exceeded_behavior": "error"},
            400, "prompt", "context_length_exceeded",
        ),
        ({"suffix": "x", "echo": True}, 400, None, None),
        ({"grammar": {"type": "regex", "value": "a{3"}}, 400, "grammar", "invalid_grammar"),
        (
            {"response_format": {"type": "json_object", "schema": {"type": 5}}},
            400, "response_format", "invalid_grammar",
        ),
        ({"images": ["data:,"]}, 400, "images[0]", "invalid_field"),
        ({"images": ["https://example.com/a.png"]}, 400, "images[0]", "invalid_field"),
        ({"best_of": 2, "n": 3}, 400, "best_of", "invalid_field"),
        (
            {"tools": [{"type": "function", "function": {"name": "a b"}}]},
            400, "tools[0].function.name", "invalid_field",
        ),
        (
            {
                "tools": [
                    {"type": "function", "function": {"name": "f", "parameters": {"not": {}}}}
                ],
                "tool_choice": "required",
            },
            400, "tools", "invalid_grammar",
        ),
    ],
)  # fmt: skip
@pytest.mark.parametrize("streams", [False, True])
async def test_invalid_completion_is_refused_with_status_and_param(
    http: httpx.AsyncClient,
    fields: dict[str, object],
    status: int,
    param: str | None,
    code: str | None,
    streams: bool,
) -> None:
    """A stream is refused before its status 200 as well."""
    body = {"prompt": "x", "stream": streams} | fields
    response = await http.post("/v1/completions", json=body)
    assert response.status_code == status, response.text
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    if param is not None:
        assert error["param"] == param
    if code is not None:
        assert error["code"] == code
    assert response.headers["x-request-id"]
    assert "x-tokens-used" not in response.headers


@pytest.mark.parametrize(
    ("path", "fields", "param"),
    [
        ("/v1/completions", {"prompt": "<image>", "images": [PIXEL]}, "images"),
        ("/v1/chat/completions", {"image_url": {"url": PIXEL}},
         "messages[0].content[0].image_url.url"),
        ("/v1/chat/completions", {"image_url": PIXEL}, "messages[0].content[0].image_url"),
        ("/tokenize", {"image_url": PIXEL}, "messages[0].content[0].image_url"),
        ("/apply-template", {"image_url": {"url": PIXEL}}, "messages[0].content[0].image_url.url"),
    ],
)  # fmt: skip
async def test_text_only_model_refuses_images_by_the_clients_name(
    http: httpx.AsyncClient, path: str, fields: dict[str, object], param: str
) -> None:
    if "image_url" in fields:
        fields = {"messages": [{"role": "user", "content": [{"type": "image_url", **fields}]}]}
    response = await http.post(path, json=fields)
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    assert "takes text alone" in error["message"]
    assert error["param"].removesuffix("[0]") == param


async def test_openai_sdk_raises_typed_errors(sdk: openai.AsyncOpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as missing:
        await sdk.completions.create(model="gpt-4", prompt="x")
    assert missing.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError) as wrong:
        await sdk.completions.create(model="default", prompt="x", top_p=2)
    assert wrong.value.param == "top_p"


async def test_tokenize_and_detokenize_round_trip(http: httpx.AsyncClient) -> None:
    text = "def π(x):\n    return '😀<|fim_middle|>'\n"
    answer = (await http.post("/tokenize", json={"prompt": text, "return_token_strs": True})).json()
    assert answer["count"] == len(answer["tokens"]) == len(answer["token_strs"])
    back = (await http.post("/detokenize", json={"tokens": answer["tokens"]})).json()
    assert back["prompt"] == text
    info = (await http.get("/tokenizer_info")).json()
    assert info["eos_token"]
    assert answer["max_model_len"] == info["model_max_length"]
    bad = await http.post("/detokenize", json={"tokens": [10**6]})
    assert (bad.status_code, bad.json()["error"]["param"]) == (400, "tokens")


async def test_models_can_be_listed_and_retrieved(sdk: openai.AsyncOpenAI, stack: Stack) -> None:
    listed = [model.id async for model in sdk.models.list()]
    assert listed == [stack.model_id]
    assert (await sdk.models.retrieve(stack.model_id)).id == stack.model_id
    with pytest.raises(openai.NotFoundError):
        await sdk.models.retrieve("gpt-4")


@pytest.mark.parametrize("streams", [False, True])
async def test_disconnected_client_stops_generation(
    http: httpx.AsyncClient, stack: Stack, streams: bool
) -> None:
    """The cancellation reaches the engine, which frees the KV blocks."""
    body = {"prompt": PROMPT, "max_tokens": 2000, "ignore_eos": True, "n": 16, "stream": streams}
    async with left_early(stack.engine, 16 * 2000):
        asking = asyncio.ensure_future(http.post("/v1/completions", json=body))
        await watch_load(stack.engine, until=is_busy)
        asking.cancel()


async def test_metrics_count_requests_by_route_and_status(http: httpx.AsyncClient) -> None:
    name = 'tokenwire_http_requests_total{model="",route="/v1/completions",status="404"}'

    async def count() -> float:
        lines = (await http.get("/metrics")).text.splitlines()
        return sum(float(line.split()[-1]) for line in lines if line.startswith(name))

    before = await count()
    await http.post("/v1/completions", json={"prompt": "x", "model": "nope"})
    assert await count() == before + 1


async def test_apply_template_returns_the_prompt_of_the_chat(http: httpx.AsyncClient) -> None:
    """llama.cpp's clients request the text of the rendered prompt."""
    body = {"messages": [{"role": "user", "content": "Hi"}]}
    response = await http.post("/apply-template", json=body)
    assert_documented(response.json(), "AppliedTemplate")
    text = response.json()["prompt"]
    tokens = (await http.post("/tokenize", json=body)).json()["tokens"]
    assert await ids_of(http, text) == tokens
    wrong = await http.post("/apply-template", json={})
    assert (wrong.status_code, wrong.json()["error"]["param"]) == (400, "messages")


async def test_version_and_tokenizer_class_are_reported(http: httpx.AsyncClient) -> None:
    assert (await http.get("/version")).json() == {"version": version("tokenwire")}
    info = (await http.get("/tokenizer_info")).json()
    assert info["tokenizer_class"] == "PreTrainedTokenizerFast"


async def test_matched_stop_is_the_eos_id_as_in_sglang(http: httpx.AsyncClient) -> None:
    info = (await http.get("/tokenizer_info")).json()
    bias = {str(info["eos_token_id"]): 100}
    (choice,) = (await complete(http, prompt="x", logit_bias=bias))["choices"]
    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", None)
    assert choice["matched_stop"] == info["eos_token_id"]
