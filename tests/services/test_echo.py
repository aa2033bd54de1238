"""Echoed prompts and special tokens: text, logprobs and offsets of each token."""

import json
from collections.abc import AsyncIterator, Sequence
from typing import Any

import httpx
import pytest

from tests.stack import Stack

HALF = [73, 181]  # "a", and a byte that begins a character
SPECIAL = {"<|endoftext|>", "<|im_start|>", "<|im_end|>"}
TURN = "<|im_start|>user\nHi<|im_end|>\n"


@pytest.fixture
async def http(stack: Stack) -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(base_url=stack.url, timeout=60) as client:
        yield client


async def complete(http: httpx.AsyncClient, **fields: Any) -> list[Any]:
    """Return the choices; join the chunks of a streamed answer."""
    body = {"temperature": 1, "seed": 5, "return_token_ids": True} | fields
    response = await http.post("/v1/completions", json=body)
    assert response.status_code == 200, response.text
    if not fields.get("stream"):
        return list(response.json()["choices"])
    lines = [line for line in response.text.splitlines() if line.startswith("data: {")]
    choices: dict[int, Any] = {}
    for part in [json.loads(line.removeprefix("data: "))["choices"][0] for line in lines]:
        known = choices.setdefault(part["index"], part)
        if known is part:
            continue
        known["text"] += part["text"]
        known["token_ids"] += part["token_ids"]
        known["finish_reason"] = part["finish_reason"]
        known["stop_reason"] = part["stop_reason"]
        if part["logprobs"]:
            for name, values in part["logprobs"].items():
                known["logprobs"][name] += values
    return [choices[index] for index in sorted(choices)]


async def decoded(http: httpx.AsyncClient, ids: Sequence[int]) -> str:
    answer = await http.post("/detokenize", json={"tokens": list(ids)})
    return str(answer.json()["prompt"])


async def ids_of(http: httpx.AsyncClient, text: str) -> list[int]:
    answer = await http.post("/tokenize", json={"prompt": text})
    return list(answer.json()["tokens"])


def joins(choice: Any, left_out: Sequence[str] = ()) -> bool:
    """Return True if the tokens join to the text; assert that each is at its offset."""
    scores, text = choice["logprobs"], ""
    for token, offset in zip(scores["tokens"], scores["text_offset"], strict=True):
        assert offset == len(text)
        text += "" if token in left_out else token
    return bool(text == choice["text"])


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("n", [1, 2])
@pytest.mark.parametrize("logprobs", [None, 0, 3])
@pytest.mark.parametrize("stop", [None, "\ufffd"])
async def test_prompt_that_ends_inside_a_character_is_scored(
    http: httpx.AsyncClient, logprobs: int | None, n: int, stream: bool, stop: str | None
) -> None:
    """The other prompts of the request are scored as well."""
    prompts = [HALF, [73], [181, 181]]
    choices = await complete(
        http, prompt=prompts, max_tokens=0, echo=True, logprobs=logprobs, n=n, stream=stream,
        stop=stop,
    )  # fmt: skip
    texts = [choice["text"] for choice in choices]
    assert texts == [text for text in ("a\ufffd", "a", "\ufffd\ufffd") for _ in range(n)]
    for choice in choices:
        assert (choice["finish_reason"], choice["token_ids"]) == ("length", [])
        if logprobs is not None:
            assert joins(choice)
            assert len(choice["logprobs"]["tokens"]) == len(prompts[choice["index"] // n])


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"logprobs": 2},
        {"n": 3, "logprobs": 0},
        {"n": 2, "stop": ["\ufffd", "e"]},
        {"best_of": 4, "n": 2, "logprobs": 0},
        {"prompt": [HALF, [73]], "logprobs": 1},
    ],
)
async def test_generated_tokens_complete_the_character_of_the_prompt(
    http: httpx.AsyncClient, fields: dict[str, Any], stream: bool
) -> None:
    request = {"prompt": HALF, "max_tokens": 6, "ignore_eos": True, "echo": True} | fields
    if "best_of" not in fields:
        request["stream"] = stream
    for choice in await complete(http, **request):
        ids = [*choice.get("prompt_token_ids", HALF), *choice["token_ids"]]
        if "stop" not in fields:
            assert choice["text"] == await decoded(http, ids)
        assert choice["text"].startswith("a")
        assert "logprobs" not in fields or joins(choice)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("logprobs", [None, 2])
async def test_incomplete_character_is_echoed_when_generation_ends_at_once(
    http: httpx.AsyncClient, stack: Stack, stream: bool, logprobs: int | None
) -> None:
    [eos] = await ids_of(http, "<|endoftext|>")
    [choice] = await complete(
        http, prompt=HALF, echo=True, logprobs=logprobs, stream=stream, temperature=0,
        logit_bias={str(eos): 100},
    )  # fmt: skip
    assert (choice["text"], choice["token_ids"]) == ("a\ufffd", [eos])
    assert choice["finish_reason"] == "stop"
    if logprobs is not None:
        assert choice["logprobs"]["tokens"] == ["a", "\ufffd", "<|endoftext|>"]
        assert choice["logprobs"]["text_offset"] == [0, 1, 2]


@pytest.mark.parametrize("logprobs", [None, 5])
async def test_prompt_of_ids_is_echoed_like_the_same_text(
    http: httpx.AsyncClient, logprobs: int | None
) -> None:
    """The echo includes special tokens: a harness scores chats by ids and reads their tokens."""
    fields = {"max_tokens": 0, "echo": True, "logprobs": logprobs}
    [by_text] = await complete(http, prompt=TURN, **fields)
    [by_ids] = await complete(http, prompt=await ids_of(http, TURN), **fields)
    assert by_text["text"] == by_ids["text"] == TURN
    if logprobs is not None:
        assert by_ids["logprobs"]["tokens"] == by_text["logprobs"]["tokens"]
        assert by_ids["logprobs"]["tokens"][0] == "<|im_start|>"
        assert "<|im_end|>" in by_ids["logprobs"]["tokens"]
        assert joins(by_ids)


@pytest.mark.parametrize("stream", [False, True])
async def test_special_tokens_have_text_in_logprobs(http: httpx.AsyncClient, stream: bool) -> None:
    """Candidates with empty text would share one key in top_logprobs."""
    prompt = TURN + "<|im_start|>assistant\nHello!"
    fields = {
        "prompt": prompt,
        "logprobs": 5,
        "max_tokens": 12,
        "ignore_eos": True,
        "stream": stream,
    }
    [choice] = await complete(http, **fields, temperature=0)
    [numbered] = await complete(http, **fields, temperature=0, return_tokens_as_token_ids=True)
    texts, numbers = (each["logprobs"]["top_logprobs"] for each in (choice, numbered))
    assert any(SPECIAL & row.keys() for row in texts)
    for row, by_number in zip(texts, numbers, strict=True):
        assert "" not in row
        assert len(row) == len(by_number)
    assert SPECIAL & set(choice["logprobs"]["tokens"])
    assert joins(choice, left_out=[*SPECIAL])
    assert not any(token in choice["text"] for token in SPECIAL)


async def test_special_tokens_have_text_in_chat_logprobs(http: httpx.AsyncClient) -> None:
    response = await http.post(
        "/v1/chat/completions",
        json={
            "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 60, "temperature": 0,
            "logprobs": True, "top_logprobs": 20, "ignore_eos": True,
        },
    )  # fmt: skip
    [choice] = response.json()["choices"]
    entries = choice["logprobs"]["content"]
    ends = [entry for entry in entries if entry["token"] in SPECIAL]
    assert ends, "ignore_eos generates past the end of the turn"
    for entry in ends:
        assert bytes(entry["bytes"]).decode() == entry["token"]
        assert entry["token"] in [each["token"] for each in entry["top_logprobs"]]
    content = b"".join(bytes(entry["bytes"]) for entry in entries if entry not in ends)
    assert content.decode() == choice["message"]["content"]
