"""Property tests of requests with any fields: each is answered or refused, and harms no other.

Hypothesis draws every field, mostly with valid values, so that many requests reach the engine
with many fields. A greedy request with a known answer runs concurrently.
"""

import asyncio
import json
import math
from collections import Counter
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any, TypeAlias

import httpx
import pytest
import pytest_asyncio
from hypothesis import given, settings
from hypothesis import strategies as st

from services.http_shim.formats.request_bodies import ChatBody, CompletionBody
from tests.stack import Stack
from tokenwire.channel import connect
from tokenwire.errors import ServiceError
from tokenwire.pb.completion.v1 import completion_pb2 as completion
from tokenwire.pb.types.v1 import types_pb2 as types
from tokenwire.session import CompletionSession, completion_session

Values: TypeAlias = st.SearchStrategy[Any]

EXAMPLES = 80
HANG_SECONDS = 60
JSON = {"content-type": "application/json"}
TIE = 1e-3  # nats between the two best tokens; below it, rounding may decide
JUNK: Values = st.sampled_from(
    [None, True, -1, 0, 0.5, 1e300, 2**31, 2**32, 2**64, 10**400, "", "x", "\ud800", [], [[]], {},
     [None], {"type": "x"}, {"a": {}}]
)  # fmt: skip
TEXT = st.text(max_size=8) | st.sampled_from(
    ["def f(", "\n", "é😀", "\0", "<|endoftext|>", "<|fim_middle|>", "<image>", "x " * 5_000]
)
IDS = st.lists(st.integers(0, 2_000), min_size=1, max_size=6)
STRINGS = st.sampled_from(["\n", "e", " ", "ab", "def", "😀", "\0"])
BOOLEAN = st.booleans()
SCHEMA = {
    "type": "object",
    "properties": {"a": {"$ref": "#/$defs/A"}, "default": {"type": "integer"}},
    "required": ["a"],
    "$defs": {"A": {"enum": ["x", 1, None]}},
}
SCHEMAS = st.sampled_from(
    [SCHEMA, {}, {"type": "string", "maxLength": 4}, {"not": {}}, {"type": 5}]
)
REGEXES = st.sampled_from(["[a-c]{2,6}", "(yes|no)", ".*", "(a|b)*c", "(", "a{100000}", "\\bx", ""])
LLGUIDANCE: Values = st.sampled_from([{"grammars": []}, {}, ""])
TOOLS = st.lists(
    st.builds(
        lambda name, parameters, strict: {
            "type": "function",
            "function": {"name": name, "parameters": parameters, "strict": strict},
        },
        st.sampled_from(["f", "g", "a b", "h-1"]), SCHEMAS, BOOLEAN,
    ),
    max_size=3,
)  # fmt: skip

GBNF = st.sampled_from(['root ::= "a" root | "b"', "root ::= x", "root ::= (", 'start: "a"'])
TAGS = st.sampled_from([
    {"type": "structural_tag", "structures": structures, "triggers": ["<"]}
    for structures in ([{"begin": "<a>", "schema": {"type": "null"}, "end": ";"}], [])
])  # fmt: skip


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
        ["none", "auto", "required", {"type": "function", "function": {"name": "f"}}]
    ),
    "images": st.lists(st.just("data:image/png;base64,AA=="), max_size=1),
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
}  # fmt: skip


PARTS = st.lists(
    st.one_of(
        st.builds(lambda text: {"type": "text", "text": text}, TEXT),
        st.just({"type": "image_url", "image_url": {"url": "data:,"}}),
    ),
    max_size=2,
)
CALLS = st.lists(
    st.builds(
        lambda name, arguments: {"id": "c", "function": {"name": name, "arguments": arguments}},
        st.sampled_from(["f", "g"]), st.sampled_from(["{}", "", '{"a": "x"}', "[", '"']),
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


@dataclass(frozen=True, slots=True)
class Neighbour:
    """A greedy request with a known answer, which other requests must not change."""

    http: httpx.AsyncClient
    body: dict[str, Any]
    text: str

    async def is_unaffected(self) -> None:
        response = await self.http.post("/v1/completions", json=self.body)
        assert response.status_code == 200, response.text
        assert response.json()["choices"][0]["text"] == self.text


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def neighbour(stack: Stack) -> AsyncIterator[Neighbour]:
    async with httpx.AsyncClient(base_url=stack.url, timeout=HANG_SECONDS) as http:
        body = {"prompt": "class Stack:\n    def push(", "temperature": 0, "max_tokens": 24}
        response = await http.post("/v1/completions", json=body | {"logprobs": 2})
        certain = 0
        for top in response.json()["choices"][0]["logprobs"]["top_logprobs"]:
            scores = sorted(top.values(), reverse=True)
            if len(scores) > 1 and scores[0] - scores[1] < TIE:
                break
            certain += 1
        body["max_tokens"] = max(1, certain)
        response = await http.post("/v1/completions", json=body)
        yield Neighbour(http, body, response.json()["choices"][0]["text"])


def check_http(response: httpx.Response) -> None:
    if response.status_code != 200:
        assert 400 <= response.status_code < 500, response.text
        assert set(response.json()["error"]) == {"message", "type", "param", "code"}
    elif response.headers["content-type"].startswith("text/event-stream"):
        events = [line[6:] for line in response.text.splitlines() if line.startswith("data: ")]
        last = events.pop()
        if last != "[DONE]":  # A grammar and allowed ids may leave no token only after some tokens.
            assert json.loads(last)["error"]["code"] == "nothing_allowed"
            return
        ends = [c["finish_reason"] for e in events for c in json.loads(e)["choices"]]
        assert any(ends)
    else:
        assert all(choice["finish_reason"] for choice in response.json()["choices"])


@pytest.fixture(scope="module")
def answered() -> Counter[str]:
    """Number of requests that were not refused, by kind."""
    return Counter()


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


# Messages over gRPC, all on one Session, which no request may break.

SMALL = st.floats(0, 1, width=32)
FLOAT = st.floats(-3, 3, width=32) | st.sampled_from([math.nan, math.inf, -math.inf])
COUNT = st.sampled_from([0, 1, 2, 5, 129, 2**32 - 1])
FEW = st.sampled_from([1, 4, 12])
LETTERS = st.text(max_size=6)
WORDS = st.lists(st.text(min_size=1, max_size=3), max_size=2)
ENUM = st.integers(-1, 5)
PROMPT = st.one_of(
    st.builds(lambda text: completion.Prompt(text=text), LETTERS),
    st.builds(lambda ids: completion.Prompt(token_ids=types.TokenIds(ids=ids)), IDS),
)


def optional(**fields: Values) -> st.SearchStrategy[dict[str, Any]]:
    return st.fixed_dictionaries({}, optional=fields)


SENSE: dict[str, Values] = {
    "model": st.just("default"),
    "prompts": st.lists(PROMPT, min_size=1, max_size=3),
    "suffix": LETTERS,
    "sampling": optional(
        temperature=SMALL, top_p=SMALL, top_k=FEW, min_p=SMALL, seed=st.integers(-9, 9),
        frequency_penalty=SMALL, presence_penalty=SMALL, logit_bias=st.just({5: 1.5}),
        dry=optional(multiplier=SMALL, allowed_length=COUNT),
        allowed_token_ids=st.just({"ids": [5, 6, 207]}),
        bad_token_ids=st.just([{"ids": [5]}, {"ids": [6, 207]}]),
    ),
    "stopping": optional(max_tokens=FEW, min_tokens=st.just(1), ignore_eos=BOOLEAN),
    "stop": WORDS,
    "include_stop_string": BOOLEAN,
    "n": FEW,
    "best_of": st.just(12),
    "echo": BOOLEAN,
    "logprobs": st.integers(0, 5),
    "grammar": optional(regex=REGEXES)
    | optional(lark=LETTERS)
    | optional(json_schema=LETTERS)
    | optional(gbnf=GBNF),
    "context_overflow": st.integers(0, 2),
    "truncate_prompt": BOOLEAN,
    "delivery": st.integers(0, 2),
    "tools": st.just([{"name": "f", "strict": True}]),
    "tool_choice": optional(mode=ENUM) | optional(name=st.just("f")),
    "user": LETTERS,
    "skip_special_tokens": BOOLEAN,
    "truncate_prompt_tokens": st.sampled_from([-1, 1, 4]),
    "prompt_logprobs": st.integers(0, 5),
    "bad_words": WORDS,
}  # fmt: skip
NONSENSE: dict[str, Values] = {
    "model": LETTERS,
    "prompts": st.sampled_from([[], [{}], [{"token_ids": {}}], [{"token_ids": {"ids": [2**31]}}]]),
    "sampling": optional(
        temperature=FLOAT, top_p=FLOAT, top_k=COUNT, min_p=FLOAT, repetition_penalty=FLOAT,
        frequency_penalty=FLOAT, logit_bias=st.dictionaries(COUNT, FLOAT, max_size=2),
        dry=optional(multiplier=FLOAT, base=FLOAT, breaker_ids=st.lists(COUNT, max_size=1)),
        mirostat=optional(target_perplexity=FLOAT, learning_rate=FLOAT),
        allowed_token_ids=optional(ids=st.lists(COUNT, max_size=2)),
        bad_token_ids=st.lists(optional(ids=st.lists(COUNT, max_size=2)), max_size=2),
    ),
    "stopping": optional(max_tokens=st.just(0), min_tokens=COUNT, stop_token_ids=st.lists(COUNT)),
    "stop": st.lists(LETTERS, max_size=20),
    "n": COUNT,
    "best_of": COUNT,
    "logprobs": COUNT,
    "grammar": st.just({}),
    "context_overflow": ENUM,
    "delivery": ENUM,
    "tools": st.lists(optional(name=LETTERS, parameters_json=LETTERS), max_size=2),
    "images": st.lists(LETTERS, max_size=1),
    "dry_sequence_breakers": WORDS,
    "no_dry_sequence_breakers": BOOLEAN,
    "truncate_prompt_tokens": st.sampled_from([0, -2, 2_048, 2**31 - 1]),
    "prompt_logprobs": COUNT,
    "bad_words": st.lists(LETTERS, max_size=130),
}  # fmt: skip


ROLE = st.integers(0, 6)
CALL = optional(id=st.just("c"), name=LETTERS, arguments_json=st.sampled_from(["{}", "", "["]))
SPOKEN = optional(
    role=ROLE, parts=st.lists(optional(text=LETTERS), max_size=2), name=LETTERS,
    tool_calls=st.lists(CALL, max_size=2), tool_call_id=LETTERS, reasoning=LETTERS,
)  # fmt: skip
CHAT_NAMES = {field.name for field in completion.ChatRequest.DESCRIPTOR.fields}
CHAT_SENSE: dict[str, Values] = {
    name: values for name, values in SENSE.items() if name in CHAT_NAMES
} | {
    "messages": st.lists(
        st.fixed_dictionaries(
            {"role": st.integers(1, 4), "parts": st.lists(optional(text=LETTERS), min_size=1)}
        ),
        min_size=1, max_size=3,
    ),
    "parallel_tool_calls": BOOLEAN,
    "logprobs": st.integers(0, 20),
    "template": st.sampled_from(["", "default"]),
    "template_arguments_json": st.sampled_from(["", "{}", '{"a": 1}']),
    "add_generation_prompt": BOOLEAN,
    "reasoning_effort": st.sampled_from(["", "none", "low", "max"]),
    "echo": BOOLEAN,
}  # fmt: skip
CHAT_NONSENSE: dict[str, Values] = {
    name: values for name, values in NONSENSE.items() if name in CHAT_NAMES
} | {
    "messages": st.lists(SPOKEN, max_size=3),
    "template": LETTERS,
    "template_arguments_json": LETTERS | st.sampled_from(["[" * 5_000, "NaN", '{"messages": 1}']),
    "continue_last_message": BOOLEAN,
    "reasoning_effort": LETTERS,
}


@st.composite
def messages(
    draw: st.DrawFn, sense: dict[str, Values], nonsense: dict[str, Values], base: dict[str, Any]
) -> dict[str, Any]:
    """Draw the required and up to eight further fields, one of which may be nonsense."""
    names = draw(st.lists(st.sampled_from(sorted(sense)), max_size=8, unique=True))
    fields = base | {name: draw(sense[name]) for name in names}
    if draw(st.integers(0, 3)) == 0:
        name = draw(st.sampled_from(sorted(nonsense)))
        fields[name] = draw(nonsense[name])
    return fields


def test_every_field_of_the_messages_is_drawn() -> None:
    names = {field.name for field in completion.CompleteRequest.DESCRIPTOR.fields}
    assert {*SENSE, *NONSENSE} == names
    assert {*CHAT_SENSE, *CHAT_NONSENSE} == CHAT_NAMES


class Events:
    """Events of one request. Asserts that exactly one of them is the last."""

    def __init__(self) -> None:
        self.open: set[int] = set()
        self.ended: asyncio.Future[ServiceError | None] = asyncio.get_running_loop().create_future()

    def on_event(self, event: completion.SessionEvent) -> None:
        assert not self.ended.done()
        response = event.chat if event.HasField("chat") else event.complete
        kind = response.WhichOneof("event")
        if kind == "delta":
            self.open.add(response.delta.index)
        elif kind == "finished":
            self.open.discard(response.finished.index)
        elif kind == "completed":
            self.ended.set_result(None)

    def on_error(self, error: ServiceError) -> None:
        self.ended.set_result(error)


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def session(stack: Stack) -> AsyncIterator[CompletionSession]:
    async with connect(stack.tokenizer) as channel:
        session = completion_session(channel)
        yield session
        await session.close()


async def is_completed(neighbour: Neighbour, session: CompletionSession, **start: Any) -> bool:
    """Return True if a request completes, False if refused; assert that it harms no other."""
    events = Events()
    handle = session.open(events)
    session.send(completion.SessionCommand(handle=handle, **start))
    async with asyncio.timeout(HANG_SECONDS):
        error, _ = await asyncio.gather(events.ended, neighbour.is_unaffected())
    if error is None:
        assert not events.open
        return True
    codes = {"INVALID_ARGUMENT", "NOT_FOUND", "OUT_OF_RANGE", "FAILED_PRECONDITION"}
    assert error.code.name in codes, error
    assert error.reason
    return False


@settings(max_examples=EXAMPLES)
@given(fields=messages(SENSE, NONSENSE, {"prompts": [{"text": "x = "}]}))
async def test_any_completion_message_is_answered_or_refused(
    neighbour: Neighbour,
    session: CompletionSession,
    answered: Counter[str],
    fields: dict[str, Any],
) -> None:
    start = completion.StartComplete(request=completion.CompleteRequest(**fields))
    answered["message"] += await is_completed(neighbour, session, start_complete=start)


HELLO = {"role": completion.ROLE_USER, "parts": [{"text": "Hello"}]}


@settings(max_examples=EXAMPLES)
@given(fields=messages(CHAT_SENSE, CHAT_NONSENSE, {"messages": [HELLO]}))
async def test_any_chat_message_is_answered_or_refused(
    neighbour: Neighbour,
    session: CompletionSession,
    answered: Counter[str],
    fields: dict[str, Any],
) -> None:
    request = completion.ChatRequest(**fields)
    if not request.stopping.HasField("max_tokens"):
        request.stopping.max_tokens = 12  # The default is the rest of the context.
    start = completion.StartChat(request=request)
    answered["chat message"] += await is_completed(neighbour, session, start_chat=start)


def test_enough_requests_of_each_kind_are_answered(answered: Counter[str]) -> None:
    """The tests above mean little if the server refuses all. About a third is answered."""
    if not answered:
        pytest.skip("the tests above were not selected")
    assert min(answered.values()) >= EXAMPLES / 20
