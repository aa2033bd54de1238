"""Session messages with very many commands or very much credit."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest

from tests.stack import Stack
from tokenwire.channel import connect
from tokenwire.pb.completion.v1 import completion_pb2, models_pb2
from tokenwire.pb.completion.v1.completion_pb2_grpc import CompletionServiceStub
from tokenwire.pb.engine.v1 import engine_pb2
from tokenwire.pb.engine.v1.engine_pb2_grpc import EngineControlServiceStub, EngineServiceStub

MANY = 20_000
MOST_CREDIT = 2**32 - 1
HANG_SECONDS = 120


@pytest.fixture
async def tokenizer(stack: Stack) -> AsyncIterator[grpc.aio.Channel]:
    async with connect(stack.tokenizer) as channel:
        yield channel


def bad_completion(handle: int) -> completion_pb2.SessionCommand:
    """Return a start command without a prompt."""
    start = completion_pb2.SessionStart()
    return completion_pb2.SessionCommand(handle=handle, start=start)


async def rest(call: Any) -> int:
    """Read the call to its end, and return the number of events."""
    count = 0
    while (response := await call.read()) is not grpc.aio.EOF:
        count += len(response.events)
    return count


async def test_tokenizer_serves_others_during_a_flood_of_starts(
    tokenizer: grpc.aio.Channel,
) -> None:
    stub = CompletionServiceStub(tokenizer)
    commands = [bad_completion(handle) for handle in range(1, MANY + 1)]
    async with asyncio.timeout(HANG_SECONDS):
        call: Any = stub.Session()
        await call.write(completion_pb2.SessionRequest(commands=commands))
        await call.done_writing()
        answered = len((await call.read()).events)
        await stub.ListModels(models_pb2.ListModelsRequest())
        assert answered < MANY, "the neighbour was answered after all of the flood"
        answered += await rest(call)
    assert answered == MANY


async def test_engine_serves_others_during_a_flood_of_starts(channel: grpc.aio.Channel) -> None:
    commands = [
        engine_pb2.SessionCommand(handle=handle, start=engine_pb2.SessionStart())
        for handle in range(1, MANY + 1)
    ]
    async with asyncio.timeout(HANG_SECONDS):
        call: Any = EngineServiceStub(channel).Session()
        await call.write(engine_pb2.SessionRequest(commands=commands))
        await call.done_writing()
        answered = len((await call.read()).events)
        await EngineControlServiceStub(channel).GetModel(engine_pb2.GetModelRequest())
        assert answered < MANY, "the neighbour was answered after all of the flood"
        answered += await rest(call)
    assert answered == MANY


async def test_credit_beyond_the_maximum_saturates(tokenizer: grpc.aio.Channel) -> None:
    """The grant arrives while the prompt is encoded, before the engine has the request."""
    prompt = completion_pb2.Prompt(text="x = 1\n" * 1_000)
    request = completion_pb2.GenerateRequest(
        prompts=completion_pb2.Prompts(items=[prompt]), truncate_prompt=True
    )
    request.stopping.max_tokens = 3
    request.stopping.ignore_eos = True
    start = completion_pb2.SessionStart(request=request, credit=MOST_CREDIT)
    more = completion_pb2.SessionCredit(tokens=MOST_CREDIT)
    message = completion_pb2.SessionRequest(
        commands=[
            completion_pb2.SessionCommand(handle=1, start=start),
            completion_pb2.SessionCommand(handle=1, credit=more),
        ]
    )
    async with asyncio.timeout(HANG_SECONDS):
        call = CompletionServiceStub(tokenizer).Session()
        await call.write(message)
        await call.done_writing()
        events = [event async for response in call for event in response.events]
    assert not any(event.HasField("error") for event in events)
    assert events[-1].response.completed.usage.completion_tokens == 3


async def test_large_chats_of_a_tenant_do_not_delay_those_of_another(
    tokenizer: grpc.aio.Channel,
) -> None:
    """They share the threads and the process that render and encode."""

    def chat(handle: int, tenant: str) -> completion_pb2.SessionCommand:
        part = completion_pb2.ContentPart(text="some words " * 4_000)  # longer than the context
        message = completion_pb2.Message(role=completion_pb2.ROLE_USER, parts=[part])
        start = completion_pb2.SessionStart(
            request=completion_pb2.GenerateRequest(
                conversation=completion_pb2.Conversation(messages=[message])
            ),
            context=completion_pb2.RequestContext(tenant=tenant),
        )
        return completion_pb2.SessionCommand(handle=handle, start=start)

    many, one = 60, 61
    call: Any = CompletionServiceStub(tokenizer).Session()
    commands = [chat(handle, "many") for handle in range(1, many + 1)]
    ended: list[int] = []
    async with asyncio.timeout(HANG_SECONDS):
        await call.write(completion_pb2.SessionRequest(commands=[*commands, chat(one, "one")]))
        await call.done_writing()
        while (response := await call.read()) is not grpc.aio.EOF:
            ended += [event.handle for event in response.events if event.HasField("error")]
    assert len(ended) == one
    assert ended.index(one) < many // 2
