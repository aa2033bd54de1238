"""Engine service over gRPC: requests, sampling, validation, sessions."""

import asyncio
import math

import grpc
import pytest
from google.rpc import status_pb2

from tests.services.engine_client import (
    SessionClient,
    generate,
    ids_of,
    make_request,
    refused,
    start,
)
from tests.unit.engine.tiny import CONTEXT, EOS, VOCABULARY
from tokenwire.errors import ServiceError
from tokenwire.pb.engine.v1 import engine_pb2
from tokenwire.pb.engine.v1.engine_pb2 import (
    Capability,
    GenerateRequest,
    PromptImage,
    ResumedSequence,
    SessionCancel,
    SessionCommand,
    SessionCredit,
)
from tokenwire.pb.engine.v1.engine_pb2_grpc import EngineControlServiceStub
from tokenwire.pb.types.v1.types_pb2 import (
    BeamSearch,
    DryParams,
    FinishReason,
    GrammarSpec,
    MirostatParams,
    SamplingParams,
    StoppingParams,
    TokenIds,
)


async def test_generate_streams_accepted_deltas_scores_and_usage(channel: grpc.aio.Channel) -> None:
    responses = await generate(channel, make_request([1, 2, 3], n=2, logprobs=2, prompt_logprobs=0))
    kinds = [response.WhichOneof("event") for response in responses]
    assert kinds[0] == "accepted"
    assert kinds[-1] == "completed"
    assert kinds.count("finished") == 2
    assert len(ids_of(responses, 0)) == len(ids_of(responses, 1)) == 8
    scores = [r.prompt_scores for r in responses if r.HasField("prompt_scores")]
    assert [list(s.tokens.ids) for s in scores] == [[2, 3]]
    for response in responses:
        if response.HasField("delta"):
            columns = response.delta.tokens
            assert len(columns.logprobs) == len(columns.ranks) == len(columns.ids)
            assert len(columns.top_ids) == len(columns.top_logprobs) == 2 * len(columns.ids)
            # greedy: the token equals the best candidate, and their logprobs are identical
            assert list(columns.top_ids[::2]) == list(columns.ids)
            assert list(columns.top_logprobs[::2]) == list(columns.logprobs)
    usage = responses[-1].completed.usage
    assert (usage.prompt_tokens, usage.completion_tokens) == (3, 16)


async def test_accepted_event_reports_defaults_and_seed(channel: grpc.aio.Channel) -> None:
    request = GenerateRequest(
        prompts=[TokenIds(ids=[1, 2])], stopping=StoppingParams(ignore_eos=True)
    )
    responses = await generate(channel, request)
    accepted = responses[0].accepted
    assert accepted.sampling.temperature == 1
    assert accepted.sampling.HasField("seed")
    assert list(accepted.max_tokens) == [16]
    assert len(ids_of(responses)) == 16
    again = GenerateRequest(
        prompts=request.prompts, stopping=request.stopping, sampling=accepted.sampling
    )
    assert ids_of(await generate(channel, again)) == ids_of(responses)


async def test_max_tokens_0_scores_only_the_prompt(channel: grpc.aio.Channel) -> None:
    responses = await generate(channel, make_request([1, 2, 3, 4], max_tokens=0, prompt_logprobs=1))
    assert ids_of(responses) == []
    [finished] = [r.finished for r in responses if r.HasField("finished")]
    assert finished.reason == FinishReason.FINISH_REASON_LENGTH
    assert responses[-1].completed.usage.completion_tokens == 0


async def test_eos_ends_a_sequence_and_is_reported_as_match(channel: grpc.aio.Channel) -> None:
    for seed in range(200):
        request = make_request([1, 2], max_tokens=60, temperature=2.0, ignore_eos=False)
        request.sampling.seed = seed
        responses = await generate(channel, request)
        [finished] = [r.finished for r in responses if r.HasField("finished")]
        if finished.reason == FinishReason.FINISH_REASON_STOP:
            assert finished.match.eos_token_id == EOS
            assert ids_of(responses)[-1] == EOS
            return
    raise AssertionError("no seed drew the end of sequence")


async def test_accepted_sampling_parameters_reproduce_the_output(channel: grpc.aio.Channel) -> None:
    asked = SamplingParams(
        frequency_penalty=0.5,
        logit_bias={3: 5.0, VOCABULARY - 1: -100.0},
        dry=DryParams(multiplier=0.8, breaker_ids=[4, 2, 4]),
        mirostat=MirostatParams(target_perplexity=6),
        allowed_token_ids=TokenIds(ids=range(3, VOCABULARY)),
    )
    request = GenerateRequest(
        prompts=[TokenIds(ids=[1, 2])],
        sampling=asked,
        stopping=StoppingParams(ignore_eos=True, max_tokens=20),
    )
    responses = await generate(channel, request)
    told = responses[0].accepted.sampling
    assert (told.temperature, told.repetition_penalty) == (1, 1)
    assert (told.dry.base, told.dry.allowed_length) == (1.75, 2)
    assert list(told.dry.breaker_ids) == [2, 4]
    assert dict(told.logit_bias) == dict(asked.logit_bias)
    assert told.allowed_token_ids == asked.allowed_token_ids
    assert told.mirostat.learning_rate == pytest.approx(0.1)
    request.sampling.CopyFrom(told)
    assert ids_of(await generate(channel, request)) == ids_of(responses)


async def test_mirostat_resumes_from_the_mu_of_a_delta(channel: grpc.aio.Channel) -> None:
    request = GenerateRequest(
        prompts=[TokenIds(ids=[1, 2])],
        sampling=SamplingParams(mirostat=MirostatParams(target_perplexity=6), seed=3),
        stopping=StoppingParams(ignore_eos=True, max_tokens=5),
    )
    responses = await generate(channel, request)
    deltas = [r.delta for r in responses if r.HasField("delta")]
    assert all(delta.HasField("mirostat_mu") for delta in deltas)
    request.stopping.max_tokens = 20
    whole = ids_of(await generate(channel, request))
    mu = deltas[-1].mirostat_mu
    request.resume.add(generated=TokenIds(ids=ids_of(responses)), mirostat_mu=mu)
    assert ids_of(responses) + ids_of(await generate(channel, request)) == whole


CAPABLE = {
    Capability.CAPABILITY_SAMPLING: make_request([1, 2], temperature=0.7),
    Capability.CAPABILITY_PENALTIES: GenerateRequest(
        prompts=[TokenIds(ids=[1])], sampling=SamplingParams(frequency_penalty=1.0)
    ),
    Capability.CAPABILITY_LOGIT_BIAS: GenerateRequest(
        prompts=[TokenIds(ids=[1])], sampling=SamplingParams(logit_bias={3: 5.0})
    ),
    Capability.CAPABILITY_DRY: GenerateRequest(
        prompts=[TokenIds(ids=[1])], sampling=SamplingParams(dry=DryParams(multiplier=0.8))
    ),
    Capability.CAPABILITY_MIROSTAT: GenerateRequest(
        prompts=[TokenIds(ids=[1])], sampling=SamplingParams(mirostat=MirostatParams())
    ),
    Capability.CAPABILITY_STOPPING: GenerateRequest(
        prompts=[TokenIds(ids=[1])],
        stopping=StoppingParams(max_tokens=4, min_tokens=2, stop_token_ids=[3]),
    ),
    Capability.CAPABILITY_LOGPROBS: make_request([1, 2], logprobs=3),
    Capability.CAPABILITY_PROMPT_LOGPROBS: make_request([1, 2], prompt_logprobs=3),
    Capability.CAPABILITY_GRAMMAR: make_request(
        [1, 2], grammar=GrammarSpec(regex="a"), ignore_eos=False
    ),
    Capability.CAPABILITY_RESUME: make_request(
        [1, 2], resume=[ResumedSequence(sequence=0, generated=TokenIds(ids=[3]))]
    ),
    Capability.CAPABILITY_PREFIX_CACHE: make_request([1, 2]),
    Capability.CAPABILITY_IMAGES: make_request([1, 2], images=[PromptImage(data=b"x")]),
    Capability.CAPABILITY_TOKEN_LIMITS: GenerateRequest(
        prompts=[TokenIds(ids=[1])],
        sampling=SamplingParams(
            allowed_token_ids=TokenIds(ids=[3, 4]), bad_token_ids=[TokenIds(ids=[3, 4])]
        ),
    ),
    Capability.CAPABILITY_BEAM_SEARCH: GenerateRequest(
        prompts=[TokenIds(ids=[1])], n=2, beam_search=BeamSearch()
    ),
}


@pytest.mark.parametrize("capability", list(CAPABLE), ids=Capability.Name)
async def test_engine_accepts_exactly_the_requests_of_its_advertised_capabilities(
    channel: grpc.aio.Channel, capability: Capability.ValueType
) -> None:
    """This engine has neither a grammar service nor a vision tower."""
    assert {*CAPABLE, Capability.CAPABILITY_UNSPECIFIED} == set(Capability.values())
    model = await EngineControlServiceStub(channel).GetModel(engine_pb2.GetModelRequest())
    assert {*CAPABLE} - {*model.capabilities} == {
        Capability.CAPABILITY_GRAMMAR,
        Capability.CAPABILITY_IMAGES,
    }
    if capability in model.capabilities:
        assert (await generate(channel, CAPABLE[capability]))[-1].HasField("completed")
    else:
        error = await refused(channel, CAPABLE[capability])
        assert error.code is grpc.StatusCode.UNIMPLEMENTED
        assert error.field


async def test_get_model_describes_the_checkpoint(channel: grpc.aio.Channel) -> None:
    model = await EngineControlServiceStub(channel).GetModel(engine_pb2.GetModelRequest())
    assert (model.model, model.architecture) == ("tiny-llama", "LlamaForCausalLM")
    assert (model.context_length, model.vocabulary_size) == (CONTEXT, VOCABULARY)
    assert list(model.eos_token_ids) == [EOS]
    assert (model.dtype, model.weights) == ("float32", "full")
    assert model.total_blocks * model.block_size >= CONTEXT


BAD_REQUESTS = [
    ("prompts", GenerateRequest()),
    ("prompts[1].ids", make_request([1], [])),
    ("prompts[0].ids[2]", make_request([1, 2, VOCABULARY])),
    ("n", make_request([1], n=0)),
    ("n", make_request([1], n=129)),
    ("prompts", make_request(*[[1]] * 129)),
    ("n", make_request(*[[1]] * 3, n=64)),
    ("logprobs", make_request([1], logprobs=21)),
    ("prompt_logprobs", make_request([1], prompt_logprobs=21)),
    ("sampling.temperature", make_request([1], temperature=2.5)),
    ("sampling.temperature", make_request([1], temperature=float("nan"))),
    ("sampling.top_p", GenerateRequest(
        prompts=[TokenIds(ids=[1])], sampling=SamplingParams(top_p=-0.1))),
    ("sampling.top_k", GenerateRequest(
        prompts=[TokenIds(ids=[1])], sampling=SamplingParams(top_k=129))),
    ("sampling.min_p", GenerateRequest(
        prompts=[TokenIds(ids=[1])], sampling=SamplingParams(min_p=1.1))),
    ("stopping.min_tokens", GenerateRequest(
        prompts=[TokenIds(ids=[1])], stopping=StoppingParams(max_tokens=2, min_tokens=3))),
    ("stopping.stop_token_ids[1]", GenerateRequest(
        prompts=[TokenIds(ids=[1])], stopping=StoppingParams(stop_token_ids=[1, VOCABULARY]))),
    ("resume[0].sequence", make_request([1], resume=[ResumedSequence(sequence=1)])),
    ("resume[0].mirostat_mu", make_request([1], resume=[ResumedSequence(mirostat_mu=1.0)])),
    *(
        (f"sampling.{field}", GenerateRequest(prompts=[TokenIds(ids=[1])], sampling=sampling))
        for field, sampling in (
            *(
                (name, SamplingParams(**{name: value}))  # type: ignore[arg-type]
                for name in ("frequency_penalty", "presence_penalty")
                for value in (-2.1, 2.1, math.nan, math.inf)
            ),
            *(
                ("repetition_penalty", SamplingParams(repetition_penalty=value))
                for value in (0.0, -1.0, 1e-300, 2.1, math.nan, 1e300)
            ),
            (f"logit_bias[{VOCABULARY}]", SamplingParams(logit_bias={VOCABULARY: 1.0})),
            *(
                ("logit_bias[3]", SamplingParams(logit_bias={3: value}))
                for value in (-100.5, 101.0, math.nan, math.inf)
            ),
            *(
                ("dry.multiplier", SamplingParams(dry=DryParams(multiplier=value)))
                for value in (-1.0, math.nan, 1e300)
            ),
            *(
                ("dry.base", SamplingParams(dry=DryParams(multiplier=1, base=value)))
                for value in (0.9, math.nan, 1e300)
            ),
            (
                "dry.breaker_ids[1]",
                SamplingParams(dry=DryParams(multiplier=1, breaker_ids=[1, VOCABULARY])),
            ),
            (
                "dry.breaker_ids",
                SamplingParams(dry=DryParams(multiplier=1, breaker_ids=[1] * (VOCABULARY + 1))),
            ),
            *(
                (f"mirostat.{name}", SamplingParams(mirostat=MirostatParams(**{name: value})))
                for name in ("target_perplexity", "learning_rate")
                for value in (0.0, -1.0, 1e-300, 1e300, math.nan)
            ),
            *(
                (field, SamplingParams(allowed_token_ids=TokenIds(ids=ids)))
                for field, ids in (
                    ("allowed_token_ids.ids", []),
                    ("allowed_token_ids", [1] * (VOCABULARY + 1)),
                    ("allowed_token_ids.ids[1]", [1, VOCABULARY]),
                )
            ),
            *(
                (field, SamplingParams(bad_token_ids=[TokenIds(ids=ids) for ids in words]))
                for field, words in (
                    ("bad_token_ids[1].ids", [[1], []]),
                    ("bad_token_ids[0].ids[2]", [[1, 2, VOCABULARY]]),
                    ("bad_token_ids", [[1]] * 1_025),
                    ("bad_token_ids", [[1] * 16_384, [1]]),
                    ("bad_token_ids", [[token] for token in range(VOCABULARY)]),
                )
            ),
            (
                "bad_token_ids",
                SamplingParams(
                    allowed_token_ids=TokenIds(ids=[1, 2]),
                    bad_token_ids=[TokenIds(ids=[1]), TokenIds(ids=[2])],
                ),
            ),
            *(
                (name, SamplingParams(**{name: value}, mirostat=MirostatParams()))  # type: ignore[arg-type]
                for name, value in (
                    ("temperature", 0), ("top_p", 0.9), ("top_k", 5), ("min_p", 0.1)
                )
            ),
        )
    ),
    *(
        (field, GenerateRequest(
            prompts=[TokenIds(ids=[1])],
            n=2,
            beam_search=BeamSearch(length_penalty=penalty),
            **other,
        ))
        for field, penalty, other in (
            ("beam_search.length_penalty", math.nan, {}),
            ("beam_search.length_penalty", -10.5, {}),
            ("sampling.temperature", 1, {"sampling": SamplingParams(temperature=0.5)}),
            ("sampling.top_p", 1, {"sampling": SamplingParams(top_p=0.5)}),
            ("sampling.dry", 1, {"sampling": SamplingParams(dry=DryParams(multiplier=1))}),
            ("grammar", 1, {"grammar": GrammarSpec(regex="a")}),
            ("resume", 1, {"resume": [ResumedSequence(generated=TokenIds(ids=[3]))]}),
        )
    ),
    *(
        ("resume[0].mirostat_mu", GenerateRequest(
            prompts=[TokenIds(ids=[1])],
            sampling=SamplingParams(mirostat=MirostatParams()),
            resume=[resumed],
        ))
        for resumed in (
            ResumedSequence(generated=TokenIds(ids=[3])),
            ResumedSequence(generated=TokenIds(ids=[3]), mirostat_mu=math.nan),
        )
    ),
]  # fmt: skip


@pytest.mark.parametrize(("field", "request_"), BAD_REQUESTS, ids=[f for f, _ in BAD_REQUESTS])
async def test_invalid_request_is_refused_with_the_field_to_blame(
    channel: grpc.aio.Channel, field: str, request_: GenerateRequest
) -> None:
    error = await refused(channel, request_)
    assert error.code is grpc.StatusCode.INVALID_ARGUMENT
    assert error.field == field
    assert (await generate(channel, make_request([1, 2])))[-1].HasField("completed")


async def test_extreme_sampling_does_not_affect_other_requests(channel: grpc.aio.Channel) -> None:
    """Each value is within its documented range."""
    single, tiny = 3.4e38, 1e-45
    hostile = [
        SamplingParams(logit_bias=dict.fromkeys(range(VOCABULARY), -100.0)),
        SamplingParams(logit_bias={VOCABULARY - 1: 100.0}, repetition_penalty=tiny),
        SamplingParams(repetition_penalty=tiny, temperature=tiny, frequency_penalty=-2),
        SamplingParams(dry=DryParams(multiplier=single, base=single, allowed_length=0)),
        SamplingParams(dry=DryParams(multiplier=1, base=1e30), repetition_penalty=2),
        SamplingParams(dry=DryParams(multiplier=1, breaker_ids=range(VOCABULARY))),
        SamplingParams(dry=DryParams(multiplier=1, allowed_length=2**32 - 1)),
        SamplingParams(bad_token_ids=[TokenIds(ids=[token] * 340) for token in range(48)]),
        SamplingParams(
            allowed_token_ids=TokenIds(ids=range(VOCABULARY)),
            bad_token_ids=[TokenIds(ids=[1] * length) for length in range(2, 100)],
        ),
        *(
            SamplingParams(mirostat=MirostatParams(target_perplexity=target, learning_rate=rate))
            for target in (tiny, single)
            for rate in (tiny, single)
        ),
    ]
    neighbour = GenerateRequest(
        prompts=[TokenIds(ids=[5, 6, 7])],
        sampling=SamplingParams(seed=5),
        stopping=StoppingParams(max_tokens=60, ignore_eos=True),
    )
    alone = ids_of(await generate(channel, neighbour))
    requests = [
        GenerateRequest(
            prompts=[TokenIds(ids=[1, 2] * 16)],
            sampling=sampling,
            stopping=StoppingParams(
                max_tokens=50, ignore_eos=True, min_tokens=50, stop_token_ids=range(VOCABULARY - 1)
            ),
        )
        for sampling in hostile
    ]
    beside, *answers = await asyncio.gather(
        *(generate(channel, request) for request in (neighbour, *requests))
    )
    assert ids_of(beside) == alone
    for answer in answers:
        assert ids_of(answer) == [VOCABULARY - 1] * 50


async def test_request_for_an_unknown_model_is_refused(channel: grpc.aio.Channel) -> None:
    error = await refused(channel, make_request([1], model="other"))
    assert (error.code, error.reason) == (grpc.StatusCode.NOT_FOUND, "MODEL_NOT_FOUND")


async def test_prompt_that_fills_the_context_is_refused(channel: grpc.aio.Channel) -> None:
    error = await refused(channel, make_request([1] * CONTEXT))
    assert error.code is grpc.StatusCode.OUT_OF_RANGE
    assert error.reason == "CONTEXT_LENGTH_EXCEEDED"
    assert (await generate(channel, make_request([1] * (CONTEXT - 1))))[-1].HasField("completed")


async def test_session_sends_the_events_of_a_step_in_one_message(channel: grpc.aio.Channel) -> None:
    prompts = [[1, 2, i + 25] for i in range(16)]  # prompts without near ties between logits
    alone = [ids_of(await generate(channel, make_request(p, max_tokens=30))) for p in prompts]
    session = SessionClient(channel)
    await session.send(*(start(i, make_request(p, max_tokens=30)) for i, p in enumerate(prompts)))
    await session.call.done_writing()
    messages = 0
    while (response := await session.call.read()) is not grpc.aio.EOF:
        assert isinstance(response, engine_pb2.SessionResponse)
        session.events += response.events
        messages += 1
    assert [ids_of(session.of(i)) for i in range(16)] == alone
    assert messages < 16 * 30 / 4


async def test_invalid_request_does_not_end_its_session(channel: grpc.aio.Channel) -> None:
    session = SessionClient(channel)
    await session.send(start(1, make_request([VOCABULARY])), start(2, make_request([1])))
    await session.until_all_ended(1, 2)
    assert session.of(2)[-1].HasField("completed")
    [error] = [event.error for event in session.of(1)]
    assert ServiceError.from_status(error).field == "prompts[0].ids[0]"
    session.call.cancel()


async def test_cancelled_sequence_finishes_exactly_once(channel: grpc.aio.Channel) -> None:
    session = SessionClient(channel)
    await session.send(start(1, make_request([1, 2], n=3, max_tokens=90), credit=5))
    await session.until("delta", 1)
    await session.send(SessionCommand(handle=1, cancel=SessionCancel(sequences=[1])))
    finished = await session.until("finished", 1)
    assert finished.finished.sequence == 1
    assert finished.finished.reason == FinishReason.FINISH_REASON_CANCELLED
    await session.send(SessionCommand(handle=1, cancel=SessionCancel()))
    await session.until("completed", 1)
    ended = [e.finished.sequence for e in session.of(1) if e.HasField("finished")]
    assert sorted(ended) == [0, 1, 2]
    session.call.cancel()


async def test_commands_apply_to_a_request_that_still_starts(channel: grpc.aio.Channel) -> None:
    """A client that resumes after an engine loss sends start and cancel together."""
    request = make_request([1, 2], n=3, max_tokens=20)
    session = SessionClient(channel)
    await session.send(
        start(1, request, credit=1),
        SessionCommand(handle=1, cancel=SessionCancel(sequences=[1])),
        SessionCommand(handle=1, credit=SessionCredit(tokens=50)),
        start(2, request),
        SessionCommand(handle=2, cancel=SessionCancel()),
    )
    await session.until_all_ended(1, 2)
    finished = {e.finished.sequence: e.finished for e in session.of(1) if e.HasField("finished")}
    assert finished[1].reason == FinishReason.FINISH_REASON_CANCELLED
    assert [finished[sequence].completion_tokens for sequence in (0, 2)] == [20, 20]
    assert session.of(1)[-1].HasField("completed")
    [cancelled] = [event.error for event in session.of(2)]
    assert ServiceError.from_status(cancelled).reason == "CANCELLED"
    session.call.cancel()


async def test_sequence_pauses_and_resumes_with_its_credit(channel: grpc.aio.Channel) -> None:
    alone = ids_of(await generate(channel, make_request([4, 5], max_tokens=20)))
    session = SessionClient(channel)
    await session.send(start(1, make_request([4, 5], max_tokens=20), credit=3))
    await session.send(start(2, make_request([6], max_tokens=40)))
    await session.until("completed", 2)
    assert ids_of(session.of(1)) == alone[:3]
    await session.send(SessionCommand(handle=1, credit=SessionCredit(tokens=50)))
    await session.until("completed", 1)
    assert ids_of(session.of(1)) == alone
    session.call.cancel()


async def test_request_ends_at_its_deadline(channel: grpc.aio.Channel) -> None:
    session = SessionClient(channel)
    command = start(1, make_request([1, 2], max_tokens=90), credit=1)
    command.start.timeout_seconds = 0.2
    await session.send(command)
    error = (await session.until("error", 1)).error
    assert isinstance(error, status_pb2.Status)
    assert error.code == grpc.StatusCode.DEADLINE_EXCEEDED.value[0]
    session.call.cancel()


async def test_timeout_of_nan_is_refused(channel: grpc.aio.Channel) -> None:
    session = SessionClient(channel)
    command = start(1, make_request([1, 2]))
    command.start.timeout_seconds = math.nan
    await session.send(command, start(2, make_request([1])))
    error = ServiceError.from_status((await session.until("error", 1)).error)
    assert (error.code, error.field) == (grpc.StatusCode.INVALID_ARGUMENT, "timeout_seconds")
    await session.until("completed", 2)
    session.call.cancel()


async def test_session_ends_when_its_last_request_is_refused(channel: grpc.aio.Channel) -> None:
    """The session must not wait for the next step of another client's request."""
    session = SessionClient(channel)
    await session.send(start(1, make_request([VOCABULARY])))
    await session.call.done_writing()
    await session.until("error", 1)
    while (response := await session.call.read()) is not grpc.aio.EOF:
        assert isinstance(response, engine_pb2.SessionResponse)
        assert not [event for event in response.events if event.HasField("heartbeat")]


async def test_tenant_gets_no_prefix_hits_from_other_tenants(channel: grpc.aio.Channel) -> None:
    prompt = [5, 6, 7, 8] * 20
    await generate(channel, make_request(prompt), **{"x-tenant": "one"})
    theirs = await generate(channel, make_request(prompt), **{"x-tenant": "two"})
    assert theirs[-1].completed.usage.cached_tokens == 0
