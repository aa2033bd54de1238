"""Sessions of the client: what a caller learns of the end of the stream."""

import asyncio
from collections.abc import AsyncIterator

import grpc
import pytest

from tokenwire.errors import ServiceError
from tokenwire.pb.engine.v1 import engine_pb2
from tokenwire.session import EngineSession, engine_session


class Ending:
    """A listener that keeps how its request ended."""

    def __init__(self) -> None:
        self.error: asyncio.Future[ServiceError] = asyncio.get_running_loop().create_future()

    def on_event(self, event: engine_pb2.SessionEvent) -> None:
        raise AssertionError(event)

    def on_error(self, error: ServiceError) -> None:
        self.error.set_result(error)


class Refusing(grpc.GenericRpcHandler):
    """A server that refuses every stream before it has read of it."""

    def service(
        self, handler_call_details: grpc.HandlerCallDetails
    ) -> "grpc.RpcMethodHandler[bytes, bytes]":
        async def refuse(
            requests: AsyncIterator[bytes], context: "grpc.aio.ServicerContext[bytes, bytes]"
        ) -> AsyncIterator[bytes]:
            await context.abort(grpc.StatusCode.UNAUTHENTICATED, "This key is not known.")
            yield b""

        return grpc.stream_stream_rpc_method_handler(refuse)


@pytest.fixture
async def refused() -> AsyncIterator[EngineSession]:
    server = grpc.aio.server()
    server.add_generic_rpc_handlers((Refusing(),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        yield engine_session(channel)
    await server.stop(None)


async def test_refusal_reaches_a_caller_that_still_writes(refused: EngineSession) -> None:
    """Taken for a lost stream, it would be sent again, and the caller would not learn why."""
    for _ in range(100):
        ending = Ending()
        handle = refused.open(ending)
        while not ending.error.done():
            refused.send(engine_pb2.SessionCommand(handle=handle))
            await asyncio.sleep(0)
        assert ending.error.result().code is grpc.StatusCode.UNAUTHENTICATED
