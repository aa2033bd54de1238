"""Property tests of gRPC messages with any fields, all on one Session, which none may break.

Each is answered or refused, and harms no other, as in `test_any_request.py`.
"""

import asyncio
import math
from collections import Counter
from collections.abc import AsyncIterator
from typing import Any

import pytest_asyncio
from hypothesis import given, settings
from hypothesis import strategies as st

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
from tests.stack import Stack
from tokenwire.channel import connect
from tokenwire.errors import ServiceError
from tokenwire.pb.completion.v1 import completion_pb2 as completion
from tokenwire.pb.types.v1 import types_pb2 as types
from tokenwire.session import CompletionSession, completion_session

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


CHOICE_IDS = st.lists(st.sampled_from([5, 6, 207]), max_size=3)


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
    "beam_search": optional(length_penalty=SMALL, early_stopping=st.integers(0, 3)),
    "echo": BOOLEAN,
    "prediction": LETTERS,
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
    "resume": optional(
        choices=st.just([{}])
        | st.lists(optional(generated=optional(ids=CHOICE_IDS)), max_size=1)
        | st.just([{"index": 0, "completion_tokens": 2}]),
        scored_prompt_tokens=st.just([1]),
    ),
}  # fmt: skip
NONSENSE: dict[str, Values] = {
    "model": LETTERS,
    "prompts": st.sampled_from([[], [{}], [{"token_ids": {}}], [{"token_ids": {"ids": [2**31]}}]]),
    "sampling": optional(
        temperature=FLOAT, top_p=FLOAT, top_k=COUNT, min_p=FLOAT, repetition_penalty=FLOAT,
        penalty_window=COUNT,
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
    "beam_search": optional(length_penalty=FLOAT, early_stopping=ENUM),
    "logprobs": COUNT,
    "grammar": st.just({}),
    "context_overflow": ENUM,
    "delivery": ENUM,
    "tools": st.lists(optional(name=LETTERS, parameters_json=LETTERS), max_size=2),
    "images": st.lists(st.binary(max_size=8), max_size=1),
    "dry_sequence_breakers": WORDS,
    "no_dry_sequence_breakers": BOOLEAN,
    "truncate_prompt_tokens": st.sampled_from([0, -2, 2_048, 2**31 - 1]),
    "prompt_logprobs": COUNT,
    "bad_words": st.lists(LETTERS, max_size=130),
    "resume": optional(
        choices=st.lists(
            optional(
                index=COUNT,
                generated=optional(ids=st.lists(COUNT, max_size=3)),
                completion_tokens=COUNT,
            ),
            max_size=3,
        ),
        scored_prompt_tokens=st.lists(COUNT, max_size=3),
    ),
}  # fmt: skip


ROLE = st.integers(0, 6)
CALL = optional(id=st.just("c"), name=LETTERS, arguments_json=st.sampled_from(["{}", "", "["]))
SPOKEN = optional(
    role=ROLE, parts=st.lists(optional(text=LETTERS), max_size=2), name=LETTERS,
    tool_calls=st.lists(CALL, max_size=2), tool_call_id=LETTERS, reasoning=LETTERS,
)  # fmt: skip
OF_PROMPTS = {"prompts", "best_of", "truncate_prompt", "beam_search", "suffix", "images"}
IN_PROMPTS = {"suffix", "images"}
IN_CONVERSATION = {*completion.Conversation.DESCRIPTOR.fields_by_name}
NAMES = {*completion.GenerateRequest.DESCRIPTOR.fields_by_name}
CHAT_NAMES = NAMES - OF_PROMPTS - {"conversation"} | IN_CONVERSATION
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
    "drop_oldest_messages": BOOLEAN,
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
    of_conversations = {"conversation", "parallel_tool_calls", "drop_oldest_messages"}
    assert {*SENSE, *NONSENSE} == NAMES - of_conversations | IN_PROMPTS
    assert {*CHAT_SENSE, *CHAT_NONSENSE} == CHAT_NAMES


def nested(fields: dict[str, Any]) -> dict[str, Any]:
    """Return the fields of a request, with those of its input within it."""
    whole = {key: value for key, value in fields.items() if key not in IN_PROMPTS | IN_CONVERSATION}
    if "messages" in fields:
        inner = {key: value for key, value in fields.items() if key in IN_CONVERSATION}
        return whole | {"conversation": inner}
    inner = {key: value for key, value in fields.items() if key in IN_PROMPTS}
    return whole | {"prompts": inner | {"items": fields["prompts"]}}


class Events:
    """Events of one request. Asserts that exactly one of them is the last."""

    def __init__(self) -> None:
        self.open: set[int] = set()
        self.ended: asyncio.Future[ServiceError | None] = asyncio.get_running_loop().create_future()

    def on_event(self, event: completion.SessionEvent) -> None:
        assert not self.ended.done()
        response = event.response
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
    start = completion.SessionStart(request=completion.GenerateRequest(**nested(fields)))
    answered["message"] += await is_completed(neighbour, session, start=start)


HELLO = {"role": completion.ROLE_USER, "parts": [{"text": "Hello"}]}


@settings(max_examples=EXAMPLES)
@given(fields=messages(CHAT_SENSE, CHAT_NONSENSE, {"messages": [HELLO]}))
async def test_any_chat_message_is_answered_or_refused(
    neighbour: Neighbour,
    session: CompletionSession,
    answered: Counter[str],
    fields: dict[str, Any],
) -> None:
    request = completion.GenerateRequest(**nested(fields))
    if not request.stopping.HasField("max_tokens"):
        request.stopping.max_tokens = 12  # The default is the rest of the context.
    start = completion.SessionStart(request=request)
    answered["chat message"] += await is_completed(neighbour, session, start=start)


def test_enough_requests_of_each_kind_are_answered(answered: Counter[str]) -> None:
    """The tests above mean little if the server refuses all."""
    assert_enough_answered(answered)
