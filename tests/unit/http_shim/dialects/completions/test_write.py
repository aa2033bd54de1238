"""JSON of completions, as evaluation harnesses and SDKs read it."""

import math

import msgspec
import pytest

from services.http_shim.dialects.choices import AnswerOptions
from services.http_shim.dialects.completions.types import Choice
from services.http_shim.dialects.completions.write import CompletionWriter
from tests.unit.http_shim.synthetic import NAN, delta, finished, whole_of
from tokenwire.pb.completion.v1 import completion_pb2
from tokenwire.pb.types.v1 import types_pb2

PLAIN = CompletionWriter(AnswerOptions())
WITH_LOGPROBS = CompletionWriter(AnswerOptions(logprobs=True))


def plain(choice: Choice) -> dict[str, object]:
    fields: dict[str, object] = msgspec.to_builtins(choice)
    return fields


def test_whole_answer_has_all_fields() -> None:
    answer = whole_of(PLAIN, delta("ab", [1, 2]), finished())
    assert answer.pop("id").startswith("cmpl-")
    assert answer.pop("created") > 1_700_000_000
    assert answer == {
        "object": "text_completion",
        "model": "m",
        "system_fingerprint": "fp",
        "choices": [
            {
                "index": 0,
                "text": "ab",
                "logprobs": None,
                "finish_reason": "length",
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


def test_logprobs_are_four_parallel_lists() -> None:
    prompt = delta(
        "ab",
        [7, 8],
        logprobs=[NAN, -0.5],
        texts=["a", "b"],
        offsets=[0, 1],
        top=[[(0, "", NAN)], [(9, "c", -0.25)]],
        is_prompt=True,
    )
    completion = delta(
        "c", [9], logprobs=[-math.inf], texts=["c"], offsets=[2], top=[[(1, "d", -0.125)]]
    )
    choice = WITH_LOGPROBS.choice(0, [prompt, completion], finished(), None)
    assert plain(choice)["logprobs"] == {
        "tokens": ["a", "b", "c"],
        "token_logprobs": [None, -0.5, -9999.0],
        "top_logprobs": [None, {"c": -0.25, "b": -0.5}, {"d": -0.125, "c": -9999.0}],
        "text_offset": [0, 1, 2],
    }


def test_likelier_of_equal_texts_is_kept() -> None:
    """Two ids of incomplete characters have one text; harnesses compare with the maximum."""
    row = [(1, "\ufffd", -1.0), (2, "\ufffd", -2.0), (3, "x", -3.0)]
    choice = WITH_LOGPROBS.choice(
        0, [delta("", [2], logprobs=[-2.0], texts=[""], offsets=[0], top=[row])], None, None
    )
    assert choice.logprobs is not None
    assert choice.logprobs.top_logprobs == [{"\ufffd": -1.0, "x": -3.0, "": -2.0}]
    same = delta("\ufffd", [2], logprobs=[-2.0], texts=["\ufffd"], offsets=[0], top=[row])
    choice = WITH_LOGPROBS.choice(0, [same], None, None)
    assert choice.logprobs is not None
    assert choice.logprobs.top_logprobs == [{"\ufffd": -1.0, "x": -3.0}]
    assert choice.logprobs.token_logprobs == [-2.0]


def test_chosen_token_comes_first_in_top_logprobs() -> None:
    """vLLM's clients read it there; the candidates follow, best first."""
    row = [(1, "a", -0.25), (2, "b", -1.0), (3, "c", -3.0)]
    for token, text, score in (*row[1:], (9, "z", -8.0)):
        part = delta(text, [token], logprobs=[score], texts=[text], offsets=[0], top=[row])
        logprobs = WITH_LOGPROBS.choice(0, [part], None, None).logprobs
        assert logprobs is not None
        (shown,) = logprobs.top_logprobs
        assert shown is not None
        others = [name for _, name, _ in row if name != text]
        assert list(shown) == [text, *others]


def test_zero_logprobs_return_the_chosen_token() -> None:
    choice = WITH_LOGPROBS.choice(
        0, [delta("x", [3], logprobs=[-0.5], texts=["x"], offsets=[0])], None, None
    )
    assert choice.logprobs is not None
    assert choice.logprobs.top_logprobs == [{"x": -0.5}]


def test_tokens_are_returned_as_ids() -> None:
    writer = CompletionWriter(AnswerOptions(logprobs=True, tokens_as_ids=True))
    part = delta("x", [3], logprobs=[-0.5], texts=["x"], offsets=[0], top=[[(4, "y", -0.25)]])
    choice = writer.choice(0, [part], None, None)
    assert choice.logprobs is not None
    assert choice.logprobs.tokens == ["token_id:3"]
    assert choice.logprobs.top_logprobs == [{"token_id:4": -0.25, "token_id:3": -0.5}]


def test_token_ids_omit_the_echoed_prompt() -> None:
    writer = CompletionWriter(AnswerOptions(token_ids=True))
    deltas = [delta("ab", [7, 8], is_prompt=True), delta("c", [9])]
    choice = writer.choice(0, deltas, None, types_pb2.TokenIds(ids=[7, 8]))
    assert plain(choice)["token_ids"] == [9]
    assert plain(choice)["prompt_token_ids"] == [7, 8]


def test_token_ids_are_returned_only_on_request() -> None:
    assert "token_ids" not in plain(WITH_LOGPROBS.choice(0, [delta("c", [9])], None, None))


@pytest.mark.parametrize(
    ("match", "reason", "matched"),
    [
        (None, None, None),
        (types_pb2.StopMatch(eos_token_id=2), None, 2),
        (types_pb2.StopMatch(stop_token_id=5), 5, 5),
        (types_pb2.StopMatch(stop_string="\n"), "\n", "\n"),
    ],
)
def test_stop_reason_and_matched_stop(
    match: types_pb2.StopMatch | None, reason: str | int | None, matched: str | int | None
) -> None:
    """At the end of sequence, vLLM's stop_reason is null and SGLang's matched_stop is its id."""
    end = finished(reason=types_pb2.FINISH_REASON_STOP, match=match)
    choice = PLAIN.choice(0, [], end, None)
    assert (choice.finish_reason, choice.stop_reason) == ("stop", reason)
    assert choice.matched_stop == matched


def test_every_finish_reason_has_a_name() -> None:
    for number in types_pb2.FinishReason.values():
        if number != types_pb2.FINISH_REASON_UNSPECIFIED:
            end = completion_pb2.ChoiceFinished(reason=number)
            assert PLAIN.choice(0, [], end, None).finish_reason
