"""Messages that are not valid protobuf, at every service."""

import asyncio

import grpc
import pytest

from tests.stack import Stack
from tokenwire.channel import connect
from tokenwire.errors import ServiceError

ENGINE, COMPLETION = (
    "tokenwire.engine.v1.EngineService",
    "tokenwire.completion.v1.CompletionService",
)
TOKENIZER, GRAMMAR = (
    "tokenwire.tokenizer.v1.TokenizerService",
    "tokenwire.grammar.v1.GrammarService",
)
ORCA = "xds.service.orca.v3.OpenRcaService"
NO_MESSAGE = b"\xff\xff\xff"


async def read_to_end(call: "grpc.aio.StreamStreamCall[bytes, bytes]") -> None:
    while await call.read() is not grpc.aio.EOF:
        pass


def assert_blames_the_client(error: grpc.aio.AioRpcError) -> None:
    told = ServiceError.from_rpc_error(error)
    assert (told.code, told.reason) == (grpc.StatusCode.INVALID_ARGUMENT, "INVALID_MESSAGE")


@pytest.mark.parametrize(
    ("service", "method"),
    [
        (ENGINE, "Generate"),
        (COMPLETION, "Generate"),
        (TOKENIZER, "Encode"),
        (GRAMMAR, "Compile"),
        (ORCA, "StreamCoreMetrics"),
    ],
)
async def test_invalid_protobuf_request_is_refused(stack: Stack, service: str, method: str) -> None:
    async with connect(target_of(stack, service)) as channel:
        stub: grpc.aio.UnaryUnaryMultiCallable[bytes, bytes]
        stub = channel.unary_unary(f"/{service}/{method}")
        with pytest.raises(grpc.aio.AioRpcError) as raised:
            await stub(NO_MESSAGE)
    assert_blames_the_client(raised.value)


@pytest.mark.parametrize(
    ("service", "method"),
    [
        (ENGINE, "Session"),
        (COMPLETION, "Session"),
        (TOKENIZER, "DecodeStream"),
        (GRAMMAR, "Masks"),
    ],
)
async def test_invalid_protobuf_message_ends_its_stream(
    stack: Stack, service: str, method: str
) -> None:
    """Otherwise the stream would stay open without reading further messages."""
    async with asyncio.timeout(60), connect(target_of(stack, service)) as channel:
        stub: grpc.aio.StreamStreamMultiCallable[bytes, bytes]
        stub = channel.stream_stream(f"/{service}/{method}")
        call = stub()
        await call.write(NO_MESSAGE)
        with pytest.raises(grpc.aio.AioRpcError) as raised:
            await read_to_end(call)
    assert_blames_the_client(raised.value)


def target_of(stack: Stack, service: str) -> str:
    return {ENGINE: stack.engine, GRAMMAR: stack.grammar}.get(service, stack.tokenizer)
