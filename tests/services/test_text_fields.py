"""Text-level fields that vLLM also has, over gRPC and HTTP."""

import asyncio
import math
from collections.abc import AsyncIterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest
import pytest_asyncio

from tests.services.shim import running_shim
from tests.stack import Stack, running_service, watch_load
from tokenwire.client import Client, GenerateOptions, GrammarSpec, Message
from tokenwire.errors import ServiceError

PROMPT = "def add(a, b):\n    return a + b\n"
END, FIM_PAD, IM_END = 0, 4, 8
"""Ids of special tokens"""
FORCED: GenerateOptions = {"logit_bias": {FIM_PAD: 100}, "max_tokens": 3, "ignore_eos": True}


@pytest_asyncio.fixture
async def client(stack: Stack) -> AsyncIterator[Client]:
    async with Client(stack.tokenizer) as client:
        yield client


@pytest_asyncio.fixture
async def http(stack: Stack) -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(base_url=stack.url, timeout=60) as http:
        yield http


async def streamed(client: Client, **options: Any) -> str:
    async with client.stream(PROMPT, **options) as stream:
        return "".join([delta.text async for delta in stream])


# Special tokens.


@pytest.mark.parametrize("more", [{}, {"logprobs": 1}, {"stop": ["zzz"]}, {"n": 2}], ids=str)
async def test_special_tokens_are_in_the_text_unless_skipped(
    client: Client, more: GenerateOptions
) -> None:
    for skips, text in ((True, ""), (False, "<|fim_pad|>" * 3)):
        options = FORCED | {"skip_special_tokens": skips} | more
        whole = await client.generate(PROMPT, **options)
        assert [choice.text for choice in whole.choices] == [text] * len(whole.choices)
        assert whole.choices[0].token_ids == (FIM_PAD,) * 3
        assert await streamed(client, **options) == text * len(whole.choices)


async def test_stop_string_matches_a_special_token_unless_skipped(client: Client) -> None:
    stopped = FORCED | {"stop": ["<|fim"]}
    choice = (await client.generate(PROMPT, **stopped | {"skip_special_tokens": False})).choices[0]
    assert (choice.text, choice.stop) == ("", "<|fim")
    assert (await client.generate(PROMPT, **stopped)).choices[0].stop is None


@pytest.mark.parametrize("ender", ["eos", "stop id"])
async def test_final_token_needs_include_stop_string_to_be_text(client: Client, ender: str) -> None:
    token = END if ender == "eos" else FIM_PAD
    ends: GenerateOptions = {"logit_bias": {token: 100}, "max_tokens": 3}
    if ender == "stop id":
        ends["stop_token_ids"] = [token]
    name = "<|endoftext|>" if ender == "eos" else "<|fim_pad|>"
    for skips, includes, text in (
        (True, True, ""),
        (False, False, ""),
        (False, True, name),
    ):
        answer = await client.generate(
            PROMPT, **ends | {"skip_special_tokens": skips, "include_stop_string": includes}
        )
        assert answer.text == text
        assert answer.choices[0].stop == token


async def test_special_tokens_are_in_chat_content_unless_skipped(client: Client) -> None:
    options: GenerateOptions = {"logit_bias": {FIM_PAD: 100}, "max_tokens": 2, "logprobs": 0}
    shown = await client.generate(
        Message("user", "Hello!"), **options | {"skip_special_tokens": False}
    )
    assert shown.text == "<|fim_pad|>" * 2
    assert shown.choices[0].scores is not None
    assert shown.choices[0].scores.data == (b"<|fim_pad|>",) * 2
    assert (await client.generate(Message("user", "Hello!"), **options)).text == ""
    ended: GenerateOptions = {"logit_bias": {IM_END: 100}, "skip_special_tokens": False}
    answer = await client.generate(
        Message("user", "Hello!"), **ended | {"include_stop_string": True}
    )
    assert answer.text == "<|im_end|>"
    assert (await client.generate(Message("user", "Hello!"), **ended)).text == ""


# Truncation.


async def test_truncation_keeps_the_end_of_a_prompt(client: Client) -> None:
    ids = (await client.encode(PROMPT)).ids
    for prompt in (PROMPT, ids, [PROMPT, PROMPT]):
        async with client.stream(prompt, truncate_prompt_tokens=4, max_tokens=1) as stream:
            _ = [delta async for delta in stream]
        assert stream.accepted is not None
        assert {tuple(prompt.ids) for prompt in stream.accepted.prompts} == {ids[-4:]}
    echoed = await client.generate(
        PROMPT, truncate_prompt_tokens=4, max_tokens=0, echo=True, logprobs=0
    )
    assert echoed.text == await client.decode(ids[-4:])
    assert echoed.usage.prompt_tokens == 4
    [model] = await client.models()
    most = model.context_length
    for long in ([5] * (most + 50), "x = 1\n" * most):
        cut = await client.generate(long, truncate_prompt_tokens=-1, max_tokens=10)
        assert cut.usage.prompt_tokens == most - 10
    whole = await client.generate(ids, truncate_prompt_tokens=most - 1, max_tokens=1)
    assert whole.usage.prompt_tokens == len(ids)


async def test_truncation_keeps_the_end_of_a_conversation(client: Client) -> None:
    [model] = await client.models()
    long = "word " * model.context_length
    for asked, kept in ((7, 7), (-1, model.context_length - 5)):
        answer = await client.generate(
            Message("user", long), truncate_prompt_tokens=asked, max_tokens=5
        )
        assert answer.usage.prompt_tokens == kept
    answer = await client.generate(
        Message("user", long), truncate_prompt_tokens=-1, ignore_eos=True
    )
    assert answer.usage.prompt_tokens == model.context_length - 1
    assert answer.usage.completion_tokens == 1


async def test_truncated_infill_has_the_requested_length(client: Client) -> None:
    answer = await client.generate(PROMPT, suffix="z" * 50, truncate_prompt_tokens=9, max_tokens=1)
    assert answer.usage.prompt_tokens == 9
    with pytest.raises(ServiceError) as refused:
        await client.generate(PROMPT, suffix="z", truncate_prompt_tokens=2)
    assert refused.value.field == "truncate_prompt_tokens"


@pytest.mark.parametrize("asked", [0, -2, 10**6])
async def test_invalid_truncation_is_refused(client: Client, asked: int) -> None:
    for answer in (
        client.generate(PROMPT, truncate_prompt_tokens=asked),
        client.generate(Message("user", "Hello!"), truncate_prompt_tokens=asked),
    ):
        with pytest.raises(ServiceError) as refused:
            await answer
        assert refused.value.field == "truncate_prompt_tokens"
        code = grpc.StatusCode.OUT_OF_RANGE if asked > 0 else grpc.StatusCode.INVALID_ARGUMENT
        assert refused.value.code is code


# Scores of prompts.


async def test_prompt_logprobs_equal_the_logprobs_of_an_echo(client: Client) -> None:
    options: GenerateOptions = {"max_tokens": 1, "n": 2, "temperature": 0}
    told = await client.generate([PROMPT, "x = ["], **options | {"prompt_logprobs": 3})
    options |= {"echo": True, "logprobs": 1}
    echoed = await client.generate([PROMPT, "x = ["], **options)
    both = await client.generate([PROMPT, "x = ["], **options | {"prompt_logprobs": 3})
    assert [choice.text for choice in both.choices] == [choice.text for choice in echoed.choices]
    for prompt in range(2):
        scores, echo = told.prompt_scores[prompt], echoed.choices[2 * prompt].scores
        both_scores, both_echo = both.prompt_scores[prompt], both.choices[2 * prompt].scores
        assert scores is not None
        assert echo is not None
        assert both_scores is not None
        assert both_echo is not None
        assert both_scores.logprobs == pytest.approx(scores.logprobs, abs=1e-4)
        assert both_scores.top_ids == scores.top_ids
        count = len(scores.logprobs)
        assert scores.logprobs == pytest.approx(echo.logprobs[1 : count + 1], abs=1e-4)
        assert [ids[:1] for ids in scores.top_ids] == list(echo.top_ids[1 : count + 1])
        assert {len(ids) for ids in both_echo.top_ids} == {1}
        for rank, logprob, top in zip(
            scores.ranks, scores.logprobs, scores.top_logprobs, strict=True
        ):
            assert len(top) == 3
            assert all(higher >= lower for higher, lower in pairwise(top))
            assert rank == 1 + sum(other > logprob for other in top) or rank > 3


async def test_prompt_logprobs_of_a_chat_equal_those_of_its_ids(client: Client) -> None:
    async with client.stream(
        Message("user", "Hello!"), max_tokens=1, prompt_logprobs=2, n=2
    ) as stream:
        _ = [delta async for delta in stream]
    assert stream.accepted is not None
    ids = list(stream.accepted.prompts[0].ids)
    answer = await client.generate(Message("user", "Hello!"), max_tokens=1, prompt_logprobs=2)
    of_ids = await client.generate(ids, max_tokens=1, prompt_logprobs=2)
    [expected], [of_stream] = of_ids.prompt_scores, stream.prompt_scores[0]
    assert expected is not None
    assert len(expected.logprobs) == len(ids) - 1
    for scores in (of_stream, answer.prompt_scores[0]):
        assert scores is not None
        assert scores.logprobs == pytest.approx(expected.logprobs, abs=1e-4)
        assert (scores.ranks, scores.texts) == (expected.ranks, expected.texts)


async def test_scores_of_a_long_prompt_arrive_in_several_messages(client: Client) -> None:
    ids = [300 + i % 50 for i in range(1_500)]
    async with client.stream(ids, max_tokens=1, prompt_logprobs=1) as stream:
        _ = [delta async for delta in stream]
    assert len(stream.prompt_scores[0]) > 1
    assert sum(len(run.logprobs) for run in stream.prompt_scores[0]) == len(ids) - 1


async def test_http_prompt_logprobs_have_one_row_per_prompt_token(
    client: Client, http: httpx.AsyncClient
) -> None:
    prompts = [list((await client.encode(PROMPT)).ids), [300]]
    body = {"prompt": prompts, "max_tokens": 1, "n": 2, "return_token_ids": True}
    answer = (await http.post("/v1/completions", json=body | {"prompt_logprobs": 2})).json()
    first, again, single, _ = answer["choices"]
    rows = first["prompt_logprobs"]
    assert again["prompt_logprobs"] == rows
    assert single["prompt_logprobs"] == [None]
    assert rows[0] is None
    assert len(rows) == len(first["prompt_token_ids"])
    for token, row in zip(first["prompt_token_ids"][1:], rows[1:], strict=True):
        ranks = sorted(entry["rank"] for entry in row.values())
        assert ranks in ([1, 2], [1, 2, row[str(token)]["rank"]])
        assert -math.inf < row[str(token)]["logprob"] <= 0
    text = "".join(
        row[str(token)]["decoded_token"]
        for token, row in zip(first["prompt_token_ids"][1:], rows[1:], strict=True)
    )
    assert PROMPT.endswith(text)
    assert "prompt_logprobs" not in (await http.post("/v1/completions", json=body)).json()


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
async def test_stream_with_prompt_logprobs_is_refused(http: httpx.AsyncClient, path: str) -> None:
    messages = [{"role": "user", "content": "Hello!"}]
    body: dict[str, object] = {"max_tokens": 1, "stream": True, "prompt_logprobs": 0}
    body |= {"messages": messages} if "chat" in path else {"prompt": PROMPT}
    answer = await http.post(path, json=body)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "prompt_logprobs"


# Bad words and allowed ids.


async def test_bad_word_is_not_generated_with_or_without_a_space(client: Client) -> None:
    free = await client.generate(PROMPT, max_tokens=60, temperature=0, ignore_eos=True)
    words = [word for word in ("return", "def", "self", "import") if word in free.text]
    assert words
    options: GenerateOptions = {"max_tokens": 60, "temperature": 0, "ignore_eos": True}
    limited = await client.generate(PROMPT, **options | {"bad_words": words})
    assert not any(word in limited.text.split() for word in words)
    assert await streamed(client, **options, bad_words=words) == limited.text
    chat = await client.generate(
        Message("user", "Hello!"), max_tokens=60, temperature=0, bad_words=["the", " a"]
    )
    assert not {"the", "a"} & {*chat.text.split()}


async def test_special_token_can_be_a_bad_word(client: Client) -> None:
    ends: GenerateOptions = {"max_tokens": 8, "logit_bias": {END: 100}}
    assert (await client.generate(PROMPT, **ends)).choices[0].token_ids == (END,)
    limited = await client.generate(PROMPT, **ends | {"bad_words": ["<|endoftext|>"]})
    assert END not in limited.choices[0].token_ids


@pytest.mark.parametrize(
    ("field", "words"),
    [
        ("bad_words[1]", ["a", ""]),
        ("bad_words[0]", ["a" * 1_001]),
        ("bad_words", ["a"] * 129),
        ("bad_words", [chr(0x1F600 + i) * 1_000 for i in range(8)]),
    ],
)
async def test_invalid_bad_words_are_refused(client: Client, field: str, words: list[str]) -> None:
    with pytest.raises(ServiceError) as refused:
        await client.generate(PROMPT, bad_words=words)
    assert (refused.value.code, refused.value.field) == (grpc.StatusCode.INVALID_ARGUMENT, field)


@pytest.mark.parametrize("stream", [False, True])
async def test_allowed_ids_that_contradict_the_grammar_are_refused(
    client: Client, http: httpx.AsyncClient, stream: bool
) -> None:
    yes = (await client.encode("yes", add_special_tokens=False)).ids
    body = {"prompt": PROMPT, "grammar": {"type": "regex", "value": "yes|no"}, "max_tokens": 8}
    some = await client.generate(
        PROMPT, grammar=GrammarSpec(regex="yes|no"), allowed_token_ids=yes, max_tokens=8
    )
    assert some.text == "yes"
    answer = await http.post(
        "/v1/completions", json=body | {"allowed_token_ids": [300], "stream": stream}
    )
    if stream:
        assert "nothing_allowed" in answer.text.lower()
        assert '"param":"allowed_token_ids"' in answer.text
    else:
        assert answer.status_code == 400
        assert answer.json()["error"]["param"] == "allowed_token_ids"


# Chats.


async def test_chat_echo_prepends_the_last_assistant_message(client: Client) -> None:
    messages = [Message("user", "Hello!"), Message("assistant", "Hi! How")]
    options: GenerateOptions = {"max_tokens": 6, "temperature": 0, "n": 2}
    continued: GenerateOptions = {**options, "continue_last_message": True}
    for asked in (continued, options):
        free = await client.generate(messages, **asked)
        echoed = await client.generate(messages, **asked | {"echo": True})
        for choice, with_echo in zip(free.choices, echoed.choices, strict=True):
            assert with_echo.message.content == "Hi! How" + (choice.message.content or "")
            assert with_echo.token_ids == choice.token_ids
        async with client.stream(messages, **asked | {"echo": True}) as stream:
            contents = [delta.text async for delta in stream if delta.index == 0]
        assert "".join(contents) == echoed.text
    last = await client.generate(Message("user", "Hello!"), **options | {"echo": True})
    assert last.choices == (await client.generate(Message("user", "Hello!"), **options)).choices


async def test_unknown_or_conflicting_reasoning_effort_is_refused(http: httpx.AsyncClient) -> None:
    body = {"messages": [{"role": "user", "content": "Hello!"}], "max_tokens": 2}
    for fields, status in (
        ({"reasoning_effort": "high"}, 200),
        ({"reasoning_effort": "huge"}, 400),
        ({"reasoning_effort": "low", "chat_template_kwargs": {"reasoning_effort": "low"}}, 200),
        ({"reasoning_effort": "low", "chat_template_kwargs": {"reasoning_effort": "high"}}, 400),
    ):
        answer = await http.post("/v1/chat/completions", json=body | fields)
        assert answer.status_code == status
        if status == 400:
            assert answer.json()["error"]["param"] == "reasoning_effort"


# Priorities.


async def test_queued_request_with_lower_priority_number_is_served_first(
    embedded_model: Path, tmp_path: Path
) -> None:
    """The engine runs one sequence at a time; the other requests wait in its queue."""
    model = ("--model", str(embedded_model))
    small = ("--dtype", "float32", "--kv-memory", "64MiB", "--max-running", "1")
    async with (
        running_service("engine", *model, *small, log=tmp_path / "engine") as engine,
        running_service(
            "tokenizer", *model, "--engine", engine.target, log=tmp_path / "tokenizer"
        ) as tokenizer,
        running_shim("--tokenizer", tokenizer.target) as shim,
        httpx.AsyncClient(base_url=shim.url, timeout=60) as http,
    ):
        served: list[int] = []

        async def ask(priority: int) -> None:
            body = {"prompt": PROMPT, "max_tokens": 40, "priority": priority, "ignore_eos": True}
            assert (await http.post("/v1/completions", json=body)).status_code == 200
            served.append(priority)

        long = {"prompt": PROMPT, "max_tokens": 1_900, "ignore_eos": True, "stream": True}
        async with http.stream("POST", "/v1/completions", json=long):
            await watch_load(engine.target, until=lambda load: load.running_sequences == 1)
            waiting = []
            for priority in (3, 0):
                waiting.append(asyncio.ensure_future(ask(priority)))
                await watch_load(
                    engine.target, until=lambda load: load.waiting_sequences == len(waiting)
                )
            await ask(-2)  # takes the place of the stream
        await asyncio.gather(*waiting)
    assert served == [-2, 0, 3]


# Timeouts.


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        ("/v1/completions", {"prompt": PROMPT}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "Hi"}]}),
        ("/v1/responses", {"input": "Hi", "store": False}),
        ("/v1/messages", {"messages": [{"role": "user", "content": "Hi"}]}),
    ],
)
async def test_request_ends_at_its_timeout(
    http: httpx.AsyncClient, path: str, fields: dict[str, Any]
) -> None:
    output = "max_output_tokens" if path == "/v1/responses" else "max_tokens"
    body = {**fields, output: 1_900, "timeout": 0.001}
    late = await http.post(path, json=body)
    assert late.status_code == 504
    in_time = await http.post(path, json={**fields, output: 2, "timeout": 3600})
    assert in_time.status_code == 200
    for wrong in (0, -1, "soon", 1e9):
        refused = await http.post(path, json={**fields, output: 2, "timeout": wrong})
        assert refused.status_code == 400
        if path != "/v1/messages":
            assert refused.json()["error"]["param"] == "timeout"
