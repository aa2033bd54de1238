"""Property tests of HTTP requests with any fields: each is answered or refused, and harms no other.

Hypothesis draws every field, mostly with valid values, so that many requests reach the engine
with many fields. A greedy request with a known answer runs concurrently.
"""

import asyncio
import json
from collections import Counter
from typing import Any

import httpx
from hypothesis import given, settings
from hypothesis import strategies as st

from services.http_shim.dialects.chat.types import ChatBody
from services.http_shim.dialects.completions.types import CompletionBody
from tests.conformance.any_request import (
    BOOLEAN,
    EXAMPLES,
    GBNF,
    HANG_SECONDS,
    IDS,
    REGEXES,
    Neighbour,
    Values,
    assert_enough_answered,
)

JSON = {"content-type": "application/json"}
JUNK: Values = st.sampled_from(
    [None, True, -1, 0, 0.5, 1e300, 2**31, 2**32, 2**64, 10**400, "", "x", "\ud800", [], [[]], {},
     [None], {"type": "x"}, {"a": {}}]
)  # fmt: skip
TEXT = st.text(max_size=8) | st.sampled_from(
    ["def f(", "\n", "é😀", "\0", "<|endoftext|>", "<|fim_middle|>", "<image>", "x " * 5_000]
)
STRINGS = st.sampled_from(["\n", "e", " ", "ab", "def", "😀", "\0"])
SCHEMA = {
    "type": "object",
    "properties": {"a": {"$ref": "#/$defs/A"}, "default": {"type": "integer"}},
    "required": ["a"],
    "$defs": {"A": {"enum": ["x", 1, None]}},
}
SCHEMAS = st.sampled_from(
    [SCHEMA, {}, {"type": "string", "maxLength": 4}, {"not": {}}, {"type": 5}]
)
LLGUIDANCE: Values = st.sampled_from([{"grammars": []}, {}, ""])
TOOLS = st.lists(
    st.builds(
        lambda name, parameters, strict: {
            "type": "function",
            "function": {"name": name, "parameters": parameters, "strict": strict},
        },
        st.sampled_from(["f", "g", "a b", "h-1"]), SCHEMAS, BOOLEAN,
    ) | st.builds(
        lambda name, syntax, definition: {
            "type": "custom",
            "custom": {
                "name": name,
                "format": {
                    "type": "grammar", "grammar": {"syntax": syntax, "definition": definition}
                },
            },
        },
        st.sampled_from(["f", "c"]), st.sampled_from(["regex", "lark"]), REGEXES,
    ),
    max_size=3,
)  # fmt: skip
TAGS = st.sampled_from([
    {"type": "structural_tag", "structures": structures, "triggers": ["<"]}
    for structures in ([{"begin": "<a>", "schema": {"type": "null"}, "end": ";"}], [])
])  # fmt: skip

URLS = st.sampled_from(
    ["data:image/png;base64,AA==", "data:,", "", "http://127.0.0.1/a.png", "https://[::1", "😀"]
)


def rarely(values: Values) -> Values:
    """Return a strategy that is null in 3 of 4 cases: a request has at most one constraint."""
    return st.one_of(st.none(), st.none(), st.none(), values)


CONSTRAINTS: dict[str, Values] = {
    "structured_outputs": st.one_of(
        st.builds(lambda schema: {"json": schema}, SCHEMAS),
        st.builds(lambda grammar: {"grammar": grammar}, GBNF),
        st.builds(lambda tag: {"structural_tag": tag}, TAGS | TAGS.map(json.dumps)),
        st.sampled_from([{}, {"json_object": True}, {"choice": ["a"], "regex": "a"}]),
    ),
    "guided_json": SCHEMAS | SCHEMAS.map(json.dumps),
    "guided_regex": REGEXES,
    "guided_choice": st.lists(TEXT, max_size=3),
    "guided_grammar": GBNF,
    "guided_whitespace_pattern": st.sampled_from(["", " ?", r"\s*", "x", "("]),
    "json_schema": SCHEMAS,
    "regex": REGEXES,
    "choice": st.lists(TEXT, max_size=3),
    "ebnf": GBNF,
    "structural_tag": TAGS,
}
FIELDS: dict[str, Values] = {
    **{name: rarely(values) for name, values in CONSTRAINTS.items()},
    "model": st.sampled_from(["default", "", "other", "tokenwire-code-6m"]),
    "prompt": st.one_of(TEXT, st.lists(TEXT, max_size=3), IDS, st.lists(IDS, max_size=3)),
    "suffix": TEXT,
    "max_tokens": st.sampled_from([0, 1, 4, 12]),
    "max_completion_tokens": st.sampled_from([0, 1, 4, 12]),
    "min_tokens": st.integers(0, 14),
    "ignore_eos": BOOLEAN,
    "stop": STRINGS | st.lists(STRINGS, max_size=3) | st.just(["x"] * 17),
    "stop_token_ids": IDS,
    "include_stop_str_in_output": BOOLEAN,
    "temperature": st.floats(0, 2),
    "top_p": st.floats(0, 1),
    "top_k": st.integers(-1, 129),
    "min_p": st.floats(0, 1),
    "seed": st.integers(-(2**63), 2**63 - 1),
    "frequency_penalty": st.floats(-2, 2),
    "presence_penalty": st.floats(-2, 2),
    "repetition_penalty": st.floats(0, 2),
    "logit_bias": st.dictionaries(st.integers(0, 2_000).map(str), st.floats(-100, 100), max_size=3)
    | st.sampled_from([{"9999999": 1}, {"-1": 1}, {"x": 1}, {"5": 101}]),
    "dry_multiplier": st.floats(0, 1e30),
    "dry_base": st.floats(1, 1e30),
    "dry_allowed_length": st.integers(0, 2**32 - 1),
    "dry_sequence_breakers": st.lists(STRINGS, max_size=2),
    "mirostat_target": st.floats(0, 1e3),
    "mirostat_lr": st.floats(0, 10),
    "n": st.sampled_from([0, 1, 2, 5, 129]),
    "best_of": st.sampled_from([0, 1, 2, 5, 129]),
    "use_beam_search": rarely(BOOLEAN),
    "length_penalty": rarely(st.floats(-11, 11)),
    "early_stopping": rarely(st.sampled_from([False, True, "never", "always"])),
    "echo": BOOLEAN,
    "logprobs": st.integers(0, 6),
    "truncate_sequence": BOOLEAN,
    "context_length_exceeded_behavior": st.sampled_from(["truncate", "error"]),
    "response_format": st.one_of(
        st.just({"type": "text"}),
        st.builds(lambda schema: {"type": "json_object", "schema": schema}, SCHEMAS),
        st.builds(lambda s: {"type": "json_schema", "json_schema": {"schema": s}}, SCHEMAS),
    ),
    "grammar": st.one_of(
        st.builds(lambda value: {"type": "regex", "value": value}, REGEXES),
        st.builds(lambda value: {"type": "json_schema", "value": value}, SCHEMAS),
        st.sampled_from([{"type": "lark", "value": v} for v in ('start: "a"+', "start: b", "?")]),
        st.builds(lambda value: {"type": "llguidance", "value": value}, LLGUIDANCE),
    ),
    "tools": TOOLS,
    "tool_choice": st.sampled_from(
        [
            "none", "auto", "required",
            {"type": "function", "function": {"name": "f"}},
            {"type": "custom", "custom": {"name": "c"}},
            {
                "type": "allowed_tools",
                "allowed_tools": {
                    "mode": "required", "tools": [{"type": "function", "function": {"name": "f"}}]
                },
            },
        ]
    ),
    "images": st.lists(URLS, max_size=1),
    "stream": BOOLEAN,
    "stream_options": st.fixed_dictionaries(
        {}, optional={"include_usage": BOOLEAN, "continuous_usage_stats": BOOLEAN}
    ),
    "user": TEXT,
    "return_token_ids": BOOLEAN,
    "return_tokens_as_token_ids": BOOLEAN,
    "skip_special_tokens": BOOLEAN,
    "spaces_between_special_tokens": BOOLEAN,
    "truncate_prompt_tokens": st.sampled_from([-1, 0, 1, 3, 2_047, 2_048]),
    "prompt_logprobs": st.integers(0, 6),
    "allowed_token_ids": IDS | st.just([10**6]),
    "bad_words": st.lists(STRINGS, max_size=3) | st.just(["a"] * 129),
    "priority": st.integers(-3, 3),
    "timeout": st.sampled_from([-1, 0, 3600.5, 10**9]),
    "keep_alive": st.sampled_from(["5m", "1h30m", "-1s", "90", "", "5 years", -1, 0, 0.5]),
}  # fmt: skip


PARTS = st.lists(
    st.one_of(
        st.builds(lambda text: {"type": "text", "text": text}, TEXT),
        st.builds(lambda url: {"type": "image_url", "image_url": {"url": url}}, URLS),
        st.builds(lambda url: {"type": "image_url", "image_url": url}, URLS),
    ),
    max_size=2,
)
CALLS = st.lists(
    st.builds(
        lambda name, arguments: {"id": "c", "function": {"name": name, "arguments": arguments}},
        st.sampled_from(["f", "g"]), st.sampled_from(["{}", "", '{"a": "x"}', "[", '"']),
    ) | st.builds(
        lambda text: {"id": "c", "type": "custom", "custom": {"name": "c", "input": text}}, TEXT
    ),
    min_size=1, max_size=2,
)  # fmt: skip
MESSAGE: Values = st.one_of(
    st.builds(lambda text: {"role": "system", "content": text}, TEXT),
    st.builds(lambda text: {"role": "developer", "content": text, "name": text[:9]}, TEXT),
    st.builds(lambda content: {"role": "user", "content": content}, TEXT | PARTS),
    st.builds(
        lambda text, thought: {"role": "assistant", "content": text, "reasoning_content": thought},
        TEXT, TEXT,
    ),
    st.builds(lambda calls: {"role": "assistant", "content": None, "tool_calls": calls}, CALLS),
    st.builds(lambda text: {"role": "tool", "content": text, "tool_call_id": "c"}, TEXT),
    st.sampled_from([{"role": "user"}, {"role": "robot", "content": "x"}, {"content": "x"}]),
)  # fmt: skip
CHAT_FIELDS: dict[str, Values] = {
    name: values for name, values in FIELDS.items() if name in ChatBody.__struct_fields__
} | {
    "messages": st.lists(MESSAGE, max_size=4),
    "logprobs": BOOLEAN,
    "top_logprobs": st.integers(0, 21),
    "parallel_tool_calls": BOOLEAN,
    "chat_template": st.sampled_from(["default", "", "other"]),
    "chat_template_kwargs": st.sampled_from(
        [{}, {"enable_thinking": False}, {"messages": []}, {"bos_token": 5}, {"a b": 1}]
    ),
    "add_generation_prompt": BOOLEAN,
    "continue_final_message": BOOLEAN,
    "reasoning_effort": st.sampled_from(["none", "low", "high", "", "much"]),
    "truncation": st.sampled_from(["auto", "disabled"]),
    "prediction": st.fixed_dictionaries(
        {"type": st.sampled_from(["content", "text"])},
        optional={"content": st.sampled_from(["", "a = 1", [{"type": "text", "text": "a"}], 5])},
    ),
    "functions": st.sampled_from([None, []]),
    "function_call": st.sampled_from([None, "auto"]),
}  # fmt: skip


@st.composite
def bodies(draw: st.DrawFn, fields: dict[str, Values], base: dict[str, Any]) -> dict[str, Any]:
    """Draw the required and up to ten further fields, one of which may be junk."""
    names = draw(st.lists(st.sampled_from(sorted(fields)), max_size=10, unique=True))
    body = base | {"max_tokens": 8} | {name: draw(fields[name]) for name in names}
    if draw(st.integers(0, 3)) == 0:
        name = draw(st.sampled_from(sorted({*fields, "no_such_field"} - {"max_tokens"})))
        body[name] = draw(JUNK)
    return body


def test_every_field_of_the_bodies_is_drawn() -> None:
    assert set(FIELDS) == set(CompletionBody.__struct_fields__)
    assert set(CHAT_FIELDS) == set(ChatBody.__struct_fields__)


def check_http(response: httpx.Response) -> None:
    if response.status_code != 200:
        assert 400 <= response.status_code < 500, response.text
        assert set(response.json()["error"]) == {"message", "type", "param", "code"}
    elif response.headers["content-type"].startswith("text/event-stream"):
        # not splitlines(): an echoed text may contain U+0085 or U+2028
        events = [line[6:] for line in response.text.split("\n") if line.startswith("data: ")]
        last = events.pop()
        if last != "[DONE]":  # A grammar and allowed ids may leave no token only after some tokens.
            assert json.loads(last)["error"]["code"] == "nothing_allowed"
            return
        ends = [c["finish_reason"] for e in events for c in json.loads(e)["choices"]]
        assert any(ends)
    else:
        assert all(choice["finish_reason"] for choice in response.json()["choices"])


async def is_answered(neighbour: Neighbour, path: str, body: dict[str, Any]) -> bool:
    """Return True if a request is answered, False if refused; assert that it harms no other."""
    content = json.dumps(body).encode()  # httpx's encoder refuses half of a surrogate pair.
    async with asyncio.timeout(HANG_SECONDS):
        response, _ = await asyncio.gather(
            neighbour.http.post(path, content=content, headers=JSON),
            neighbour.is_unaffected(),
        )
    check_http(response)
    return response.status_code == 200


@settings(max_examples=EXAMPLES)
@given(body=bodies(FIELDS, {"prompt": "x = "}))
async def test_any_completion_body_is_answered_or_refused(
    neighbour: Neighbour, answered: Counter[str], body: dict[str, Any]
) -> None:
    answered["body"] += await is_answered(neighbour, "/v1/completions", body)


@settings(max_examples=EXAMPLES)
@given(body=bodies(CHAT_FIELDS, {"messages": [{"role": "user", "content": "Hello"}]}))
async def test_any_chat_body_is_answered_or_refused(
    neighbour: Neighbour, answered: Counter[str], body: dict[str, Any]
) -> None:
    answered["chat"] += await is_answered(neighbour, "/v1/chat/completions", body)


def test_enough_requests_of_each_kind_are_answered(answered: Counter[str]) -> None:
    """The tests above mean little if the server refuses all."""
    assert_enough_answered(answered)
