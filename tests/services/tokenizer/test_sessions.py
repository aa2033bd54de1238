"""Sessions of the tokenizer service: errors, cancellation, credit, deadlines, lost clients."""

import asyncio
import math

import grpc
import pytest

from tests.services.tokenizer.completion_client import (
    GREEDY,
    Services,
    endless,
    make_request,
    tokens,
)
from tests.stack import left_early, metrics_of
from tokenwire.errors import ServiceError
from tokenwire.pb.completion.v1 import completion_pb2 as completion
from tokenwire.pb.types.v1 import types_pb2 as types


async def test_failed_request_does_not_affect_others_of_its_session(services: Services) -> None:
    prompts = ["import os", "class A", "def f(", "for i"]
    alone = [
        await services.complete(prompt, sampling=GREEDY, stopping=tokens(16)) for prompt in prompts
    ]
    requests = [make_request(p, sampling=GREEDY, stopping=tokens(16)) for p in prompts]
    started = [services.start(request)[1] for request in requests]
    _, bad = services.start(make_request("a", n=0))
    together = await asyncio.gather(*(events.ended for events in started))
    assert [answer.texts for answer in together] == [answer.texts for answer in alone]
    with pytest.raises(ServiceError) as caught:
        await bad.ended
    assert caught.value.field == "n"


async def test_timeout_of_nan_is_refused(services: Services) -> None:
    context = completion.RequestContext(timeout_seconds=math.nan)
    _, bad = services.start(make_request("a", stopping=tokens(1)), context=context)
    _, good = services.start(make_request("a", stopping=tokens(1)))
    with pytest.raises(ServiceError) as caught:
        await bad.ended
    assert caught.value.field == "context.timeout_seconds"
    assert (await good.ended).texts


async def test_cancelled_session_request_ends_and_is_counted(services: Services) -> None:
    cancelled = 'tokenwire_tokenizer_requests_total{outcome="cancelled"}'
    before = (await metrics_of(services.target)).get(cancelled, 0)
    request = make_request("import", n=2, stopping=endless())
    # with less credit than max_tokens, no choice can end before the cancellation
    handle, events = services.start(request, credit=1_000)
    await events.began
    cancel = completion.SessionCommand(handle=handle, cancel=completion.SessionCancel())
    services.session.send(cancel)
    answer = await events.ended
    reasons = {finished.reason for finished in answer.finished.values()}
    assert reasons == {types.FINISH_REASON_CANCELLED}
    await services.idle()
    assert (await metrics_of(services.target))[cancelled] == before + 1


async def test_credit_limits_the_tokens_sent(services: Services) -> None:
    """A slow client limits its own memory by credit."""
    request = make_request("import", stopping=tokens(64, ignore_eos=True))
    handle, events = services.start(request, credit=5)
    _, other = services.start(request)
    await other.ended
    assert len(events.answer.ids[0]) == 5
    credit = completion.SessionCommand(handle=handle, credit=completion.SessionCredit(tokens=100))
    services.session.send(credit)
    answer = await events.ended
    assert len(answer.ids[0]) == 64
    assert answer.deltas > 1


async def test_credit_of_0_tokens_is_refused(services: Services) -> None:
    credit = completion.SessionCommand(handle=1, credit=completion.SessionCredit())
    call = services.completions.Session()
    await call.write(completion.SessionRequest(commands=[credit]))
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call.read()
    assert ServiceError.from_rpc_error(caught.value).field == "commands.credit.tokens"


async def test_session_request_ends_at_its_deadline(services: Services) -> None:
    context = completion.RequestContext(timeout_seconds=0.5)
    _, events = services.start(make_request("a", n=32, stopping=endless()), context=context)
    with pytest.raises(ServiceError) as caught:
        await events.ended
    assert caught.value.code is grpc.StatusCode.DEADLINE_EXCEEDED
    await services.idle()


async def test_disconnected_client_stops_generation(services: Services) -> None:
    async with left_early(services.engine, 4 * 1_500):
        call = services.completions.Generate(make_request("import", n=4, stopping=endless()))
        async for response in call:
            if response.HasField("delta"):
                call.cancel()
                break
    async with left_early(services.engine, 4 * 1_500):
        stream = services.completions.Session()
        start = completion.SessionStart(request=make_request("import", n=4, stopping=endless()))
        command = completion.SessionCommand(handle=1, start=start)
        await stream.write(completion.SessionRequest(commands=[command]))
        await stream.read()
        stream.cancel()
