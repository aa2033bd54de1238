"""Every field of a completion through OpenAI's SDKs for Python and Node.js."""

import inspect
import json
import re
from collections.abc import Mapping

import openai
import pytest
from openai import OpenAI
from openai.resources import Completions

from services.http_shim.dialects.completions.types import CompletionBody
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

BASE: Fields = {"model": "default", "prompt": "def add(a, b):", "max_tokens": 6, "seed": 7}
TOOL = {
    "type": "function",
    "function": {"name": "add", "strict": True, "parameters": SCHEMA},
}
LONG = {"max_tokens": 40}


def is_json(answer: Answer) -> bool:
    return isinstance(json.loads(first(answer)["text"]), dict)


ENDS_SOON: Fields = {
    "max_tokens": 6, "allowed_token_ids": [300, int(NEWLINE)], "stop_token_ids": [int(NEWLINE)],
    "ignore_eos": True, "logit_bias": {NEWLINE: 5},
}  # fmt: skip
"""Any number of one token, and then a stop token, which is the more likely one"""
CALLS: Mapping[str, Call] = {
    **SHARED_CALLS,
    "prompt": ({"prompt": ["a", "b"]}, lambda answer: len(answer["choices"]) == 2),
    "suffix": ({"suffix": "\n    return c\n"}, has_output),
    "stop": (
        {"stop": ["zz", "\n"], "logit_bias": {NEWLINE: 100}},
        lambda answer: (first(answer)["text"], first(answer)["stop_reason"]) == ("", "\n"),
    ),
    "include_stop_str_in_output": (
        {"stop": "\n", "logit_bias": {NEWLINE: 100}, "include_stop_str_in_output": True},
        lambda answer: first(answer)["text"] == "\n",
    ),
    "best_of": (
        {"best_of": 3, "n": 2} | ENDLESS,
        lambda answer: len(answer["choices"]) == 2 and answer["usage"]["completion_tokens"] == 18,
    ),
    "use_beam_search": (
        {"use_beam_search": True, "best_of": 4, "n": 2} | ENDLESS,
        lambda answer: (
            len({choice["text"] for choice in answer["choices"]}) == 2
            and answer["usage"]["completion_tokens"] == 24
        ),
    ),
    "length_penalty": (  # the shortest choice wins
        {"use_beam_search": True, "n": 2, "length_penalty": -10} | ENDS_SOON,
        lambda answer: first(answer)["text"] == "",
    ),
    "early_stopping": (  # the choices of one and two tokens are the first ones
        {"use_beam_search": True, "n": 2, "length_penalty": 10, "early_stopping": True} | ENDS_SOON,
        lambda answer: answer["usage"]["completion_tokens"] <= 4,
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
    "prompt_logprobs": (
        {"prompt_logprobs": 1},
        lambda answer: (
            len(first(answer)["prompt_logprobs"]) == answer["usage"]["prompt_tokens"]
            and first(answer)["prompt_logprobs"][0] is None
            and all(1 <= len(row) <= 2 for row in first(answer)["prompt_logprobs"][1:])
        ),
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
    "images": ({"images": []}, has_output),
    "return_tokens_as_token_ids": (
        {"return_tokens_as_token_ids": True, "logprobs": 0},
        lambda answer: first(answer)["logprobs"]["tokens"][0].startswith("token_id:"),
    ),
}  # fmt: skip
BAD: Mapping[str, Fields] = {
    **SHARED_BAD,
    "best_of": {"best_of": 2, "n": 3},
    "use_beam_search": {"use_beam_search": "x"},
    "length_penalty": {"use_beam_search": True, "length_penalty": 11},
    "early_stopping": {"use_beam_search": True, "early_stopping": "always"},
    "echo": {"echo": "x"},
    "logprobs": {"logprobs": 6},
    "tools": {"tools": 5},
    "tool_choice": {"tool_choice": "required"},
    "images": {"images": ["data:,"]},
}


def joined(chunks: list[Answer]) -> Answer:
    """Return the whole answer of a stream with one choice."""
    choices = [choice for chunk in chunks for choice in chunk["choices"]]
    usage = next(chunk["usage"] for chunk in reversed(chunks) if chunk.get("usage"))
    whole = choices[-1] | {"text": "".join(choice["text"] for choice in choices)}
    return chunks[0] | {"choices": [whole], "usage": usage}


def field_of(param: str) -> str:
    """Return the field that a path is in: "images" of "images[0]"."""
    return re.split(r"[.\[]", param, maxsplit=1)[0]


def test_every_completion_field_is_tested() -> None:
    assert set(CALLS) == set(CompletionBody.__struct_fields__)
    assert set(inspect.signature(Completions.create).parameters) - OWN_PARAMETERS <= set(CALLS)


@pytest.mark.parametrize("name", CALLS)
def test_python_sdk_gets_an_answer_that_follows_the_field(client: OpenAI, name: str) -> None:
    fields, is_right = CALLS[name]
    answer = create(client.completions.create, BASE | fields, joined)
    assert is_right(answer), answer


@pytest.mark.parametrize("name", BAD)
def test_python_sdk_raises_bad_request_that_names_the_field(client: OpenAI, name: str) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        create(client.completions.create, BASE | BAD[name], joined)
    assert refused.value.param is not None
    assert field_of(refused.value.param) == name


@pytest.fixture(scope="module")
def answers(node: Node) -> dict[str, Answer]:
    """Answers to all calls through Node.js, by name."""
    calls = {name: BASE | fields for name, (fields, _) in CALLS.items()}
    return node("completions", calls | {f"bad {name}": BASE | BAD[name] for name in BAD})


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
    param = field_of(error.pop("param"))
    assert (error, param) == ({"class": "BadRequestError", "status": 400}, name)
