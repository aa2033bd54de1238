"""Request bodies: their memory together, and the event loop while one is decoded."""

import asyncio
import threading

import grpc
import pytest
from starlette.types import Message, Receive, Scope

from services.http_shim.http.body import BodyReader
from tokenwire.errors import ServiceError

KIB = 1024
HANG_SECONDS = 20
SCOPE: Scope = {"type": "http", "headers": [(b"content-type", b"application/json")]}


def pieces(*bodies: bytes) -> Receive:
    """Return a `receive` with these pieces; an empty piece ends the body."""
    messages: asyncio.Queue[Message] = asyncio.Queue()
    for body in bodies:
        messages.put_nowait({"type": "http.request", "body": body, "more_body": bool(body)})
    return messages.get


async def test_event_loop_runs_while_a_large_body_is_decoded() -> None:
    """Otherwise all streams would stall, and this test would time out."""
    begun, done = threading.Event(), threading.Event()

    def decode(body: bytes) -> int:
        begun.set()
        assert done.wait(HANG_SECONDS)
        return len(body)

    reader = BodyReader(1 << 20, 1 << 20)
    body = b" " * 100 * KIB
    reading = asyncio.ensure_future(reader.read(SCOPE, pieces(body, b""), decode))
    await asyncio.to_thread(begun.wait, HANG_SECONDS)
    assert not reading.done()
    done.set()
    assert await reading == len(body)


async def test_memory_of_unfinished_bodies_is_bounded() -> None:
    reader = BodyReader(1024 * KIB, 1024 * KIB)
    held = [
        asyncio.ensure_future(reader.read(SCOPE, pieces(b" " * 600 * KIB), len)) for _ in range(2)
    ]
    [refused], [waiting] = await asyncio.wait(held, return_when=asyncio.FIRST_COMPLETED)
    with pytest.raises(ServiceError) as raised:
        await refused
    assert raised.value.code is grpc.StatusCode.UNAVAILABLE
    assert raised.value.retry_seconds
    small = b" " * 60 * KIB
    assert await reader.read(SCOPE, pieces(small, b""), len) == len(small), "small bodies must pass"
    waiting.cancel()
    await asyncio.wait([waiting])
    large = b" " * 1000 * KIB
    assert await reader.read(SCOPE, pieces(large, b""), len) == len(large), (
        "memory of a cancelled body was not released"
    )
