"""gRPC channels over a slow or interrupted network."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, closing

import grpc
import pytest
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from services.common.server import SERVER_OPTIONS
from tests.services.relay import relay
from tokenwire.channel import connect

SECONDS_AWAY = 0.4


@asynccontextmanager
async def delayed_service() -> AsyncIterator[str]:
    """Yield the host:port of a health service behind a relay that delays each connection."""
    server = grpc.aio.server()
    health_pb2_grpc.add_HealthServicer_to_server(health.aio.HealthServicer(), server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        async with relay(f"127.0.0.1:{port}", seconds_away=SECONDS_AWAY) as target:
            yield target
    finally:
        await server.stop(None)


async def test_call_waits_for_a_slow_connection() -> None:
    async with delayed_service() as target, connect(target) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        answer = await stub.Check(health_pb2.HealthCheckRequest())
    assert answer.status == health_pb2.HealthCheckResponse.SERVING


class Link:
    """Forwarder between a client and a server; it discards all bytes once `is_cut`."""

    def __init__(self) -> None:
        self.is_cut = False
        self.pieces = asyncio.Semaphore(0)
        """Released for each chunk of bytes that the client sends"""

    async def pump(
        self, source: asyncio.StreamReader, sink: asyncio.StreamWriter, *, counts: bool
    ) -> None:
        with closing(sink):
            while data := await source.read(65_536):
                if not self.is_cut:
                    sink.write(data)
                if counts:
                    self.pieces.release()


@asynccontextmanager
async def service_behind(link: Link) -> AsyncIterator[str]:
    """Yield the host:port of a health service with the options of our servers."""
    server = grpc.aio.server(options=SERVER_OPTIONS)
    health_pb2_grpc.add_HealthServicer_to_server(health.aio.HealthServicer(), server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()

    async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        far_reader, far_writer = await asyncio.open_connection("127.0.0.1", port)
        await asyncio.gather(
            link.pump(reader, far_writer, counts=True),
            link.pump(far_reader, writer, counts=False),
        )

    way = await asyncio.start_server(connected, "127.0.0.1", 0)
    try:
        yield f"127.0.0.1:{way.sockets[0].getsockname()[1]}"
    finally:
        way.close()
        await server.stop(None)


async def test_call_to_a_silent_server_fails_after_the_given_seconds() -> None:
    """A frozen or unreachable server closes no connection: without pings, clients wait forever."""
    link = Link()
    async with service_behind(link) as target, connect(target, 1.0) as channel:
        call = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest())
        assert (await call.read()).status == health_pb2.HealthCheckResponse.SERVING
        while not link.pieces.locked():
            await link.pieces.acquire()
        for _ in range(4):  # a client that only reads still sends pings
            await asyncio.wait_for(link.pieces.acquire(), 10)
        link.is_cut = True
        with pytest.raises(grpc.aio.AioRpcError) as lost:
            await asyncio.wait_for(call.read(), 10)
    assert lost.value.code() is grpc.StatusCode.UNAVAILABLE
