"""Rate limits of keys, with simulated time."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.common.accounts.account import (
    Account,
    Bucket,
    cap_output,
    estimated_tokens,
    sequence_count,
)
from services.common.accounts.key_file import Tier
from services.http_shim.errors import http_status
from tokenwire.errors import ServiceError
from tokenwire.pb.completion.v1 import completion_pb2
from tokenwire.pb.types.v1 import types_pb2


def account(**limits: Any) -> Account:
    return Account("12345678", "alice", Tier(**limits), now=0.0)


def refusal(call: object, *arguments: object) -> ServiceError:
    assert callable(call)
    with pytest.raises(ServiceError) as caught:
        call(*arguments)
    return caught.value


def test_request_limit_refills_evenly() -> None:
    key = account(requests_per_minute=6)
    for _ in range(6):
        key.count_request(0.0)
    error = refusal(key.count_request, 0.0)
    assert http_status(error.code) == 429
    assert error.retry_seconds == pytest.approx(10)
    refusal(key.count_request, 9.9)
    key.count_request(10.0)
    refusal(key.count_request, 10.0)


def test_reserved_tokens_are_replaced_by_used_tokens() -> None:
    key = account(tokens_per_minute=100)
    key.begin(80, 0.0)
    assert refusal(key.begin, 30, 0.0).retry_seconds == pytest.approx(6)
    key.end(80, used_tokens=20, now=0.0)
    key.begin(80, 0.0)
    key.end(80, used_tokens=140, now=0.0)  # use beyond the reservation becomes a debt
    assert key.headers(0.0)["x-ratelimit-remaining-tokens"] == "0"
    assert refusal(key.begin, 10, 0.0).retry_seconds == pytest.approx(42)


def test_request_over_the_limit_reserves_a_whole_minute() -> None:
    """Otherwise it could never pass, whatever its Retry-After says."""
    key = account(tokens_per_minute=100)
    assert key.begin(5000, 0.0) == 100
    assert refusal(key.begin, 1, 0.0).retry_seconds == pytest.approx(0.6), (
        "the reservation must leave no debt"
    )
    key.end(100, used_tokens=100, now=0.0)
    assert refusal(key.begin, 5000, 0.0).retry_seconds == pytest.approx(60)
    assert key.begin(5000, 60.0) == 100
    key.end(100, used_tokens=10, now=60.0)
    assert key.headers(60.0)["x-ratelimit-remaining-tokens"] == "90"


def test_reservation_is_settled_after_a_change_of_tier() -> None:
    key = account(tokens_per_minute=100)
    reserved = key.begin(5000, 0.0)
    key.set_tier(Tier(tokens_per_minute=1000), 0.0)
    key.end(reserved, used_tokens=50, now=0.0)
    assert key.headers(0.0)["x-ratelimit-remaining-tokens"] == "950"
    unlimited = account()
    reserved = unlimited.begin(5000, 0.0)
    unlimited.set_tier(Tier(tokens_per_minute=100), 0.0)
    unlimited.end(reserved, used_tokens=40, now=0.0)
    assert unlimited.headers(0.0)["x-ratelimit-remaining-tokens"] == "60"


def test_concurrent_requests_are_limited() -> None:
    key = account(concurrent_streams=2)
    key.begin(1, 0.0)
    key.begin(1, 0.0)
    assert refusal(key.begin, 1, 0.0).retry_seconds == 1
    key.end(1, 1, 0.0)
    key.begin(1, 0.0)


def test_each_choice_counts_as_a_stream() -> None:
    """Otherwise two requests of 128 choices could fill the engine."""
    key = account(concurrent_streams=4)
    key.begin(1, 0.0, choices=3)
    refusal(key.begin, 1, 0.0, 2)
    key.begin(1, 0.0)
    key.end(1, 1, 0.0, choices=3)
    key.begin(1, 0.0, choices=3)
    prompt = completion_pb2.Prompt(text="a")
    best_of = completion_pb2.GenerateRequest(
        best_of=5, n=2, prompts=completion_pb2.Prompts(items=[prompt] * 3)
    )
    assert sequence_count(best_of) == 15
    chat = completion_pb2.GenerateRequest(n=7, conversation=completion_pb2.Conversation())
    assert sequence_count(chat) == 7


def test_refused_request_costs_nothing() -> None:
    key = account(tokens_per_minute=10, concurrent_streams=1)
    key.begin(5, 0.0)
    for _ in range(5):
        refusal(key.begin, 5, 0.0)
    key.end(5, 5, 0.0)
    key.begin(5, 0.0)
    refusal(key.begin, 5, 0.0)
    assert key.streams == 1


def test_headers_follow_openai() -> None:
    key = account(requests_per_minute=60, tokens_per_minute=600)
    key.count_request(0.0)
    key.begin(465, 0.0)
    assert key.headers(0.0) == {
        "x-ratelimit-limit-requests": "60",
        "x-ratelimit-remaining-requests": "59",
        "x-ratelimit-reset-requests": "1s",
        "x-ratelimit-limit-tokens": "600",
        "x-ratelimit-remaining-tokens": "135",
        "x-ratelimit-reset-tokens": "46.5s",
    }
    assert key.headers(0.98)["x-ratelimit-reset-requests"] == "20ms"
    key.end(465, 6000, 1.0)
    assert key.headers(1.0)["x-ratelimit-reset-tokens"] == "9m59s"
    assert account().headers(0.0) == {}


def test_new_tier_keeps_the_usage() -> None:
    key = account(requests_per_minute=10)
    for _ in range(10):
        key.count_request(0.0)
    key.set_tier(Tier(requests_per_minute=12), 0.0)
    assert key.headers(0.0)["x-ratelimit-remaining-requests"] == "2"
    key.set_tier(Tier(), 0.0)
    key.count_request(0.0)


def test_model_outside_the_tier_is_forbidden() -> None:
    key = Account("12345678", "", Tier(models=("a",)), 0.0)
    key.require_model("a")
    assert http_status(refusal(key.require_model, "b").code) == 403


@given(
    per_minute=st.integers(1, 1000),
    asks=st.lists(st.tuples(st.integers(1, 2000), st.floats(0, 30)), max_size=50),
)
def test_bucket_never_exceeds_its_rate(per_minute: int, asks: list[tuple[int, float]]) -> None:
    """In any time, at most a full bucket and its refill pass."""
    bucket, now, taken = Bucket(per_minute, 0.0), 0.0, 0.0
    for amount, pause in asks:
        now += pause
        wait = bucket.wait(amount, now)
        if wait == 0:
            bucket.take(min(amount, per_minute), now)
            taken += min(amount, per_minute)
        else:
            assert bucket.wait(amount, now + wait) == pytest.approx(0, abs=1e-6)
        assert taken <= per_minute * (1 + now / 60) + 1e-3
        assert bucket.left(now) <= per_minute


def test_estimate_counts_prompts_and_output_of_all_choices() -> None:
    def tokens(*items: completion_pb2.Prompt, **fields: Any) -> int:
        of_prompts = {name: fields.pop(name) for name in ("suffix", "images") if name in fields}
        prompts = completion_pb2.Prompts(items=items, **of_prompts)
        return estimated_tokens(completion_pb2.GenerateRequest(prompts=prompts, **fields))

    text = completion_pb2.Prompt(text="é" * 10)  # 20 bytes
    ids = completion_pb2.Prompt(token_ids=types_pb2.TokenIds(ids=[1] * 7))
    hundred = types_pb2.StoppingParams(max_tokens=100)
    assert tokens(text) == 5 + 16
    assert tokens(ids, stopping=hundred) == 107
    assert tokens(text, ids, stopping=hundred, n=3) == 12 + 600
    assert tokens(ids, stopping=hundred, n=2, best_of=5) == 507
    assert tokens(text, suffix="four", stopping=hundred) == 106
    assert tokens(ids, stopping=types_pb2.StoppingParams(max_tokens=0)) == 7
    assert tokens(ids, images=[b"", b""], stopping=hundred) == 107 + 2 * 1_024


def test_estimate_of_a_chat_counts_messages_tools_and_output() -> None:
    """A choice without max_tokens counts as 1,024 tokens."""

    def tokens(message: completion_pb2.Message, **fields: Any) -> int:
        conversation = completion_pb2.Conversation(messages=[message])
        return estimated_tokens(completion_pb2.GenerateRequest(conversation=conversation, **fields))

    part = completion_pb2.ContentPart(text="x" * 4000)
    message = completion_pb2.Message(role=completion_pb2.ROLE_USER, parts=[part])
    tool = completion_pb2.Tool(name="f", description="x" * 4000)
    ten = types_pb2.StoppingParams(max_tokens=10)
    assert 1010 <= tokens(message, stopping=ten) <= 1020
    assert 2030 <= tokens(message, tools=[tool], stopping=ten, n=3) <= 2050
    assert tokens(message, n=2) == tokens(message, stopping=ten) + 2038
    image = completion_pb2.ContentPart(image=b"")
    picture = completion_pb2.Message(role=completion_pb2.ROLE_USER, parts=[image, part])
    more = tokens(picture, n=2) - tokens(message, n=2)
    assert 1_024 <= more <= 1_030


@pytest.mark.parametrize(
    ("asked", "limits", "lowered"),
    [
        ({"max_tokens": 100}, [50, 20, None], {"max_tokens": 20}),
        ({"max_tokens": 10}, [50, 20], {"max_tokens": 10}),
        ({"max_tokens": 0}, [50], {"max_tokens": 0}),
        ({}, [50], {}),
        ({}, [5], {"max_tokens": 5}),
        ({}, [None], {}),
        ({"max_tokens": 100, "min_tokens": 60}, [50], {"max_tokens": 50, "min_tokens": 50}),
        ({"max_tokens": 100, "min_tokens": 101}, [50], {"max_tokens": 50, "min_tokens": 101}),
    ],
)
def test_output_is_capped(
    asked: dict[str, Any], limits: list[int | None], lowered: dict[str, Any]
) -> None:
    request = completion_pb2.GenerateRequest(stopping=types_pb2.StoppingParams(**asked))
    cap_output(request, limits)
    assert request.stopping == types_pb2.StoppingParams(**lowered)


@pytest.mark.parametrize(
    ("asked", "limits", "lowered"),
    [
        ({}, [None], {}),
        ({}, [50, 20], {"max_tokens": 20}),
        ({"min_tokens": 30}, [20], {"max_tokens": 20, "min_tokens": 20}),
        ({"max_tokens": 10}, [20], {"max_tokens": 10}),
    ],
)
def test_output_of_a_chat_without_max_tokens_is_capped(
    asked: dict[str, Any], limits: list[int | None], lowered: dict[str, Any]
) -> None:
    request = completion_pb2.GenerateRequest(
        conversation=completion_pb2.Conversation(),
        stopping=types_pb2.StoppingParams(**asked),
    )
    cap_output(request, limits)
    assert request.stopping == types_pb2.StoppingParams(**lowered)
