"""Calls through OpenAI's SDKs, and the fields that completions and chat share."""

import inspect
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

__all__ = [
    "ENDLESS",
    "NEWLINE",
    "OWN_PARAMETERS",
    "SCHEMA",
    "SHARED_BAD",
    "SHARED_CALLS",
    "Answer",
    "Call",
    "Fields",
    "Node",
    "create",
    "first",
    "has_output",
    "text_of",
]

Fields: TypeAlias = dict[str, Any]
Answer: TypeAlias = dict[str, Any]
Call: TypeAlias = tuple[Fields, Callable[[Answer], bool]]
"""The fields of a call, and a check that the answer follows them"""
Node: TypeAlias = Callable[[str, Mapping[str, Fields]], dict[str, Answer]]
"""Function from an endpoint ("completions", "chat") and calls by name to answers by name.

An answer is the response, its chunks, or its error.
"""

OWN_PARAMETERS = {"self", "extra_headers", "extra_query", "extra_body", "timeout"}
"""Parameters of the SDK's methods that are not fields of the request"""
NEWLINE = "207"
"""Token id of a newline in the embedded vocabulary"""
FIM_PAD = 4
"""Token id of <|fim_pad|>, a special token, in the embedded vocabulary"""
ENDLESS: Fields = {"ignore_eos": True}
SCHEMA = {"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"]}


def first(answer: Answer) -> Answer:
    """Return the first choice."""
    choice: Answer = answer["choices"][0]
    return choice


def text_of(answer: Answer) -> str:
    """Return the text of the first choice, or its message's content."""
    choice = first(answer)
    text: str = choice["text"] if "text" in choice else choice["message"]["content"]
    return text


def has_output(answer: Answer) -> bool:
    """Return True if the answer has 1 to 6 tokens and the finish reason stop or length."""
    ended = first(answer)["finish_reason"] in ("stop", "length")
    return ended and 1 <= answer["usage"]["completion_tokens"] <= 6


def says_one_or_two(answer: Answer) -> bool:
    """Return True if the answer follows `ONE_OR_TWO` and the equal constraints below."""
    choice = first(answer)
    text = choice["text"] if "text" in choice else choice["message"]["content"]
    return text in ("1", "2")


ONE_OR_TWO = {"enum": [1, 2]}
TAG = {
    "type": "structural_tag",
    "structures": [{"begin": "<a>", "schema": SCHEMA, "end": "</a>"}],
    "triggers": ["<a"],
}
SHARED_CALLS: Mapping[str, Call] = {
    "structured_outputs": ({"structured_outputs": {"json": ONE_OR_TWO}}, says_one_or_two),
    "guided_json": ({"guided_json": ONE_OR_TWO}, says_one_or_two),
    "guided_regex": ({"guided_regex": "[12]"}, says_one_or_two),
    "guided_choice": ({"guided_choice": ["1", "2"]}, says_one_or_two),
    "guided_grammar": ({"guided_grammar": 'root ::= "1" | "2"'}, says_one_or_two),
    "guided_whitespace_pattern": (
        {"guided_json": ONE_OR_TWO, "guided_whitespace_pattern": " ?"}, says_one_or_two
    ),
    "json_schema": ({"json_schema": '{"enum": [1, 2]}'}, says_one_or_two),
    "regex": ({"regex": "[12]"}, says_one_or_two),
    "choice": ({"choice": ["1", "2"]}, says_one_or_two),
    "ebnf": ({"ebnf": "root ::= [12]"}, says_one_or_two),
    "structural_tag": ({"structural_tag": TAG}, has_output),
    "model": ({}, lambda answer: answer["model"] != "default"),
    "max_tokens": (
        {"max_tokens": 3} | ENDLESS, lambda answer: answer["usage"]["completion_tokens"] == 3
    ),
    "max_completion_tokens": (
        {"max_tokens": None, "max_completion_tokens": 3} | ENDLESS,
        lambda answer: answer["usage"]["completion_tokens"] == 3,
    ),
    "min_tokens": ({"min_tokens": 6}, lambda a: a["usage"]["completion_tokens"] == 6),
    "ignore_eos": (ENDLESS, lambda answer: answer["usage"]["completion_tokens"] == 6),
    "stop_token_ids": (
        {"stop_token_ids": [300], "logit_bias": {"300": 100}},
        lambda answer: first(answer)["stop_reason"] == 300,
    ),
    "temperature": ({"temperature": 0}, has_output),
    "top_p": ({"top_p": 0.9}, has_output),
    "top_k": ({"top_k": 40}, has_output),
    "min_p": ({"min_p": 0.1}, has_output),
    "seed": ({"seed": -1}, has_output),
    "frequency_penalty": ({"frequency_penalty": 1.5}, has_output),
    "presence_penalty": ({"presence_penalty": -1.5}, has_output),
    "repetition_penalty": ({"repetition_penalty": 1.2}, has_output),
    "logit_bias": (
        {"logit_bias": {"300": 100}, "return_token_ids": True} | ENDLESS,
        lambda answer: set(first(answer)["token_ids"]) == {300},
    ),
    "dry_multiplier": ({"dry_multiplier": 0.8}, has_output),
    "dry_base": ({"dry_multiplier": 0.8, "dry_base": 2}, has_output),
    "dry_allowed_length": ({"dry_multiplier": 0.8, "dry_allowed_length": 3}, has_output),
    "dry_sequence_breakers": ({"dry_multiplier": 0.8, "dry_sequence_breakers": ["#"]}, has_output),
    "mirostat_target": ({"mirostat_target": 5}, has_output),
    "mirostat_lr": ({"mirostat_lr": 0.2}, has_output),
    "n": ({"n": 3}, lambda answer: [c["index"] for c in answer["choices"]] == [0, 1, 2]),
    "context_length_exceeded_behavior": (
        {"context_length_exceeded_behavior": "error"}, has_output
    ),
    "stream": ({"stream": True, "stream_options": {"include_usage": True}}, has_output),
    "stream_options": ({"stream": True, "stream_options": {"include_usage": True}}, has_output),
    "user": ({"user": "me"}, has_output),
    "skip_special_tokens": (
        {
            "skip_special_tokens": False, "include_stop_str_in_output": True,
            "logit_bias": {str(FIM_PAD): 100}, "stop_token_ids": [FIM_PAD],
        },
        lambda answer: text_of(answer) == "<|fim_pad|>",
    ),
    "spaces_between_special_tokens": ({"spaces_between_special_tokens": False}, has_output),
    "truncate_prompt_tokens": (
        {"truncate_prompt_tokens": 3}, lambda answer: answer["usage"]["prompt_tokens"] == 3
    ),
    "allowed_token_ids": (
        {"allowed_token_ids": [300, 301], "return_token_ids": True} | ENDLESS,
        lambda answer: set(first(answer)["token_ids"]) <= {300, 301},
    ),
    "bad_words": (
        {"bad_words": ["\n"], "logit_bias": {NEWLINE: 100}, "return_token_ids": True} | ENDLESS,
        lambda answer: int(NEWLINE) not in first(answer)["token_ids"],
    ),
    "priority": ({"priority": -3}, has_output),
    "timeout": ({"timeout": 600.5}, has_output),
    "keep_alive": ({"keep_alive": "5m"}, has_output),
    "return_token_ids": (
        {"return_token_ids": True}, lambda answer: bool(first(answer)["prompt_token_ids"])
    ),
}  # fmt: skip
SHARED_BAD: Mapping[str, Fields] = {
    "max_tokens": {"max_tokens": -1},
    "max_completion_tokens": {"max_completion_tokens": "x"},
    "min_tokens": {"min_tokens": 7},
    "ignore_eos": {"ignore_eos": 1},
    "stop": {"stop": [""]},
    "stop_token_ids": {"stop_token_ids": [10**9]},
    "include_stop_str_in_output": {"include_stop_str_in_output": "x"},
    "temperature": {"temperature": 9},
    "top_p": {"top_p": 1.1},
    "top_k": {"top_k": 129},
    "min_p": {"min_p": 1.1},
    "seed": {"seed": 2**63},
    "frequency_penalty": {"frequency_penalty": 2.1},
    "presence_penalty": {"presence_penalty": -2.1},
    "repetition_penalty": {"repetition_penalty": 2.1},
    "logit_bias": {"logit_bias": {"300": 101}},
    "dry_multiplier": {"dry_multiplier": -1},
    "dry_base": {"dry_multiplier": 0.8, "dry_base": 0.9},
    "dry_allowed_length": {"dry_multiplier": 0.8, "dry_allowed_length": -1},
    "dry_sequence_breakers": {"dry_multiplier": 0.8, "dry_sequence_breakers": [""]},
    "mirostat_target": {"mirostat_target": -1},
    "mirostat_lr": {"mirostat_target": 5, "mirostat_lr": -1},
    "n": {"n": 129},
    "grammar": {"grammar": {"type": "regex", "value": "("}},
    "skip_special_tokens": {"skip_special_tokens": 1},
    "spaces_between_special_tokens": {"spaces_between_special_tokens": "x"},
    "truncate_prompt_tokens": {"truncate_prompt_tokens": 0},
    "prompt_logprobs": {"prompt_logprobs": 21},
    "allowed_token_ids": {"allowed_token_ids": []},
    "bad_words": {"bad_words": [""]},
    "priority": {"priority": 2**31},
    "keep_alive": {"keep_alive": "soon"},
    "timeout": {"timeout": 0},
    "guided_json": {"guided_json": {"type": "x"}},
    "guided_regex": {"guided_regex": "("},
    "guided_choice": {"guided_choice": []},
    "guided_grammar": {"guided_grammar": "root ::= x"},
    "guided_whitespace_pattern": {"guided_json": {}, "guided_whitespace_pattern": "x"},
    "json_schema": {"json_schema": "{"},
    "regex": {"regex": "("},
    "choice": {"choice": [""]},
    "ebnf": {"ebnf": "start: x"},
    "structural_tag": {"structural_tag": TAG | {"triggers": ["b"]}},
}
"""Values out of range, by the field that the refusal must name"""


def create(
    method: Callable[..., Any], fields: Fields, joined: Callable[[list[Answer]], Answer]
) -> Answer:
    """Call an SDK's method. Return its answer, or the chunks of its stream after `joined`."""
    known = inspect.signature(method).parameters.keys() - OWN_PARAMETERS
    named = {name: value for name, value in fields.items() if name in known}
    extra = {name: value for name, value in fields.items() if name not in known}
    answer = method(**named, extra_body=extra)
    if fields.get("stream"):
        return joined([chunk.to_dict() for chunk in answer])
    whole: Answer = answer.to_dict()
    return whole
