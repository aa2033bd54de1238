"""Calls to a tokenizer service that is lost and comes back."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc
import pytest

from services.http_shim.backends.backend import Backend, BackendSettings
from tests.stack import Stack
from tokenwire.errors import ServiceError
from tokenwire.pb.tokenizer.v1.tokenizer_pb2 import DecodeRequest
from tokenwire.pb.types.v1.types_pb2 import TokenIds


class LosingRelay(grpc.GenericRpcHandler):
    """Forwards calls to a service, except for the first Decode calls, which it loses."""

    def __init__(self, channel: grpc.aio.Channel, losses: int) -> None:
        self._channel = channel
        self._losses = losses

    def service(
        self, handler_call_details: grpc.HandlerCallDetails
    ) -> "grpc.RpcMethodHandler[bytes, bytes]":
        method: str = handler_call_details.method
        if method.endswith("/Watch"):  # of the health
            return grpc.unary_stream_rpc_method_handler(self._stream(method))
        call: Any = self._channel.unary_unary(method)

        async def forward(request: bytes, context: grpc.aio.ServicerContext[Any, Any]) -> bytes:
            if method.endswith("/Decode") and self._losses:
                self._losses -= 1
                await context.abort(grpc.StatusCode.UNAVAILABLE, "lost")
            answer: bytes = await call(request)
            return answer

        return grpc.unary_unary_rpc_method_handler(forward)

    def _stream(self, method: str) -> Any:
        call: Any = self._channel.unary_stream(method)

        async def forward(
            request: bytes, _: grpc.aio.ServicerContext[Any, Any]
        ) -> AsyncIterator[bytes]:
            async for answer in call(request):
                yield answer

        return forward


@asynccontextmanager
async def backend_that_loses(losses: int, stack: Stack) -> AsyncIterator[Backend]:
    async with grpc.aio.insecure_channel(stack.tokenizer) as channel:
        server = grpc.aio.server()
        server.add_generic_rpc_handlers([LosingRelay(channel, losses)])
        port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        backend = Backend(f"127.0.0.1:{port}", BackendSettings())
        try:
            yield backend
        finally:
            await backend.close()
            await server.stop(None)


REQUEST = DecodeRequest(sequences=[TokenIds(ids=[65])])


async def test_call_is_repeated_after_two_losses(stack: Stack) -> None:
    async with backend_that_loses(2, stack) as backend:
        assert len((await backend.decode(REQUEST)).decodings) == 1


async def test_call_is_not_repeated_for_ever(stack: Stack) -> None:
    async with backend_that_loses(3, stack) as backend:
        with pytest.raises(ServiceError, match="lost"):
            await backend.decode(REQUEST)
