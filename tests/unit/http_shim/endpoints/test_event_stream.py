"""Streamed completions equal whole ones, in the order that clients rely on."""

import json
from typing import Any

import grpc
from hypothesis import given
from hypothesis import strategies as st

from services.http_shim.backends.output_collector import OutputCollector
from services.http_shim.dialects.choices import AnswerOptions
from services.http_shim.dialects.completions.write import CompletionWriter
from services.http_shim.dialects.generation import StreamOptions
from services.http_shim.endpoints.event_stream import EventStream
from tests.unit.http_shim.synthetic import (
    USAGE,
    delta,
    feed,
    finished,
    stream_of,
)
from tokenwire.errors import ServiceError


def begin(
    options: StreamOptions | None = None, *, n: int = 1, token_ids: bool = False
) -> tuple[OutputCollector, EventStream]:
    wanted = AnswerOptions(choices_per_prompt=n, token_ids=token_ids, stream_options=options)
    return stream_of(CompletionWriter(wanted))


def objects(data: bytes) -> list[Any]:
    """Return the events of a stream; "[DONE]" stays a string."""
    lines = data.decode().split("\n\n")
    assert lines.pop() == ""
    assert all(line.startswith("data: ") for line in lines)
    texts = [line.removeprefix("data: ") for line in lines]
    return [text if text == "[DONE]" else json.loads(text) for text in texts]


@st.composite
def scripts(draw: st.DrawFn) -> tuple[list[list[str]], list[int]]:
    """Texts of each choice's deltas, and the steps at which the stream is read."""
    texts = st.text(max_size=3) | st.just("x" * 200_000)  # longer than one read
    choices = draw(st.lists(st.lists(texts, max_size=5), min_size=1, max_size=4))
    reads = draw(st.lists(st.integers(0, 30), max_size=6))
    return choices, reads


@given(scripts(), st.randoms(use_true_random=False))
async def test_joined_chunks_equal_the_whole(
    script: tuple[list[list[str]], list[int]], random: Any
) -> None:
    """A slow client gets the text of each choice once, and one finish reason."""
    texts, reads = script
    collector, stream = begin(n=len(texts))
    queues = [[*parts, None] for parts in texts]
    data, step = b"", 0
    while any(queues):
        index = random.choice([i for i, queue in enumerate(queues) if queue])
        part = queues[index].pop(0)
        if part is None:
            feed(collector, finished(index, tokens=len(texts[index])))
        else:
            feed(collector, delta(part, [1], index=index))
        if step in reads:
            data += stream.take()
        step += 1
    feed(collector, USAGE)
    data += stream.take()
    while collector.pending:
        data += stream.take()
    events = objects(data + await stream.last())
    assert events.pop() == "[DONE]"
    joined = ["" for _ in texts]
    ended: list[int] = []
    for event in events:
        assert event["object"] == "text_completion"
        (choice,) = event["choices"]
        assert choice["index"] not in ended, "a choice continued after its end"
        joined[choice["index"]] += choice["text"]
        if choice["finish_reason"]:
            ended.append(choice["index"])
    assert joined == ["".join(parts) for parts in texts]
    assert sorted(ended) == list(range(len(texts)))
    assert ["usage" in event for event in events] == [False] * (len(events) - 1) + [True]


def test_pending_deltas_of_a_choice_are_merged() -> None:
    collector, stream = begin(n=2)
    feed(collector, delta("a", [1]), delta("x", [2], index=1), delta("b", [3]))
    texts = [(c["index"], c["text"]) for e in objects(stream.take()) for c in e["choices"]]
    assert texts == [(0, "ab"), (1, "x")]


async def test_last_finish_chunk_waits_for_the_usage() -> None:
    """Without stream_options, this chunk has the usage."""
    collector, stream = begin()
    feed(collector, delta("a", [1]), finished())
    (first,) = objects(stream.take())
    assert first["choices"][0]["finish_reason"] is None
    feed(collector, USAGE)
    last, done = objects(stream.take() + await stream.last())
    assert last["choices"][0]["finish_reason"] == "length"
    assert last["usage"]["total_tokens"] == 5
    assert done == "[DONE]"


async def test_held_finish_chunk_causes_no_empty_one() -> None:
    """A chunk with logprobs or ids is sent even without text, but not for the end alone."""
    for wanted in (AnswerOptions(logprobs=True), AnswerOptions(token_ids=True), AnswerOptions()):
        collector, stream = stream_of(CompletionWriter(wanted))
        feed(collector, delta("a", [1]))
        assert len(objects(stream.take())) == 1
        feed(collector, finished())
        assert stream.take() == b""
        feed(collector, USAGE)
        last, _ = objects(stream.take() + await stream.last())
        assert last["choices"][0]["finish_reason"] == "length"


async def test_include_usage_follows_openai() -> None:
    collector, stream = begin(StreamOptions(include_usage=True))
    feed(collector, delta("a", [1]), finished(), USAGE)
    chunk, last, done = objects(stream.take() + await stream.last())
    assert chunk["usage"] is None
    assert chunk["choices"][0]["finish_reason"] == "length"
    assert last["choices"] == []
    assert last["usage"]["completion_tokens"] == 3
    assert done == "[DONE]"


async def test_include_usage_false_omits_the_usage() -> None:
    collector, stream = begin(StreamOptions(include_usage=False))
    feed(collector, delta("a", [1]), finished(), USAGE)
    chunk, _ = objects(stream.take() + await stream.last())
    assert "usage" not in chunk


async def test_continuous_usage_counts_up() -> None:
    collector, stream = begin(StreamOptions(include_usage=True, continuous_usage_stats=True))
    feed(collector, delta("a", [1]))
    (first,) = objects(stream.take())
    feed(collector, delta("b", [2, 3]), finished(), USAGE)
    second, last, _ = objects(stream.take() + await stream.last())
    totals = [event["usage"]["total_tokens"] for event in (first, second, last)]
    assert totals == [3, 5, 5]


async def test_error_after_the_start_ends_the_stream() -> None:
    collector, stream = begin()
    feed(collector, delta("a", [1]))
    collector.on_error(
        ServiceError(grpc.StatusCode.UNAVAILABLE, "SESSION_LOST", "10.0.0.1 is gone")
    )
    chunk, error = objects(stream.take() + await stream.last())
    assert chunk["choices"][0]["text"] == "a"
    assert error["error"]["code"] == "session_lost"
    assert "10.0.0.1" not in error["error"]["message"]


def test_prompt_ids_come_once_with_the_first_chunk() -> None:
    collector, stream = begin(token_ids=True)
    feed(collector, delta("a", [1]))
    (first,) = objects(stream.take())
    feed(collector, delta("b", [2]))
    (second,) = objects(stream.take())
    assert first["choices"][0]["prompt_token_ids"] == [7, 8]
    assert first["choices"][0]["token_ids"] == [1]
    assert "prompt_token_ids" not in second["choices"][0]


def test_held_back_text_causes_no_empty_chunks() -> None:
    collector, stream = begin()
    feed(collector, delta("", [1]))
    assert stream.take() == b""
