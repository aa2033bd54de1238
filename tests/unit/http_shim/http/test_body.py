"""Request bodies: their memory together, and the event loop while one is decoded."""

import asyncio
import base64
import threading
from dataclasses import dataclass

import grpc
import pytest
from starlette.types import Message, Receive, Scope

from services.http_shim.errors import BodyTooLargeError
from services.http_shim.http.body import BodyReader
from services.http_shim.images.request_images import RequestImages
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


@dataclass(frozen=True)
class Parsed:
    """A body that is an image's data URL, and blanks around it."""

    images: RequestImages


def parse_url(body: bytes) -> Parsed:
    images = RequestImages()
    if url := body.decode().strip():
        images.add(url, "images[0]")
    return Parsed(images)


def image_url(size: int) -> bytes:
    return b"data:image/png;base64," + base64.b64encode(bytes(size))


async def test_images_may_exceed_the_limit_of_a_body_but_text_may_not() -> None:
    """Otherwise prompts of 70 MiB would be decoded, and refused only by the tokenizer service."""
    reader = BodyReader(300 * KIB, 4096 * KIB)
    with reader.held() as held:
        body = b" " * 200 * KIB + image_url(900 * KIB)
        parsed = await reader.read_with_images(SCOPE, pieces(body, b""), parse_url, held)
        assert parsed.images.size == 900 * KIB
        for blanks in (b" " * 301 * KIB, b" " * 301 * KIB + image_url(900 * KIB)):
            with pytest.raises(BodyTooLargeError):
                await reader.read_with_images(SCOPE, pieces(blanks, b""), parse_url, held)
    with pytest.raises(BodyTooLargeError):
        await reader.read(SCOPE, pieces(image_url(900 * KIB), b""), len)


async def test_images_of_waiting_requests_count_until_they_are_released() -> None:
    """Requests may wait for a place at the model for minutes."""
    reader = BodyReader(100 * KIB, 1900 * KIB)
    body = image_url(900 * KIB)
    with reader.held() as first, reader.held() as second:
        await reader.read_with_images(SCOPE, pieces(body, b""), parse_url, first)
        with pytest.raises(ServiceError) as refused:
            await reader.read_with_images(SCOPE, pieces(body, b""), parse_url, second)
        assert refused.value.reason == "TOO_MANY_BODIES"
        second.release()
        first.release()
        await reader.read_with_images(SCOPE, pieces(body, b""), parse_url, second)
    with reader.held() as third:
        await reader.read_with_images(SCOPE, pieces(body, b""), parse_url, third)
