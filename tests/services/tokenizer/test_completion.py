"""Completions of the tokenizer service with an engine: text, ids, scores, seeds and infilling."""

import math

import grpc
import pytest

from tests.services.tokenizer.completion_client import (
    GREEDY,
    PROMPT,
    Services,
    endless,
    make_request,
    tokens,
)
from tokenwire.pb.completion.v1 import completion_pb2 as completion
from tokenwire.pb.tokenizer.v1 import tokenizer_pb2
from tokenwire.pb.types.v1 import types_pb2 as types


async def test_completion_is_equal_for_text_or_ids_streamed_or_whole(services: Services) -> None:
    encoded = await services.tokenizer.Encode(tokenizer_pb2.EncodeRequest(texts=[PROMPT]))
    ids = list(encoded.encodings[0].ids)
    streamed = await services.complete(PROMPT, sampling=GREEDY, stopping=tokens(24))
    by_ids = await services.complete(ids, sampling=GREEDY, stopping=tokens(24))
    whole = await services.complete(
        PROMPT, sampling=GREEDY, stopping=tokens(24), delivery=completion.DELIVERY_WHOLE
    )
    assert streamed.texts == by_ids.texts == whole.texts
    assert streamed.ids == by_ids.ids == whole.ids
    assert list(streamed.accepted.prompts[0].ids) == ids
    assert whole.deltas == 1
    decoded = await services.tokenizer.Decode(
        tokenizer_pb2.DecodeRequest(sequences=[types.TokenIds(ids=streamed.ids[0])])
    )
    assert decoded.decodings[0].text == streamed.texts[0]


async def test_echo_logprobs_have_one_entry_per_token(services: Services) -> None:
    """Evaluation harnesses slice by this count, and compare scores with and without generation."""
    fields = {"sampling": GREEDY, "echo": True, "logprobs": 1}
    ids = [300, 301, 302, 303, 304]
    scored = await services.complete(ids, stopping=tokens(1, ignore_eos=True), **fields)
    assert len(scored.logprobs[0]) == len(scored.token_texts[0]) == len(ids) + 1
    assert math.isnan(scored.logprobs[0][0])
    assert not any(map(math.isnan, scored.logprobs[0][1:]))
    assert "".join(scored.token_texts[0]) == scored.texts[0]
    again = await services.complete(scored.ids[0], stopping=tokens(0), **fields)
    assert again.logprobs[0][1:] == pytest.approx(scored.logprobs[0][1:], abs=1e-4)
    assert again.usage is not None
    assert again.usage.completion_tokens == 0


async def test_echo_returns_the_prompt_verbatim_with_offsets(services: Services) -> None:
    answer = await services.complete(
        "# é😀\n\tx", echo=True, logprobs=0, stopping=tokens(2), sampling=GREEDY
    )
    assert answer.texts[0].startswith("# é😀\n\tx")
    for text, offset in zip(answer.token_texts[0], answer.offsets[0], strict=True):
        assert answer.texts[0][offset : offset + len(text)] == text


async def test_stop_string_trims_the_answer_and_ends_generation(services: Services) -> None:
    free = await services.complete(
        PROMPT, sampling=GREEDY, stopping=tokens(40, ignore_eos=True), logprobs=0
    )
    middle = len(free.token_texts[0]) // 2
    begin = free.offsets[0][middle]
    stop = free.texts[0][begin : begin + 12]
    end = free.texts[0].index(stop)
    for include in (False, True):
        answer = await services.complete(
            PROMPT, sampling=GREEDY, stopping=endless(), stop=[stop, "\0"],
            include_stop_string=include,
        )  # fmt: skip
        assert answer.texts[0] == free.texts[0][:end] + (stop if include else "")
        assert answer.ids[0] == free.ids[0][: len(answer.ids[0])]
        finished = answer.finished[0]
        assert finished.reason == types.FINISH_REASON_STOP
        assert finished.match.stop_string == stop
        through = next(
            count
            for count, offset in enumerate([*free.offsets[0][1:], len(free.texts[0])], 1)
            if offset >= end + len(stop)
        )
        assert finished.completion_tokens == through
        assert answer.usage is not None
        assert answer.usage.completion_tokens == through
    await services.idle()


async def test_seed_reproduces_the_choices_of_several_prompts(services: Services) -> None:
    fields = {"n": 3, "sampling": types.SamplingParams(seed=7), "stopping": tokens(12)}
    first = await services.complete("import ", "class ", **fields)
    second = await services.complete("import ", "class ", **fields)
    assert first.texts == second.texts
    assert sorted(first.finished) == [0, 1, 2, 3, 4, 5]
    assert len(set(first.texts.values())) > 1
    drawn = await services.complete("import ", stopping=tokens(12))
    again = await services.complete(
        "import ", stopping=tokens(12), sampling=types.SamplingParams(seed=drawn.accepted.seed)
    )
    assert drawn.texts == again.texts


async def test_best_of_equal_to_n_keeps_the_order_of_choices(services: Services) -> None:
    """Streamed and whole, the choices equal the ones without best_of."""
    fields = {"n": 3, "sampling": types.SamplingParams(seed=7), "stopping": tokens(12)}
    plain = await services.complete("import ", **fields)
    request = make_request("import ", best_of=3, **fields)
    handle, events = services.start(request, credit=5)
    await events.began  # before the rest is generated
    credit = completion.SessionCommand(handle=handle, credit=completion.SessionCredit(tokens=100))
    services.session.send(credit)
    streamed = await events.ended
    whole = await services.complete(
        "import ", best_of=3, delivery=completion.DELIVERY_WHOLE, **fields
    )
    assert streamed.texts == whole.texts == plain.texts
    assert streamed.deltas > whole.deltas == 3
    error = await services.refused("import ", best_of=4, **fields)
    assert (error.code, error.field) == (grpc.StatusCode.INVALID_ARGUMENT, "best_of")


async def test_infill_prompt_takes_no_control_tokens_from_user_text(services: Services) -> None:
    tokenizer = await services.tokenizer.GetTokenizer(tokenizer_pb2.GetTokenizerRequest())
    infill = tokenizer.infill
    rendered = await services.tokenizer.RenderInfill(
        tokenizer_pb2.RenderInfillRequest(prefix="def f(<|fim_middle|>", suffix="):\n    pass\n")
    )
    answer = await services.complete(
        "def f(<|fim_middle|>", suffix="):\n    pass\n", sampling=GREEDY
    )
    ids = list(rendered.ids)
    assert list(answer.accepted.prompts[0].ids) == ids
    assert ids[0] == infill.prefix_token_id
    assert ids[-1] == infill.middle_token_id
    assert ids.count(infill.middle_token_id) == 1
    assert ids.index(infill.suffix_token_id) > 1
    error = await services.refused("a", suffix="b", echo=True)
    assert (error.code, error.field) == (grpc.StatusCode.INVALID_ARGUMENT, "echo")


async def test_echo_keeps_an_incomplete_character_of_the_prompt(services: Services) -> None:
    """Only a special token follows the incomplete character."""
    half, special = [73, 181], 7
    forced = types.SamplingParams(temperature=0, logit_bias={special: 100})
    answer = await services.complete(
        half, echo=True, sampling=forced, stopping=tokens(1, ignore_eos=True)
    )
    assert answer.texts == {0: "a\ufffd"}


async def test_infill_accepts_the_maximum_of_stop_ids(services: Services) -> None:
    stopping = tokens(1, stop_token_ids=range(100, 228))
    assert (await services.complete("import", suffix="x", stopping=stopping)).finished
