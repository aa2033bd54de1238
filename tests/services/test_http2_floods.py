"""Floods of HTTP/2 frames on a gRPC port, which arrive before the caller shows who it is."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc
import pytest

from services.common.server import SERVER_OPTIONS

HANG_SECONDS = 60
HEADERS, RST_STREAM, SETTINGS, PING, GOAWAY = 1, 3, 4, 6, 7
ENHANCE_YOUR_CALM = 11


class Calls:
    """A method that counts its calls and ends none."""

    def __init__(self) -> None:
        self.count = 0

    async def wait(self, request: bytes, context: grpc.aio.ServicerContext[Any, Any]) -> bytes:
        self.count += 1
        await asyncio.Event().wait()
        return b""

    async def wait_stream(
        self, requests: AsyncIterator[bytes], context: grpc.aio.ServicerContext[Any, Any]
    ) -> bytes:
        return await self.wait(b"", context)


@pytest.fixture
async def calls() -> Calls:
    return Calls()


@pytest.fixture
async def port(calls: Calls) -> AsyncIterator[int]:
    """The port of a server with the options of our services."""
    server = grpc.aio.server(options=SERVER_OPTIONS)
    handler: Any = grpc.stream_unary_rpc_method_handler(calls.wait_stream)
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("s", {"m": handler}),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    yield port
    await server.stop(None)


def frame(kind: int, flags: int, stream: int, content: bytes = b"") -> bytes:
    return (
        len(content).to_bytes(3, "big") + bytes([kind, flags]) + stream.to_bytes(4, "big") + content
    )


def call_headers(stream: int) -> bytes:
    """Return the frame that begins a call of the method, and leaves its side open."""
    fields = {
        ":method": "POST",
        ":scheme": "http",
        ":path": "/s/m",
        ":authority": "x",
        "te": "trailers",
        "content-type": "application/grpc",
    }
    # literal fields without indexing (RFC 7541, section 6.2.2)
    block = b"".join(
        b"\x00" + b"".join(bytes([len(text)]) + text.encode() for text in field)
        for field in fields.items()
    )
    return frame(HEADERS, 4, stream, block)


@asynccontextmanager
async def connected(
    port: int,
) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    """Connect as an HTTP/2 client."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + frame(SETTINGS, 0, 0))
    try:
        async with asyncio.timeout(HANG_SECONDS):
            yield reader, writer
    finally:
        writer.close()


async def frames(reader: asyncio.StreamReader) -> AsyncIterator[tuple[int, int, bytes]]:
    """Yield kind, flags and content of each frame."""
    while True:
        head = await reader.readexactly(9)
        yield head[3], head[4], await reader.readexactly(int.from_bytes(head[:3], "big"))


async def test_streams_beyond_the_limit_are_refused_before_they_reach_a_service(
    port: int, calls: Calls
) -> None:
    """Otherwise one connection without a token could fill the memory with open calls."""
    async with connected(port) as (reader, writer):
        writer.write(b"".join(call_headers(2 * i + 1) for i in range(3_000)))
        refused = 0
        async for kind, _, content in frames(reader):
            if kind == RST_STREAM:
                assert int.from_bytes(content, "big") == ENHANCE_YOUR_CALM
                refused += 1
                if refused == 2_000:
                    break
    assert calls.count <= 1_000


async def test_flood_of_pings_ends_its_connection(port: int) -> None:
    async with connected(port) as (reader, writer):
        writer.write(frame(PING, 0, 0, b"12345678") * 5_000)
        async for kind, _, content in frames(reader):
            if kind == GOAWAY:
                assert int.from_bytes(content[4:8], "big") == ENHANCE_YOUR_CALM
                break


async def test_pings_of_a_waiting_client_end_nothing(port: int) -> None:
    """Gateways ping while a call waits for its only message."""
    async with connected(port) as (reader, writer):
        writer.write(call_headers(1) + frame(PING, 0, 0, b"12345678") * 500)
        answers = 0
        async for kind, flags, _ in frames(reader):
            assert kind != GOAWAY
            answers += kind == PING and flags == 1
            if answers == 500:
                break
