"""Tokenizer service with an engine: completions, sessions, encoding, decoding and limits."""

import asyncio
import math
import signal
import sys
from collections.abc import AsyncIterable, AsyncIterator, Awaitable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import grpc
import pytest
import pytest_asyncio

from tests.services.listener import Listener
from tests.stack import (
    RunningService,
    is_idle,
    left_early,
    metrics_of,
    mortal_engine,
    running_service,
    watch_load,
)
from tokenwire.channel import connect
from tokenwire.errors import ServiceError
from tokenwire.pb.completion.v1 import completion_pb2 as completion
from tokenwire.pb.completion.v1.completion_pb2_grpc import CompletionServiceStub
from tokenwire.pb.tokenizer.v1 import tokenizer_pb2
from tokenwire.pb.tokenizer.v1.tokenizer_pb2_grpc import TokenizerServiceStub
from tokenwire.pb.types.v1 import types_pb2 as types
from tokenwire.session import CompletionSession, completion_session

if TYPE_CHECKING:
    from tokenwire.pb.completion.v1.completion_pb2_grpc import CompletionServiceAsyncStub
    from tokenwire.pb.tokenizer.v1.tokenizer_pb2_grpc import TokenizerServiceAsyncStub

_PROMPT = 'def add(a, b):\n    """Return the sum'
_GREEDY = types.SamplingParams(temperature=0)


@dataclass(slots=True)
class _Answer:
    """Answer to one completion, joined from its events."""

    accepted: completion.CompleteAccepted = field(default_factory=completion.CompleteAccepted)
    texts: dict[int, str] = field(default_factory=dict)
    ids: dict[int, list[int]] = field(default_factory=dict)
    logprobs: dict[int, list[float]] = field(default_factory=dict)
    token_texts: dict[int, list[str]] = field(default_factory=dict)
    offsets: dict[int, list[int]] = field(default_factory=dict)
    finished: dict[int, completion.ChoiceFinished] = field(default_factory=dict)
    usage: types.Usage | None = None
    deltas: int = 0
    prompt_logprobs: list[completion.PromptLogprobs] = field(default_factory=list)

    def take(self, response: completion.CompleteResponse) -> None:
        kind = response.WhichOneof("event")
        if kind == "accepted":
            self.accepted = response.accepted
        elif kind == "delta":
            delta = response.delta
            self.deltas += 1
            self.texts[delta.index] = self.texts.get(delta.index, "") + delta.text
            self.ids.setdefault(delta.index, []).extend(delta.tokens.ids)
            self.logprobs.setdefault(delta.index, []).extend(delta.tokens.logprobs)
            self.token_texts.setdefault(delta.index, []).extend(delta.token_texts)
            self.offsets.setdefault(delta.index, []).extend(delta.text_offsets)
        elif kind == "prompt_logprobs":
            self.prompt_logprobs.append(response.prompt_logprobs)
        elif kind == "finished":
            self.finished[response.finished.index] = response.finished
        elif kind == "completed":
            self.usage = response.completed.usage


@dataclass(frozen=True, slots=True)
class _Services:
    completions: "CompletionServiceAsyncStub"
    tokenizer: "TokenizerServiceAsyncStub"
    target: str
    """host:port of the tokenizer service"""
    engine: str
    """host:port of the engine"""
    session: CompletionSession

    async def complete(self, *prompts: str | list[int], **fields: object) -> _Answer:
        answer = _Answer()
        async for response in self.completions.Complete(_request(*prompts, **fields)):
            answer.take(response)
        return answer

    async def refused(self, *prompts: str | list[int], **fields: object) -> ServiceError:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await self.complete(*prompts, **fields)
        return ServiceError.from_rpc_error(caught.value)

    async def idle(self) -> None:
        """Wait until the engine runs nothing."""
        await watch_load(self.engine, until=is_idle)


async def _completed(call: AsyncIterable[completion.CompleteResponse]) -> _Answer:
    answer = _Answer()
    async for response in call:
        answer.take(response)
    return answer


def _request(*prompts: str | list[int], **fields: object) -> completion.CompleteRequest:
    request = completion.CompleteRequest(**fields)  # type: ignore[arg-type]
    for prompt in prompts:
        if isinstance(prompt, str):
            request.prompts.add(text=prompt)
        else:
            request.prompts.add(token_ids=types.TokenIds(ids=prompt))
    return request


def _tokens(count: int, **fields: object) -> types.StoppingParams:
    return types.StoppingParams(max_tokens=count, **fields)  # type: ignore[arg-type]


def _endless() -> types.StoppingParams:
    return _tokens(1_500, ignore_eos=True)


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def engine(
    embedded_model: Path, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[RunningService]:
    log = tmp_path_factory.mktemp("log") / "engine.log"
    arguments = ("--model", str(embedded_model), "--dtype", "float32", "--kv-memory", "128MiB")
    async with running_service("engine", *arguments, log=log) as service:
        yield service


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def services(
    engine: RunningService, embedded_model: Path, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[_Services]:
    log = tmp_path_factory.mktemp("log") / "tokenizer.log"
    arguments = ("--model", str(embedded_model), "--engine", engine.target)
    async with (
        running_service("tokenizer", *arguments, log=log) as service,
        connect(service.target) as channel,
    ):
        session = completion_session(channel)
        yield _Services(
            CompletionServiceStub(channel),
            TokenizerServiceStub(channel),
            service.target,
            engine.target,
            session,
        )
        await session.close()


async def test_completion_is_equal_for_text_or_ids_streamed_or_whole(services: _Services) -> None:
    encoded = await services.tokenizer.Encode(tokenizer_pb2.EncodeRequest(texts=[_PROMPT]))
    ids = list(encoded.encodings[0].ids)
    streamed = await services.complete(_PROMPT, sampling=_GREEDY, stopping=_tokens(24))
    by_ids = await services.complete(ids, sampling=_GREEDY, stopping=_tokens(24))
    whole = await services.complete(
        _PROMPT, sampling=_GREEDY, stopping=_tokens(24), delivery=completion.DELIVERY_WHOLE
    )
    assert streamed.texts == by_ids.texts == whole.texts
    assert streamed.ids == by_ids.ids == whole.ids
    assert list(streamed.accepted.prompts[0].ids) == ids
    assert whole.deltas == 1
    decoded = await services.tokenizer.Decode(
        tokenizer_pb2.DecodeRequest(sequences=[types.TokenIds(ids=streamed.ids[0])])
    )
    assert decoded.decodings[0].text == streamed.texts[0]


async def test_echo_logprobs_have_one_entry_per_token(services: _Services) -> None:
    """Evaluation harnesses slice by this count, and compare scores with and without generation."""
    fields = {"sampling": _GREEDY, "echo": True, "logprobs": 1}
    ids = [300, 301, 302, 303, 304]
    scored = await services.complete(ids, stopping=_tokens(1, ignore_eos=True), **fields)
    assert len(scored.logprobs[0]) == len(scored.token_texts[0]) == len(ids) + 1
    assert math.isnan(scored.logprobs[0][0])
    assert not any(map(math.isnan, scored.logprobs[0][1:]))
    assert "".join(scored.token_texts[0]) == scored.texts[0]
    again = await services.complete(scored.ids[0], stopping=_tokens(0), **fields)
    assert again.logprobs[0][1:] == pytest.approx(scored.logprobs[0][1:], abs=1e-4)
    assert again.usage is not None
    assert again.usage.completion_tokens == 0


async def test_echo_returns_the_prompt_verbatim_with_offsets(services: _Services) -> None:
    answer = await services.complete(
        "# é😀\n\tx", echo=True, logprobs=0, stopping=_tokens(2), sampling=_GREEDY
    )
    assert answer.texts[0].startswith("# é😀\n\tx")
    for text, offset in zip(answer.token_texts[0], answer.offsets[0], strict=True):
        assert answer.texts[0][offset : offset + len(text)] == text


async def test_stop_string_trims_the_answer_and_ends_generation(services: _Services) -> None:
    free = await services.complete(
        _PROMPT, sampling=_GREEDY, stopping=_tokens(40, ignore_eos=True), logprobs=0
    )
    middle = len(free.token_texts[0]) // 2
    begin = free.offsets[0][middle]
    stop = free.texts[0][begin : begin + 12]
    end = free.texts[0].index(stop)
    for include in (False, True):
        answer = await services.complete(
            _PROMPT, sampling=_GREEDY, stopping=_endless(), stop=[stop, "\0"],
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


async def test_seed_reproduces_the_choices_of_several_prompts(services: _Services) -> None:
    fields = {"n": 3, "sampling": types.SamplingParams(seed=7), "stopping": _tokens(12)}
    first = await services.complete("import ", "class ", **fields)
    second = await services.complete("import ", "class ", **fields)
    assert first.texts == second.texts
    assert sorted(first.finished) == [0, 1, 2, 3, 4, 5]
    assert len(set(first.texts.values())) > 1
    drawn = await services.complete("import ", stopping=_tokens(12))
    again = await services.complete(
        "import ", stopping=_tokens(12), sampling=types.SamplingParams(seed=drawn.accepted.seed)
    )
    assert drawn.texts == again.texts


async def test_best_of_equal_to_n_keeps_the_order_of_choices(services: _Services) -> None:
    """Streamed and whole, the choices equal the ones without best_of."""
    fields = {"n": 3, "sampling": types.SamplingParams(seed=7), "stopping": _tokens(12)}
    plain = await services.complete("import ", **fields)
    streamed = await services.complete("import ", best_of=3, **fields)
    whole = await services.complete(
        "import ", best_of=3, delivery=completion.DELIVERY_WHOLE, **fields
    )
    assert streamed.texts == whole.texts == plain.texts
    assert streamed.deltas > whole.deltas == 3
    error = await services.refused("import ", best_of=4, **fields)
    assert (error.code, error.field) == (grpc.StatusCode.INVALID_ARGUMENT, "best_of")


async def test_infill_prompt_takes_no_control_tokens_from_user_text(services: _Services) -> None:
    tokenizer = await services.tokenizer.GetTokenizer(tokenizer_pb2.GetTokenizerRequest())
    infill = tokenizer.infill
    rendered = await services.tokenizer.RenderInfill(
        tokenizer_pb2.RenderInfillRequest(prefix="def f(<|fim_middle|>", suffix="):\n    pass\n")
    )
    answer = await services.complete(
        "def f(<|fim_middle|>", suffix="):\n    pass\n", sampling=_GREEDY
    )
    ids = list(rendered.ids)
    assert list(answer.accepted.prompts[0].ids) == ids
    assert ids[0] == infill.prefix_token_id
    assert ids[-1] == infill.middle_token_id
    assert ids.count(infill.middle_token_id) == 1
    assert ids.index(infill.suffix_token_id) > 1
    error = await services.refused("a", suffix="b", echo=True)
    assert (error.code, error.field) == (grpc.StatusCode.INVALID_ARGUMENT, "echo")


async def test_prompt_over_the_context_is_refused_or_truncated(services: _Services) -> None:
    error = await services.refused("x = 1\n" * 5_000)
    assert (error.code, error.reason) == (grpc.StatusCode.OUT_OF_RANGE, "CONTEXT_LENGTH_EXCEEDED")
    cut = await services.complete("x = 1\n" * 5_000, truncate_prompt=True, stopping=_tokens(9))
    models = await services.completions.ListModels(completion.ListModelsRequest())
    context = models.models[0].context_length
    assert len(cut.accepted.prompts[0].ids) == context - 9
    error = await services.refused(
        "x", stopping=_tokens(context), context_overflow=completion.CONTEXT_OVERFLOW_ERROR
    )
    assert error.reason == "CONTEXT_LENGTH_EXCEEDED"


async def test_very_long_prompt_is_refused_before_it_is_fully_encoded(services: _Services) -> None:
    """This holds for echo, infill and ids; truncation keeps the same end as a full encoding."""
    models = await services.completions.ListModels(completion.ListModelsRequest())
    context = models.models[0].context_length
    text = "x = 1\n" * 500_000
    for fields in ({}, {"echo": True}, {"suffix": "y"}, {"stop": ["a" * 1_000] * 16}):
        error = await services.refused(text, **fields)
        assert error.reason == "CONTEXT_LENGTH_EXCEEDED"
        assert error.field == "prompts[0].text"
        assert "The prompt has at least " in error.message
    error = await services.refused("x", suffix=text)
    assert "The prompt has at least " in error.message
    error = await services.refused([300] * 1_000_000)
    assert f"The prompt has 1,000,000 tokens; the context length is {context:,}" in error.message
    cut = await services.complete(text, truncate_prompt=True, stopping=_tokens(9))
    shorter = await services.complete(text[:60_000], truncate_prompt=True, stopping=_tokens(9))
    assert cut.accepted.prompts == shorter.accepted.prompts
    ids = await services.complete([300] * 1_000_000, truncate_prompt=True, stopping=_tokens(9))
    assert len(ids.accepted.prompts[0].ids) == context - 9


async def test_tokenizer_rpcs_limit_the_size_of_a_request(services: _Services) -> None:
    """The context length does not limit these RPCs."""
    stub = services.tokenizer
    half, over = "é" * 2**18, "é" * 2**18 + "x"
    most = await stub.Encode(tokenizer_pb2.EncodeRequest(texts=[half, half]))
    assert len(most.encodings) == 2
    ids = types.TokenIds(ids=[300] * 2**17)
    decoded = await stub.Decode(tokenizer_pb2.DecodeRequest(sequences=[ids, ids]))
    assert decoded.decodings[0].text == decoded.decodings[1].text != ""
    one = types.TokenIds(ids=[300])
    message = completion.Message(
        role=completion.ROLE_USER, parts=[completion.ContentPart(text=half + over)]
    )
    refused: dict[str, Awaitable[object]] = {
        "texts": stub.Encode(tokenizer_pb2.EncodeRequest(texts=[half, over])),
        "sequences": stub.Decode(tokenizer_pb2.DecodeRequest(sequences=[ids, ids, one])),
        "prefix": stub.RenderInfill(
            tokenizer_pb2.RenderInfillRequest(prefix=half + over, suffix="x")
        ),
        "suffix": stub.RenderInfill(
            tokenizer_pb2.RenderInfillRequest(prefix="x", suffix=half + over)
        ),
        "messages": stub.RenderChat(tokenizer_pb2.RenderChatRequest(messages=[message])),
    }
    for path, call in refused.items():
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call
        error = ServiceError.from_rpc_error(caught.value)
        assert (error.code, error.field) == (grpc.StatusCode.INVALID_ARGUMENT, path)
    chunk = tokenizer_pb2.DecodeChunk(sequence=1, ids=[300] * 2**18)
    stream = stub.DecodeStream()
    await stream.write(tokenizer_pb2.DecodeStreamRequest(chunks=[chunk]))
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await stream.read()
    assert ServiceError.from_rpc_error(caught.value).field == "chunks"


async def test_large_request_is_validated_like_a_small_one(services: _Services) -> None:
    """Another code path validates large requests."""
    stops = ["a" * 1_000] * 16
    error = await services.refused("x" * 20_000, sampling=types.SamplingParams(top_p=2))
    assert error.field == "sampling.top_p"
    error = await services.refused("x", stop=[*stops, ""])
    assert error.field == "stop"
    sampling = types.SamplingParams(dry=types.DryParams(multiplier=1))
    error = await services.refused("x", sampling=sampling, dry_sequence_breakers=[""])
    assert error.field == "dry_sequence_breakers[0]"
    answer = await services.complete(
        "x" * 20_000, truncate_prompt=True, sampling=sampling, stopping=_tokens(1),
        dry_sequence_breakers=["x"], stop=stops,
    )  # fmt: skip
    assert answer.usage is not None


async def test_service_works_after_invalid_requests(services: _Services) -> None:
    bad: list[tuple[grpc.StatusCode, str, dict[str, object]]] = [
        (grpc.StatusCode.NOT_FOUND, "model", {"model": "nope"}),
        (
            grpc.StatusCode.INVALID_ARGUMENT,
            "sampling.top_p",
            {"sampling": types.SamplingParams(top_p=2)},
        ),
        (grpc.StatusCode.INVALID_ARGUMENT, "stop[0]", {"stop": [""]}),
        (grpc.StatusCode.UNIMPLEMENTED, "grammar", {"grammar": types.GrammarSpec(regex="a")}),
    ]
    for code, path, fields in bad:
        error = await services.refused("a", **fields)
        assert (error.code, error.field) == (code, path)
    error = await services.refused([1, 10**6])
    assert error.field == "prompts[0].token_ids.ids[1]"
    decode = tokenizer_pb2.DecodeRequest(sequences=[types.TokenIds(ids=[1, 10**6])])
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await services.tokenizer.Decode(decode)
    assert ServiceError.from_rpc_error(caught.value).field == "sequences[0].ids[1]"
    assert (await services.complete("a", stopping=_tokens(1))).usage is not None


def _start(
    services: _Services, request: completion.CompleteRequest, **fields: object
) -> tuple[int, Listener[_Answer]]:
    events = Listener("complete", _Answer())
    handle = services.session.open(events)
    start = completion.StartComplete(request=request, **fields)  # type: ignore[arg-type]
    services.session.send(completion.SessionCommand(handle=handle, start_complete=start))
    return handle, events


async def test_failed_request_does_not_affect_others_of_its_session(services: _Services) -> None:
    prompts = ["import os", "class A", "def f(", "for i"]
    alone = [
        await services.complete(prompt, sampling=_GREEDY, stopping=_tokens(16))
        for prompt in prompts
    ]
    requests = [_request(p, sampling=_GREEDY, stopping=_tokens(16)) for p in prompts]
    started = [_start(services, request)[1] for request in requests]
    _, bad = _start(services, _request("a", n=0))
    together = await asyncio.gather(*(events.ended for events in started))
    assert [answer.texts for answer in together] == [answer.texts for answer in alone]
    with pytest.raises(ServiceError) as caught:
        await bad.ended
    assert caught.value.field == "n"


async def test_echo_keeps_an_incomplete_character_of_the_prompt(services: _Services) -> None:
    """Only a special token follows the incomplete character."""
    half, special = [73, 181], 7
    forced = types.SamplingParams(temperature=0, logit_bias={special: 100})
    answer = await services.complete(
        half, echo=True, sampling=forced, stopping=_tokens(1, ignore_eos=True)
    )
    assert answer.texts == {0: "a\ufffd"}


async def test_infill_accepts_the_maximum_of_stop_ids(services: _Services) -> None:
    stopping = _tokens(1, stop_token_ids=range(100, 228))
    assert (await services.complete("import", suffix="x", stopping=stopping)).finished


async def test_timeout_of_nan_is_refused(services: _Services) -> None:
    context = completion.RequestContext(timeout_seconds=math.nan)
    _, bad = _start(services, _request("a", stopping=_tokens(1)), context=context)
    _, good = _start(services, _request("a", stopping=_tokens(1)))
    with pytest.raises(ServiceError) as caught:
        await bad.ended
    assert caught.value.field == "context.timeout_seconds"
    assert (await good.ended).texts


async def test_cancelled_session_request_ends_and_is_counted(services: _Services) -> None:
    cancelled = 'tokenwire_tokenizer_requests_total{outcome="cancelled"}'
    before = (await metrics_of(services.target)).get(cancelled, 0)
    handle, events = _start(services, _request("import", n=2, stopping=_endless()))
    await events.began
    cancel = completion.SessionCommand(handle=handle, cancel=completion.Cancel())
    services.session.send(cancel)
    answer = await events.ended
    reasons = {finished.reason for finished in answer.finished.values()}
    assert reasons == {types.FINISH_REASON_CANCELLED}
    await services.idle()
    assert (await metrics_of(services.target))[cancelled] == before + 1


async def test_credit_limits_the_tokens_sent(services: _Services) -> None:
    """A slow client limits its own memory by credit."""
    handle, events = _start(
        services, _request("import", stopping=_tokens(64, ignore_eos=True)), credit=5
    )
    _, other = _start(services, _request("import", stopping=_tokens(64, ignore_eos=True)))
    await other.ended
    assert len(events.answer.ids[0]) == 5
    credit = completion.SessionCommand(handle=handle, credit=completion.Credit(tokens=100))
    services.session.send(credit)
    answer = await events.ended
    assert len(answer.ids[0]) == 64
    assert answer.deltas > 1


async def test_credit_of_0_tokens_is_refused(services: _Services) -> None:
    credit = completion.SessionCommand(handle=1, credit=completion.Credit())
    call = services.completions.Session()
    await call.write(completion.SessionRequest(commands=[credit]))
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call.read()
    assert ServiceError.from_rpc_error(caught.value).field == "commands.credit.tokens"


async def test_session_request_ends_at_its_deadline(services: _Services) -> None:
    context = completion.RequestContext(timeout_seconds=0.5)
    _, events = _start(services, _request("a", n=32, stopping=_endless()), context=context)
    with pytest.raises(ServiceError) as caught:
        await events.ended
    assert caught.value.code is grpc.StatusCode.DEADLINE_EXCEEDED
    await services.idle()


async def test_disconnected_client_stops_generation(services: _Services) -> None:
    async with left_early(services.engine, 4 * 1_500):
        call = services.completions.Complete(_request("import", n=4, stopping=_endless()))
        async for response in call:
            if response.HasField("delta"):
                call.cancel()
                break
    async with left_early(services.engine, 4 * 1_500):
        stream = services.completions.Session()
        start = completion.StartComplete(request=_request("import", n=4, stopping=_endless()))
        command = completion.SessionCommand(handle=1, start_complete=start)
        await stream.write(completion.SessionRequest(commands=[command]))
        await stream.read()
        stream.cancel()


async def test_decode_stream_holds_back_incomplete_characters(services: _Services) -> None:
    encoded = await services.tokenizer.Encode(
        tokenizer_pb2.EncodeRequest(texts=["x😀y"], with_texts=True)
    )
    ids = list(encoded.encodings[0].ids)
    stream = services.tokenizer.DecodeStream()
    texts = []
    for place, token in enumerate(ids):
        chunk = tokenizer_pb2.DecodeChunk(sequence=9, ids=[token], end=place == len(ids) - 1)
        await stream.write(tokenizer_pb2.DecodeStreamRequest(chunks=[chunk]))
        answer = await stream.read()
        assert isinstance(answer, tokenizer_pb2.DecodeStreamResponse)
        texts.append(answer.chunks[0].text)
    assert "".join(texts) == "x😀y"
    assert "😀" in texts
    bad = tokenizer_pb2.DecodeChunk(sequence=1, ids=[10**6])
    await stream.write(tokenizer_pb2.DecodeStreamRequest(chunks=[bad]))
    answer = await stream.read()
    assert isinstance(answer, tokenizer_pb2.DecodeStreamResponse)
    assert ServiceError.from_status(answer.chunks[0].error).field == "chunks[0].ids[0]"
    many = [tokenizer_pb2.DecodeChunk(sequence=place, ids=ids[:1]) for place in range(2_049)]
    await stream.write(tokenizer_pb2.DecodeStreamRequest(chunks=many))
    answer = await stream.read()
    assert isinstance(answer, tokenizer_pb2.DecodeStreamResponse)
    refused = [place for place, chunk in enumerate(answer.chunks) if chunk.HasField("error")]
    assert refused == [2_048]
    await stream.done_writing()


async def test_offsets_map_tokens_to_text_and_bytes(services: _Services) -> None:
    text = "é<|endoftext|>x"
    encoded = await services.tokenizer.Encode(
        tokenizer_pb2.EncodeRequest(texts=[text], with_texts=True)
    )
    encoding = encoded.encodings[0]
    spans = zip(encoding.starts, encoding.ends, strict=True)
    assert "".join(text[start:end] for start, end in spans) == text
    decoded = await services.tokenizer.Decode(
        tokenizer_pb2.DecodeRequest(
            sequences=[types.TokenIds(ids=encoding.ids)],
            skip_special_tokens=False,
            with_offsets=True,
        )
    )
    assert decoded.decodings[0].text == text
    assert list(decoded.decodings[0].byte_offsets) == [0, 2, 15]


def _assert_same_scores(
    actual: Sequence[completion.PromptLogprobs], expected: Sequence[completion.PromptLogprobs]
) -> None:
    """The rounding of a logprob depends on what else is in its step; all else is equal."""
    for got, wanted in zip(actual, expected, strict=True):
        for name in ("logprobs", "top_logprobs"):
            values = getattr(wanted.tokens, name)
            assert list(getattr(got.tokens, name)) == pytest.approx(list(values), abs=1e-4)
            getattr(got.tokens, name)[:] = values
        assert got == wanted


async def test_completion_continues_after_an_engine_loss(
    embedded_model: Path, tmp_path: Path
) -> None:
    """The restarted engine continues from prompt and generated ids with the sampling state.

    The client sees the same text, and each token once.
    """
    async with (
        mortal_engine(embedded_model) as engine,
        running_service(
            "tokenizer", "--model", str(embedded_model), "--engine", engine.target,
            "--engine-wait", "120", log=tmp_path / "log",
        ) as service,
        connect(service.target) as channel,
    ):  # fmt: skip
        stub = CompletionServiceStub(channel)
        sampling = types.SamplingParams(
            seed=1,
            frequency_penalty=0.3,
            repetition_penalty=1.1,
            dry=types.DryParams(multiplier=0.8),
            mirostat=types.MirostatParams(target_perplexity=8),
        )
        request = _request(
            "import re", n=2, sampling=sampling, logprobs=0, echo=True, prompt_logprobs=2,
            bad_words=["self", "import os"], stopping=_tokens(64, ignore_eos=True),
        )  # fmt: skip
        # a concurrent request whose candidates are ranked only at the end
        ranked = _request(
            "def ", n=2, best_of=4, sampling=types.SamplingParams(seed=2), logprobs=0,
            stopping=_tokens(200, ignore_eos=True), delivery=completion.DELIVERY_WHOLE,
        )  # fmt: skip
        calm = await _completed(stub.Complete(request))
        calm_ranked = await _completed(stub.Complete(ranked))
        is_ranking = False
        while not is_ranking:  # retry if the ranking ended before the kill
            ranking = asyncio.ensure_future(_completed(stub.Complete(ranked)))
            stormy, killed = _Answer(), False
            async for response in stub.Complete(request):
                stormy.take(response)
                if len(stormy.ids.get(1, ())) >= 20 and not killed:
                    killed, is_ranking = True, not ranking.done()
                    await engine.kill()
                    await engine.start()
            stormy_ranked = await ranking
            assert killed
            assert stormy.texts == calm.texts
            assert stormy.ids == calm.ids
            _assert_same_scores(stormy.prompt_logprobs, calm.prompt_logprobs)
            assert all("self" not in text for text in stormy.texts.values())
            assert stormy.usage is not None
            assert stormy.usage.completion_tokens == 128
            assert stormy_ranked.ids == calm_ranked.ids
            assert stormy_ranked.usage is not None
            assert stormy_ranked.usage.completion_tokens == 800


async def test_sigterm_finishes_running_requests(
    engine: RunningService, embedded_model: Path, tmp_path: Path
) -> None:
    arguments = ("--model", str(embedded_model), "--engine", engine.target)
    async with (
        running_service("tokenizer", *arguments, log=tmp_path / "log") as service,
        connect(service.target) as channel,
    ):
        stub = CompletionServiceStub(channel)
        answer = _Answer()
        async for response in stub.Complete(
            _request("import", stopping=_tokens(300, ignore_eos=True))
        ):
            if response.HasField("delta") and not answer.deltas:
                service.process.send_signal(signal.SIGTERM)
            answer.take(response)
        assert len(answer.ids[0]) == 300
        assert await service.process.wait() == 0


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["--model", "/nowhere"], "The model directory /nowhere is not a directory."),
        (["--model", "tests"], "tests has no tokenizer.json."),
        ([], "--model must name the directory of a checkpoint."),
        (["--max-logprobs", "21"], "--max-logprobs must be between 0 and 20, not 21."),
    ],
)
async def test_failed_start_is_one_sentence(arguments: list[str], complaint: str) -> None:
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "services.tokenizer", "--port", "0", *arguments),
        stderr=asyncio.subprocess.PIPE,
    )
    _, said = await process.communicate()
    assert process.returncode == 2
    [line] = said.decode().splitlines()
    assert line.startswith("tokenizer: ")
    assert line.endswith(complaint)


async def test_service_imports_neither_torch_nor_transformers() -> None:
    """The imports would cost 300 MB of memory, and seconds at every start."""
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-c",
        "import sys, services.tokenizer.application as _; "
        "sys.exit(bool({'torch', 'transformers'} & set(sys.modules)))",
    )
    assert await process.wait() == 0
