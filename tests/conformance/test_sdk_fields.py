"""Every field of a completion through OpenAI's SDKs, Python and Node: what they send is understood,
and what they get back is theirs to read."""

import inspect
import json
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

import openai
import pytest
from openai import OpenAI
from openai.resources import Completions

from services.http_shim.requests import CompletionBody
from tests.stack import Stack

Fields: TypeAlias = dict[str, Any]
Answer: TypeAlias = dict[str, Any]
Check: TypeAlias = Callable[[Answer], bool]

BASE: Fields = {"model": "default", "prompt": "def add(a, b):", "max_tokens": 6, "seed": 7}
TOOL = {
    "type": "function",
    "function": {
        "name": "add",
        "strict": True,
        "parameters": {"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"]},
    },
}
SCHEMA = {"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"]}
LONG = {"max_tokens": 40}
ENDLESS = {"ignore_eos": True}


def first(answer: Answer) -> Answer:
    choice: Answer = answer["choices"][0]
    return choice


def has_text(answer: Answer) -> bool:
    return isinstance(first(answer)["text"], str) and answer["usage"]["completion_tokens"] >= 1


def is_json(answer: Answer) -> bool:
    return isinstance(json.loads(first(answer)["text"]), dict)


# the fields that go with each call, and what shows that it was understood
CALLS: Mapping[str, tuple[Fields, Check]] = {
    "model": ({}, lambda answer: answer["model"] != "default"),
    "prompt": ({"prompt": ["a", "b"]}, lambda answer: len(answer["choices"]) == 2),
    "suffix": ({"suffix": "\n    return c\n"}, has_text),
    "max_tokens": (
        {"max_tokens": 3} | ENDLESS, lambda answer: answer["usage"]["completion_tokens"] == 3
    ),
    "max_completion_tokens": (
        {"max_tokens": None, "max_completion_tokens": 3} | ENDLESS,
        lambda answer: answer["usage"]["completion_tokens"] == 3,
    ),
    "min_tokens": ({"min_tokens": 6}, lambda a: a["usage"]["completion_tokens"] == 6),
    "ignore_eos": (ENDLESS, lambda answer: answer["usage"]["completion_tokens"] == 6),
    "stop": ({"stop": ["\n", "x"]}, lambda answer: "\n" not in first(answer)["text"]),
    "stop_token_ids": (
        {"stop_token_ids": [300], "logit_bias": {"300": 100}},
        lambda answer: first(answer)["stop_reason"] == 300,
    ),
    "include_stop_str_in_output": (
        {"stop": "e", "include_stop_str_in_output": True, "logit_bias": {}},
        lambda answer: first(answer)["stop_reason"] is None or first(answer)["text"].endswith("e"),
    ),
    "temperature": ({"temperature": 0}, has_text),
    "top_p": ({"top_p": 0.9}, has_text),
    "top_k": ({"top_k": 40}, has_text),
    "min_p": ({"min_p": 0.1}, has_text),
    "seed": ({"seed": -1}, has_text),
    "frequency_penalty": ({"frequency_penalty": 1.5}, has_text),
    "presence_penalty": ({"presence_penalty": -1.5}, has_text),
    "repetition_penalty": ({"repetition_penalty": 1.2}, has_text),
    "logit_bias": (
        {"logit_bias": {"300": 100}, "return_token_ids": True} | ENDLESS,
        lambda answer: set(first(answer)["token_ids"]) == {300},
    ),
    "dry_multiplier": ({"dry_multiplier": 0.8}, has_text),
    "dry_base": ({"dry_multiplier": 0.8, "dry_base": 2}, has_text),
    "dry_allowed_length": ({"dry_multiplier": 0.8, "dry_allowed_length": 3}, has_text),
    "dry_sequence_breakers": ({"dry_multiplier": 0.8, "dry_sequence_breakers": ["#"]}, has_text),
    "mirostat_target": ({"mirostat_target": 5}, has_text),
    "mirostat_lr": ({"mirostat_lr": 0.2}, has_text),
    "n": ({"n": 3}, lambda answer: [c["index"] for c in answer["choices"]] == [0, 1, 2]),
    "best_of": (
        {"best_of": 3, "n": 2} | ENDLESS,
        lambda answer: len(answer["choices"]) == 2 and answer["usage"]["completion_tokens"] == 18,
    ),
    "echo": ({"echo": True}, lambda answer: first(answer)["text"].startswith(BASE["prompt"])),
    "logprobs": (
        {"logprobs": 2} | ENDLESS,
        lambda answer: (
            len(first(answer)["logprobs"]["token_logprobs"]) == 6
            and len(first(answer)["logprobs"]["top_logprobs"][0]) in (2, 3)
        ),
    ),
    "truncate_sequence": (
        {"prompt": "x " * 5_000, "truncate_sequence": True},
        lambda answer: answer["usage"]["prompt_tokens"] > 1_000,
    ),
    "context_length_exceeded_behavior": (
        {"context_length_exceeded_behavior": "error"}, has_text
    ),
    "response_format": (
        {"response_format": {"type": "json_schema", "json_schema": {"schema": SCHEMA}}} | LONG,
        is_json,
    ),
    "grammar": (
        {"grammar": {"type": "regex", "value": "yes|no"}},
        lambda answer: first(answer)["text"] in ("yes", "no"),
    ),
    "tools": ({"tools": [TOOL]} | LONG, is_json),
    "tool_choice": (
        {"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "add"}}} | LONG,
        is_json,
    ),
    "images": ({"images": []}, has_text),
    "stream": ({"stream": True}, has_text),
    "stream_options": ({"stream": True, "stream_options": {"include_usage": True}}, has_text),
    "user": ({"user": "me"}, has_text),
    "return_token_ids": (
        {"return_token_ids": True}, lambda answer: bool(first(answer)["prompt_token_ids"])
    ),
    "return_tokens_as_token_ids": (
        {"return_tokens_as_token_ids": True, "logprobs": 0},
        lambda answer: first(answer)["logprobs"]["tokens"][0].startswith("token_id:"),
    ),
}  # fmt: skip
BAD: Mapping[str, Fields] = {
    "temperature": {"temperature": 9},
    "best_of": {"best_of": 2, "n": 3},
    "grammar": {"grammar": {"type": "regex", "value": "("}},
    "images": {"images": ["data:,"]},
}


def joined(chunks: list[Answer]) -> Answer:
    """What a stream of one choice comes to."""
    texts = [choice["text"] for chunk in chunks for choice in chunk["choices"]]
    usage = next(chunk["usage"] for chunk in reversed(chunks) if chunk.get("usage"))
    return chunks[0] | {"choices": [{"text": "".join(texts)}], "usage": usage}


def test_every_field_has_a_call() -> None:
    assert set(CALLS) == set(CompletionBody.__struct_fields__)
    own = {"self", "extra_headers", "extra_query", "extra_body", "timeout"}
    assert set(inspect.signature(Completions.create).parameters) - own <= set(CALLS)


@pytest.fixture(scope="module")
def client(stack: Stack) -> OpenAI:
    return OpenAI(base_url=f"{stack.url}/v1", api_key="none", max_retries=0)


def create(client: OpenAI, fields: Fields) -> Answer:
    known = inspect.signature(client.completions.create).parameters
    named = {name: value for name, value in fields.items() if name in known}
    extra = {name: value for name, value in fields.items() if name not in known}
    answer = client.completions.create(**named, extra_body=extra)
    if fields.get("stream"):
        return joined([chunk.to_dict() for chunk in answer])
    whole: Answer = answer.to_dict()
    return whole


@pytest.mark.parametrize("name", CALLS)
def test_python(client: OpenAI, name: str) -> None:
    fields, is_right = CALLS[name]
    answer = create(client, BASE | fields)
    assert is_right(answer), answer


@pytest.mark.parametrize("name", BAD)
def test_python_raises(client: OpenAI, name: str) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        create(client, BASE | BAD[name])
    assert refused.value.param == name


@pytest.fixture(scope="module")
def answers(node: Callable[[str, Mapping[str, Fields]], dict[str, Answer]]) -> dict[str, Answer]:
    """Of all calls through Node.js."""
    calls = {name: BASE | fields for name, (fields, _) in CALLS.items()}
    return node("completions", calls | {f"bad {name}": BASE | BAD[name] for name in BAD})


@pytest.mark.parametrize("name", CALLS)
def test_node(answers: dict[str, Answer], name: str) -> None:
    answer = answers[name]
    assert "error" not in answer, answer
    assert CALLS[name][1](joined(answer["chunks"]) if "chunks" in answer else answer), answer


@pytest.mark.parametrize("name", BAD)
def test_node_raises(answers: dict[str, Answer], name: str) -> None:
    error = answers[f"bad {name}"]["error"]
    assert error == {"class": "BadRequestError", "status": 400, "param": name}
