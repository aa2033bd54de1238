"""Pairs of a completion's fields: each field has its effect beside each other field.

A field's effect is one check: it compares the answer with the field to the answer to the same
request without it. Both checks must hold for a request with a pair of fields.
"""

import json
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import accumulate, combinations_with_replacement
from statistics import fmean
from typing import Any, TypeAlias

import httpx
import pytest

from tests.stack import Stack

Request: TypeAlias = dict[str, Any]
Columns: TypeAlias = dict[str, list[Any]]

PROMPT = "def mean(values):\n    total = "
SUFFIX = "\n    return total / len(values)\n"
PATTERN = "[a-e]{2} [a-e ]{3,20}"
BASE: Request = {
    "prompt": PROMPT, "max_tokens": 16, "seed": 5, "ignore_eos": True, "return_token_ids": True,
}  # fmt: skip
COLUMNS = ("tokens", "token_logprobs", "top_logprobs", "text_offset")


@dataclass(slots=True)
class Choice:
    """A choice, joined from its chunks if it was streamed."""

    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    prompt_token_ids: list[int] = field(default_factory=list)
    logprobs: Columns | None = None
    finish_reason: str | None = None
    stop_reason: str | int | None = None

    def add(self, part: Mapping[str, Any]) -> None:
        assert self.finish_reason is None, "a choice continued after its finish reason"
        self.text += part["text"]
        self.token_ids += part["token_ids"]
        self.prompt_token_ids += part.get("prompt_token_ids", [])
        if part["logprobs"] is not None:
            mine = self.logprobs = self.logprobs or {name: [] for name in COLUMNS}
            for name in COLUMNS:
                mine[name] += part["logprobs"][name]
        self.finish_reason, self.stop_reason = part["finish_reason"], part["stop_reason"]

    @property
    def generated_logprobs(self) -> list[float]:
        assert self.logprobs is not None
        count = len(self.token_ids)
        return self.logprobs["token_logprobs"][-count:] if count else []


@dataclass(frozen=True, slots=True)
class Answer:
    choices: list[Choice]
    usage: dict[str, int]

    @property
    def texts(self) -> list[str]:
        return [choice.text for choice in self.choices]

    @property
    def ids(self) -> list[list[int]]:
        return [choice.token_ids for choice in self.choices]


Ask: TypeAlias = Callable[[Request], Answer]


@pytest.fixture(scope="module")
def http(stack: Stack) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=stack.url, timeout=60) as client:
        yield client


@pytest.fixture(scope="module")
def prompt_ids(http: httpx.Client) -> list[int]:
    ids: list[int] = http.post("/tokenize", json={"prompt": PROMPT}).json()["tokens"]
    return ids


@pytest.fixture(scope="module")
def ask(http: httpx.Client) -> Ask:
    def ask(request: Request) -> Answer:
        response = http.post("/v1/completions", json=request)
        assert response.status_code == 200, response.text
        parts = events_of(response.text) if request.get("stream") else [response.json()]
        choices: dict[int, Choice] = {}
        for part in parts:
            assert part["object"] == "text_completion"
            for each in part["choices"]:
                choices.setdefault(each["index"], Choice()).add(each)
        assert sorted(choices) == list(range(len(choices)))
        [usage] = [part["usage"] for part in parts if part.get("usage")]
        assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
        return Answer([choices[index] for index in sorted(choices)], usage)

    return ask


def events_of(stream: str) -> list[Any]:
    events = [line.removeprefix("data: ") for line in stream.splitlines() if line]
    assert events.pop() == "[DONE]"
    return [json.loads(event) for event in events]


def without(request: Request, *names: str) -> Request:
    return {name: value for name, value in request.items() if name not in names}


def echoed(request: Request) -> int:
    """Return the characters of the prompt at the start of a choice's text."""
    return len(PROMPT) if request.get("echo") else 0


# The fields' effects.


def keeps_echo(ask: Ask, request: Request) -> None:
    """Assert that the prompt precedes the text, and nothing else changes."""
    plain = ask(without(request, "echo"))
    for got, expected in zip(ask(request).choices, plain.choices, strict=True):
        assert got.text == PROMPT + expected.text
        assert got.token_ids == expected.token_ids
        if expected.logprobs is None:
            continue
        assert got.logprobs is not None
        before = len(got.prompt_token_ids)
        assert "".join(got.logprobs["tokens"][:before]) == PROMPT
        assert got.logprobs["token_logprobs"][0] is got.logprobs["top_logprobs"][0] is None
        assert got.logprobs["tokens"][before:] == expected.logprobs["tokens"]
        moved = [len(PROMPT) + offset for offset in expected.logprobs["text_offset"]]
        assert got.logprobs["text_offset"][before:] == moved


def keeps_logprobs(ask: Ask, request: Request) -> None:
    """Assert that tokens join to the text, offsets index it, and the text does not change.

    The text omits an end token, which the logprobs include.
    """
    answer = ask(request)
    assert answer.texts == ask(without(request, "logprobs")).texts
    for choice in answer.choices:
        assert choice.logprobs is not None
        tokens, scores, tops, offsets = (choice.logprobs[name] for name in COLUMNS)
        prompt = len(choice.prompt_token_ids) if request.get("echo") else 0
        lengths = {len(tokens), len(scores), len(tops), len(offsets)}
        assert lengths == {prompt + len(choice.token_ids)}
        has_end = offsets[-1:] == [len(choice.text)] and tokens[-1].startswith("<|")
        assert choice.finish_reason == "stop" or not has_end
        assert "".join(tokens[:-1] if has_end else tokens) == choice.text
        assert offsets == [0, *accumulate(map(len, tokens))][:-1]
        for token, score, top in list(zip(tokens, scores, tops, strict=True))[bool(prompt) :]:
            assert score <= 0
            assert 1 <= len(top) <= request["logprobs"] + 1
            # A stop string may cut the token. Of tokens with equal texts, top has the larger score.
            assert token == "" or top.get(token, 0) >= score


def keeps_n(ask: Ask, request: Request) -> None:
    """Assert that there are n choices, of which the first is the answer to n = 1."""
    answer = ask(request)
    assert len(answer.choices) == request["n"]
    alone = ask(without(request, "n"))
    assert answer.choices[0].text == alone.texts[0]
    assert answer.usage["prompt_tokens"] == alone.usage["prompt_tokens"]
    if "stop" not in request:
        assert len(set(answer.texts)) > 1


def keeps_best_of(ask: Ask, request: Request) -> None:
    """Assert that the choices are the n best of best_of by mean logprob, the best one first.

    The usage counts the tokens of all best_of sequences.
    """
    n = request.get("n", 1)
    drawn = ask({"logprobs": 0} | without(request, "best_of") | {"n": request["best_of"]})
    ranked = sorted(drawn.choices, key=lambda choice: -fmean(choice.generated_logprobs))
    answer = ask(request)
    assert answer.texts == [choice.text for choice in ranked[:n]]
    assert answer.ids == [choice.token_ids for choice in ranked[:n]]
    assert answer.usage["completion_tokens"] == drawn.usage["completion_tokens"]
    assert all(
        (choice.logprobs is not None) == ("logprobs" in request) for choice in answer.choices
    )


def keeps_suffix(ask: Ask, request: Request) -> None:
    """Assert that the prompt is the infill of prefix and suffix, and the text the middle alone."""
    marked = f"<|fim_prefix|>{PROMPT}<|fim_suffix|>{SUFFIX}<|fim_middle|>"
    ends = tokens_of(ask, "<|fim_pad|><|repo_name|><|file_sep|>")
    answer = ask(request)
    same = ask(without(request, "suffix") | {"prompt": marked, "stop_token_ids": ends})
    assert answer.texts == same.texts
    assert answer.choices[0].prompt_token_ids == same.choices[0].prompt_token_ids
    assert answer.usage["completion_tokens"] == same.usage["completion_tokens"]


def keeps_ids(ask: Ask, request: Request) -> None:
    """Assert that a prompt of ids is answered like its text."""
    answer, of_text = ask(request), ask(request | {"prompt": PROMPT})
    assert answer.texts == of_text.texts
    assert answer.ids == of_text.ids
    assert answer.usage["prompt_tokens"] == of_text.usage["prompt_tokens"]
    if "suffix" not in request:
        assert answer.choices[0].prompt_token_ids == request["prompt"]


def keeps_stream(ask: Ask, request: Request) -> None:
    """Assert that the joined chunks equal the whole answer."""
    streamed, whole = ask(request), ask(without(request, "stream"))
    assert streamed.usage["completion_tokens"] == whole.usage["completion_tokens"]
    for got, expected in zip(streamed.choices, whole.choices, strict=True):
        assert (got.text, got.token_ids) == (expected.text, expected.token_ids)
        assert got.prompt_token_ids == expected.prompt_token_ids
        assert (got.finish_reason, got.stop_reason) == (
            expected.finish_reason,
            expected.stop_reason,
        )
        if expected.logprobs is not None:
            assert got.logprobs is not None
            assert got.logprobs["tokens"] == expected.logprobs["tokens"]
            assert got.logprobs["text_offset"] == expected.logprobs["text_offset"]


def keeps_stop(ask: Ask, request: Request) -> None:
    """Assert that the text, the ids and the usage end at the first match."""
    stop = request["stop"]
    answer = ask(request)
    for choice in answer.choices:
        assert stop not in choice.text[echoed(request) :]
    if "best_of" in request:  # The ranking depends on the lengths, so the choices may differ.
        return
    free = ask(without(request, "stop"))
    assert any(choice.stop_reason == stop for choice in answer.choices)
    for got, full in zip(answer.choices, free.choices, strict=True):
        generated = full.text[echoed(request) :]
        cut = generated.partition(stop)[0]
        assert got.text[echoed(request) :] == cut
        assert got.token_ids == full.token_ids[: len(got.token_ids)]
        if stop in generated:
            assert (got.finish_reason, got.stop_reason) == ("stop", stop)
    assert answer.usage["completion_tokens"] >= sum(map(len, answer.ids))
    assert answer.usage["completion_tokens"] < free.usage["completion_tokens"]


def keeps_grammar(ask: Ask, request: Request) -> None:
    """Assert that choices have the pattern's characters, and match it unless they were cut."""
    for choice in ask(request).choices:
        text = choice.text[echoed(request) :]
        assert re.fullmatch("[a-e ]*", text)
        if choice.finish_reason == "stop" and choice.stop_reason is None:
            assert re.fullmatch(PATTERN, text)


def tokens_of(ask: Ask, text: str) -> list[int]:
    scored = {"prompt": text, "echo": True, "max_tokens": 0, "return_token_ids": True}
    return ask(scored).choices[0].prompt_token_ids


PROMISES: Mapping[str, Callable[[Ask, Request], None]] = {
    "echo": keeps_echo,
    "logprobs": keeps_logprobs,
    "n": keeps_n,
    "best_of": keeps_best_of,
    "suffix": keeps_suffix,
    "ids": keeps_ids,
    "stream": keeps_stream,
    "stop": keeps_stop,
    "grammar": keeps_grammar,
}
REFUSED = {("echo", "suffix"): "echo", ("best_of", "stream"): "best_of"}
PAIRS = [*combinations_with_replacement(PROMISES, 2)]


def request_of(pair: tuple[str, str], prompt_ids: list[int]) -> Request:
    fields: Mapping[str, Request] = {
        "echo": {"echo": True},
        "logprobs": {"logprobs": 3},
        "n": {"n": 3},
        "best_of": {"best_of": 4},
        "suffix": {"suffix": SUFFIX},
        "ids": {"prompt": prompt_ids},
        "stream": {"stream": True},
        "stop": {},  # The test takes the stop string from the output without it.
        "grammar": {"grammar": {"type": "regex", "value": PATTERN}},
    }
    request = BASE | fields[pair[0]] | fields[pair[1]]
    # A grammar decides where the output ends, so the server refuses ignore_eos beside it.
    return without(request, "ignore_eos") if "grammar" in pair else request


@pytest.mark.parametrize("pair", [pair for pair in PAIRS if pair not in REFUSED], ids="-".join)
def test_both_fields_of_a_pair_have_their_effect(
    ask: Ask, prompt_ids: list[int], pair: tuple[str, str]
) -> None:
    request = request_of(pair, prompt_ids)
    if "stop" in pair:
        request["stop"] = ask(without(request, "echo", "stream")).texts[0][3:5]
    for name in dict.fromkeys(pair):
        PROMISES[name](ask, request)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("pair", REFUSED, ids="-".join)
def test_contradictory_pairs_are_refused(
    http: httpx.Client, prompt_ids: list[int], pair: tuple[str, str], stream: bool
) -> None:
    body = request_of(pair, prompt_ids)
    if stream:
        body["stream"] = True
    response = http.post("/v1/completions", json=body)
    assert response.status_code == 400
    assert response.json()["error"]["param"] == REFUSED[pair]
