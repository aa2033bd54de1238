"""JSON of chats, whole and streamed, as OpenAI's clients read it."""

import json
import math
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from services.http_shim.backends.output_collector import OutputCollector
from services.http_shim.dialects.chat.read import read_chat
from services.http_shim.dialects.writer import Writer
from services.http_shim.endpoints.event_stream import EventStream
from tests.unit.http_shim.synthetic import (
    USAGE,
    call_delta,
    chat_delta,
    feed,
    finished,
    stream_of,
    whole_of,
)
from tokenwire.pb.completion.v1 import completion_pb2
from tokenwire.pb.types.v1 import types_pb2

STOP = types_pb2.FINISH_REASON_STOP
CALLS = types_pb2.FINISH_REASON_TOOL_CALLS
WEATHER = [
    chat_delta(calls=[call_delta(identity="call_1", name="weather")]),
    chat_delta(calls=[call_delta(arguments='{"city":')]),
    chat_delta(
        calls=[call_delta(arguments='"Rome"}'), call_delta(1, identity="call_2", name="now")]
    ),
    chat_delta(calls=[call_delta(1, arguments="{}")]),
]


def whole(
    *deltas: completion_pb2.ChoiceDelta,
    reason: types_pb2.FinishReason.ValueType = STOP,
    **fields: Any,
) -> Any:
    """Return the choice that the deltas form."""
    [choice] = whole_of(writer(**fields), *deltas, finished(reason=reason))["choices"]
    return choice


def writer(**fields: Any) -> Writer:
    return read_chat({"messages": []} | fields).writer


def begin(**fields: Any) -> tuple[OutputCollector, EventStream]:
    return stream_of(writer(stream=True, **fields))


def objects(data: bytes) -> list[Any]:
    """Return the events of a stream without [DONE]."""
    lines = data.decode().split("\n\n")
    assert lines.pop() == ""
    return [json.loads(line.removeprefix("data: ")) for line in lines if "[DONE]" not in line]


def choices(data: bytes) -> list[Any]:
    return [choice for event in objects(data) for choice in event["choices"]]


def deltas_of(data: bytes) -> list[Any]:
    return [choice["delta"] for choice in choices(data)]


def test_whole_answer_has_all_fields() -> None:
    answer = whole_of(writer(), chat_delta("a"), chat_delta("b"), finished(reason=STOP))
    assert answer.pop("id").startswith("chatcmpl-")
    assert answer.pop("created") > 1_700_000_000
    assert answer == {
        "object": "chat.completion",
        "model": "m",
        "system_fingerprint": "fp",
        "choices": [
            {
                "index": 0,
                "message": {"role": "assistant", "content": "ab", "refusal": None},
                "logprobs": None,
                "finish_reason": "stop",
                "stop_reason": None,
                "matched_stop": None,
            }
        ],
        "usage": {
            "prompt_tokens": 2,
            "completion_tokens": 3,
            "total_tokens": 5,
            "cached_input_tokens": 1,
            "prompt_tokens_details": {"cached_tokens": 1},
        },
    }


def test_whole_message_has_calls_and_reasoning() -> None:
    choice = whole(chat_delta(reasoning="hm"), *WEATHER, reason=CALLS)
    assert choice["finish_reason"] == "tool_calls"
    assert choice["message"] == {
        "role": "assistant",
        "content": None,
        "refusal": None,
        "reasoning": "hm",
        "reasoning_content": "hm",
        "tool_calls": [
            {
                "id": "call_1",
                "type": "function",
                "function": {"name": "weather", "arguments": '{"city":"Rome"}'},
            },
            {"id": "call_2", "type": "function", "function": {"name": "now", "arguments": "{}"}},
        ],
    }


def test_missing_content_is_null() -> None:
    """The chunks of a streamed answer have no content either."""
    assert whole()["message"]["content"] is None
    assert whole(chat_delta(reasoning="hm"))["message"]["content"] is None
    assert whole(chat_delta("so: "), *WEATHER)["message"]["content"] == "so: "


def test_logprobs_have_the_bytes_of_partial_characters() -> None:
    """A token within a character has no text, but its bytes join to the content's."""
    first, second = "é".encode()[:1], "é".encode()[1:]
    delta = chat_delta(
        "é",
        scored=[(1, first, -0.5), (2, second, -math.inf)],
        top=[[(1, first, -0.5), (3, b"a", -1.0)], [(4, b"\n", -0.25), (5, b"", -2.0)]],
    )
    logprobs = whole(delta, logprobs=True, top_logprobs=2)["logprobs"]
    assert logprobs == {
        "content": [
            {
                "token": "\\xc3",
                "logprob": -0.5,
                "bytes": [0xC3],
                "top_logprobs": [
                    {"token": "\\xc3", "logprob": -0.5, "bytes": [0xC3]},
                    {"token": "a", "logprob": -1.0, "bytes": [97]},
                ],
            },
            {
                "token": "\\xa9",
                "logprob": -9999.0,
                "bytes": [0xA9],
                "top_logprobs": [
                    {"token": "\n", "logprob": -0.25, "bytes": [10]},
                    {"token": "", "logprob": -2.0, "bytes": []},
                ],
            },
        ],
        "refusal": None,
    }
    named = whole(delta, logprobs=True, return_tokens_as_token_ids=True)["logprobs"]["content"]
    assert [entry["token"] for entry in named] == ["token_id:1", "token_id:2"]
    assert named[0]["top_logprobs"][1]["token"] == "token_id:3"


def test_logprobs_without_candidates_have_the_token_alone() -> None:
    (entry,) = whole(chat_delta("a", scored=[(1, b"a", -0.5)]), logprobs=True)["logprobs"][
        "content"
    ]
    assert entry["top_logprobs"] == []


def test_whole_choice_has_token_ids_on_request() -> None:
    choice = whole(chat_delta("a", [1]), chat_delta("", [2]), return_token_ids=True)
    assert (choice["prompt_token_ids"], choice["token_ids"]) == ([7, 8], [1, 2])
    assert "token_ids" not in whole(chat_delta("a", [1]))


async def test_stream_begins_with_the_role_and_ends_with_the_finish_reason() -> None:
    collector, stream = begin()
    feed(collector, chat_delta("a", [1]), chat_delta("b", [2]))
    data = stream.take()
    feed(collector, chat_delta("c", [3]), finished(reason=STOP), USAGE)
    data += stream.take() + await stream.last()
    assert data.endswith(b"data: [DONE]\n\n")
    assert {event["object"] for event in objects(data)} == {"chat.completion.chunk"}
    assert deltas_of(data) == [
        {"role": "assistant", "content": ""},
        {"content": "ab"},
        {"content": "c"},
        {},
    ]
    assert [each["finish_reason"] for each in choices(data)] == [None, None, None, "stop"]
    assert ["usage" in event for event in objects(data)] == [False, False, False, True]


def test_streamed_call_has_its_name_once() -> None:
    """The first part has name and id, the others fragments: clients join all strings."""
    collector, stream = begin()
    data = b""
    for delta in WEATHER:
        feed(collector, delta)
        data += stream.take()
    feed(collector, finished(reason=CALLS), USAGE)
    data += stream.take()
    start, *parts, end = deltas_of(data)
    assert start == {"role": "assistant", "content": None}
    assert end == {}
    calls = [call for part in parts for call in part["tool_calls"]]
    assert calls == [
        {
            "index": 0,
            "id": "call_1",
            "type": "function",
            "function": {"name": "weather", "arguments": ""},
        },
        {"index": 0, "function": {"arguments": '{"city":'}},
        {"index": 0, "function": {"arguments": '"Rome"}'}},
        {
            "index": 1,
            "id": "call_2",
            "type": "function",
            "function": {"name": "now", "arguments": ""},
        },
        {"index": 1, "function": {"arguments": "{}"}},
    ]
    assert choices(data)[-1]["finish_reason"] == "tool_calls"


def test_complete_call_is_streamed_in_two_parts() -> None:
    collector, stream = begin()
    whole_call = call_delta(identity="call_1", name="f", arguments='{"a":1}')
    feed(collector, chat_delta(calls=[whole_call]), finished(reason=STOP), USAGE)
    data = stream.take()
    calls = [call for part in deltas_of(data) for call in part.get("tool_calls", ())]
    assert [call["function"]["arguments"] for call in calls] == ["", '{"a":1}']
    assert choices(data)[-1]["finish_reason"] == "stop"


SHELL = {"type": "custom", "custom": {"name": "shell"}}
CUSTOM_CALLS = [
    chat_delta(calls=[call_delta(identity="call_1", name="shell")]),
    chat_delta(calls=[call_delta(arguments='{"inp')]),
    chat_delta(calls=[call_delta(arguments='ut": "ls ')]),
    chat_delta(calls=[call_delta(arguments='\\"a\\""'), call_delta(arguments="}")]),
    chat_delta(calls=[call_delta(1, identity="call_2", name="shell", arguments="pwd")]),
    chat_delta(calls=[call_delta(2, identity="call_3", name="now", arguments="{}")]),
    chat_delta(calls=[call_delta(3, identity="call_4", name="shell", arguments='{"a": 1}')]),
]


def test_call_of_a_custom_tool_has_its_input() -> None:
    """Arguments of another form than the tool's are the input as they are."""
    choice = whole(*CUSTOM_CALLS, reason=CALLS, tools=[SHELL])
    assert choice["message"]["tool_calls"] == [
        {"id": "call_1", "type": "custom", "custom": {"name": "shell", "input": 'ls "a"'}},
        {"id": "call_2", "type": "custom", "custom": {"name": "shell", "input": "pwd"}},
        {"id": "call_3", "type": "function", "function": {"name": "now", "arguments": "{}"}},
        {"id": "call_4", "type": "custom", "custom": {"name": "shell", "input": '{"a": 1}'}},
    ]


def test_input_of_a_custom_tool_is_streamed() -> None:
    """The input of a call is whole before the next call begins."""
    collector, stream = begin(tools=[SHELL], n=2)
    data = b""
    for delta in CUSTOM_CALLS:
        feed(collector, delta)
        data += stream.take()
    feed(collector, finished(reason=CALLS), finished(1, reason=STOP), USAGE)
    data += stream.take()
    first = [choice["delta"] for choice in choices(data) if choice["index"] == 0]
    parts = [call for delta in first for call in delta.get("tool_calls", ())]

    def start(index: int) -> dict[str, Any]:
        named = {"name": "shell", "input": ""}
        return {"index": index, "id": f"call_{index + 1}", "type": "custom", "custom": named}

    assert parts == [
        start(0),
        {"index": 0, "custom": {"input": "ls "}},
        {"index": 0, "custom": {"input": '"a"'}},
        start(1),
        {"index": 1, "custom": {"input": "pwd"}},
        {
            "index": 2,
            "id": "call_3",
            "type": "function",
            "function": {"name": "now", "arguments": ""},
        },
        {"index": 2, "function": {"arguments": "{}"}},
        start(3),
        {"index": 3, "custom": {"input": '{"a": 1}'}},
    ]


def test_held_back_text_causes_no_chunks() -> None:
    collector, stream = begin()
    feed(collector, chat_delta("", [1, 2]))
    assert stream.take() == b""
    assert stream.max_choice_tokens == 2
    feed(collector, chat_delta(reasoning="hm"))
    assert deltas_of(stream.take()) == [
        {"role": "assistant", "content": None},
        {"reasoning": "hm", "reasoning_content": "hm"},
    ]


def test_token_ids_come_with_their_text_or_alone() -> None:
    collector, stream = begin(return_token_ids=True)
    feed(collector, chat_delta("", [1, 2]))
    first, second = choices(stream.take())
    assert first["prompt_token_ids"] == [7, 8]
    assert (second["delta"], second["token_ids"]) == ({}, [1, 2])
    feed(collector, chat_delta("a", [3]))
    (third,) = choices(stream.take())
    assert (third["delta"], third["token_ids"]) == ({"content": "a"}, [3])
    assert "prompt_token_ids" not in third


def test_scores_of_the_content_come_with_it() -> None:
    """A slow client reads reasoning, a call and content at once, each in a chunk."""
    collector, stream = begin(logprobs=True)
    call = call_delta(identity="call_1", name="f")
    feed(
        collector,
        chat_delta(reasoning="hm"),
        chat_delta(calls=[call]),
        chat_delta("a", scored=[(1, b"a", -0.5)]),
    )
    scored = [each["delta"] for each in choices(stream.take()) if each["logprobs"] is not None]
    assert scored == [{"content": "a"}]


def test_prompt_ids_stand_beside_the_choices() -> None:
    """A stream has them once, where vLLM's clients read them."""
    collector, stream = begin(return_token_ids=True, n=2)
    feed(collector, chat_delta("a", [1]), chat_delta("b", [2], index=1))
    first, *others = objects(stream.take())
    assert first["prompt_token_ids"] == [7, 8]
    assert all("prompt_token_ids" not in chunk for chunk in others)
    answer = whole_of(writer(return_token_ids=True), finished())
    assert answer["prompt_token_ids"] == [7, 8]


def test_matched_stop_is_streamed_once() -> None:
    collector, stream = begin()
    match = types_pb2.StopMatch(eos_token_id=2)
    feed(collector, chat_delta("a", [1]), finished(reason=STOP, match=match), USAGE)
    *before, last = choices(stream.take())
    assert (last["stop_reason"], last["matched_stop"]) == (None, 2)
    assert all("matched_stop" not in choice for choice in before)


def test_empty_answer_has_the_role() -> None:
    collector, stream = begin()
    feed(collector, finished(tokens=1, reason=STOP), USAGE)
    assert deltas_of(stream.take()) == [{"role": "assistant", "content": None}, {}]


async def test_stream_options_choose_the_usage_chunks() -> None:
    collector, stream = begin(stream_options={"include_usage": True})
    feed(collector, chat_delta("a", [1]), finished(), USAGE)
    *chunks, last = objects(stream.take() + await stream.last())
    assert all(chunk["usage"] is None for chunk in chunks)
    assert (last["choices"], last["usage"]["total_tokens"]) == ([], 5)
    collector, stream = begin(stream_options={"continuous_usage_stats": True})
    feed(collector, chat_delta("a", [1]))
    assert [chunk["usage"]["total_tokens"] for chunk in objects(stream.take())] == [2, 3]
    feed(collector, chat_delta("b", [2]), finished(), USAGE)
    assert [chunk["usage"]["total_tokens"] for chunk in objects(stream.take())] == [5, 5]
    collector, stream = begin(stream_options={"include_usage": False})
    feed(collector, chat_delta("a", [1]), finished(), USAGE)
    assert all("usage" not in chunk for chunk in objects(stream.take() + await stream.last()))


async def test_only_the_last_chunk_has_the_usage() -> None:
    """Merged events must not change that."""
    collector, stream = begin()
    feed(collector, chat_delta("a", [1]), finished(), USAGE)
    chunks = objects(stream.take() + await stream.last())
    assert ["usage" in chunk for chunk in chunks] == [False, False, True]
    assert chunks[-1]["usage"]["total_tokens"] == 5


parts = st.one_of(
    st.builds(chat_delta, st.text(max_size=3), st.just([1])),
    st.builds(lambda text: chat_delta(reasoning=text), st.text(max_size=3)),
    st.builds(lambda text: chat_delta("x", [1], scored=[(1, text.encode(), -1.0)]), st.text()),
)
calls = st.lists(st.lists(st.text(max_size=3), max_size=3), max_size=2)


@given(st.lists(parts, max_size=5), calls, st.lists(st.booleans(), min_size=12, max_size=12))
def test_joined_chunks_equal_the_whole_answer(
    deltas: list[completion_pb2.ChoiceDelta], arguments: list[list[str]], reads: list[bool]
) -> None:
    """A slow client gets merged chunks of the same answer."""
    for index, fragments in enumerate(arguments):
        named = call_delta(index, identity=f"call_{index}", name="f")
        rest = [call_delta(index, arguments=fragment) for fragment in fragments]
        deltas += [chat_delta("", [1], calls=[call]) for call in (named, *rest)]
    collector, stream = begin(logprobs=True)
    data = b""
    for delta, reads_now in zip(deltas, reads, strict=False):
        feed(collector, delta)
        data += stream.take() if reads_now else b""
    for delta in deltas[len(reads) :]:
        feed(collector, delta)
    feed(collector, finished(reason=STOP), USAGE)
    data += stream.take()
    expected = whole(*deltas, logprobs=True)
    joined: dict[str, Any] = {"content": "", "reasoning_content": "", "tool_calls": {}}
    scores = []
    for choice in choices(data):
        delta = choice["delta"]
        joined["content"] += delta.get("content") or ""
        joined["reasoning_content"] += delta.get("reasoning_content", "")
        for call in delta.get("tool_calls", ()):
            known = joined["tool_calls"].setdefault(call.pop("index"), call)
            if known is not call:
                known["function"]["arguments"] += call["function"]["arguments"]
        if choice["logprobs"] is not None:
            scores += choice["logprobs"]["content"]
    message = expected["message"]
    assert joined["content"] == (message["content"] or "")
    assert joined["reasoning_content"] == message.get("reasoning_content", "")
    assert list(joined["tool_calls"].values()) == message.get("tool_calls", [])
    assert scores == expected["logprobs"]["content"]
