"""Request bodies: their memory together, and the event loop while one is decoded."""

import asyncio
import base64
import threading

import grpc
import pytest
from starlette.types import Message, Receive, Scope

from services.http_shim.dialects.completions.read import read_completion
from services.http_shim.dialects.fields import JsonObject
from services.http_shim.dialects.reading import Read, Reading
from services.http_shim.errors import BodyTooLargeError
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


def blanks(kib: int) -> bytes:
    """Return an object without fields after so many KiB of blanks."""
    return b" " * (kib * KIB - 2) + b"{}"


async def test_event_loop_runs_while_a_large_body_is_decoded() -> None:
    """Otherwise all streams would stall, and this test would time out."""
    begun, done = threading.Event(), threading.Event()

    def parse(fields: JsonObject) -> JsonObject:
        begun.set()
        assert done.wait(HANG_SECONDS)
        return fields

    reader = BodyReader(1 << 20, 1 << 20)
    reading = asyncio.ensure_future(reader.read(SCOPE, pieces(blanks(100), b""), parse))
    await asyncio.to_thread(begun.wait, HANG_SECONDS)
    assert not reading.done()
    done.set()
    assert await reading == {}


async def test_event_loop_runs_while_a_large_body_with_images_is_read() -> None:
    begun, done = threading.Event(), threading.Event()

    def read(fields: JsonObject) -> Reading:
        begun.set()
        assert done.wait(HANG_SECONDS)
        return Reading([], {})

    async def prepare(_: JsonObject) -> Read:
        return read

    reader = BodyReader(1 << 20, 1 << 20)
    with reader.held() as held:
        body = pieces(blanks(100), b"")
        reading = asyncio.ensure_future(reader.read_with_images(SCOPE, body, held, prepare))
        await asyncio.to_thread(begun.wait, HANG_SECONDS)
        assert not reading.done()
        done.set()
        await reading


@pytest.mark.parametrize("kib", [1, 100])
async def test_body_is_decoded_once_to_plain_values(kib: int) -> None:
    """Small bodies are parsed by the event loop, large ones by a thread."""
    reader = BodyReader(1 << 20, 1 << 20)
    body = b" " * (kib - 1) * KIB + b'{"a": [1.5, null, "x"]}' + b" " * KIB
    assert await reader.read(SCOPE, pieces(body, b""), dict) == {"a": [1.5, None, "x"]}
    for wrong in (b"[]", b"{"):
        with pytest.raises(ServiceError) as refused:
            await reader.read(SCOPE, pieces(wrong + b" " * kib * KIB, b""), dict)
        assert refused.value.code is grpc.StatusCode.INVALID_ARGUMENT


@pytest.mark.parametrize("size", [1, 100 * KIB])
async def test_body_at_the_limit_of_nesting_is_read_or_refused(size: int) -> None:
    """A body that can be decoded may be too deep for what follows, which must not be a 500."""

    async def prepare(_: JsonObject) -> Read:
        return read_completion

    reader = BodyReader(1 << 20, 1 << 20)
    ends = set()
    for depth in range(800, 1_010):
        schema = b'{"a":' * depth + b"1" + b"}" * depth
        body = b" " * size + b'{"prompt": "x", "guided_json": %b}' % schema
        with reader.held() as held:
            try:
                await reader.read_with_images(SCOPE, pieces(body, b""), held, prepare)
                ends.add("read")
            except ServiceError as error:
                ends.add(error.reason)
    assert ends == {"read", "MALFORMED_JSON"}


async def test_memory_of_unfinished_bodies_is_bounded() -> None:
    reader = BodyReader(1024 * KIB, 1024 * KIB)
    held = [
        asyncio.ensure_future(reader.read(SCOPE, pieces(b" " * 600 * KIB), dict)) for _ in range(2)
    ]
    [refused], [waiting] = await asyncio.wait(held, return_when=asyncio.FIRST_COMPLETED)
    with pytest.raises(ServiceError) as raised:
        await refused
    assert raised.value.code is grpc.StatusCode.UNAVAILABLE
    assert raised.value.retry_seconds
    small = blanks(60)
    assert await reader.read(SCOPE, pieces(small, b""), dict) == {}, "small bodies must pass"
    waiting.cancel()
    await asyncio.wait([waiting])
    large = blanks(1000)
    assert await reader.read(SCOPE, pieces(large, b""), dict) == {}, (
        "memory of a cancelled body was not released"
    )


def read_url(fields: JsonObject) -> Reading:
    """Read a body that has at most the data URL of an image."""
    reading = Reading([], {})
    if url := fields.get("url"):
        reading.images.add(url, "images[0]")
    return reading


async def prepared(_: JsonObject) -> Read:
    return read_url


def with_image(size: int) -> bytes:
    return b'{"url": "data:image/png;base64,%b"}' % base64.b64encode(bytes(size))


async def test_images_may_exceed_the_limit_of_a_body_but_text_may_not() -> None:
    """Otherwise prompts of 70 MiB would be decoded, and refused only by the tokenizer service."""
    reader = BodyReader(300 * KIB, 4096 * KIB)
    with reader.held() as held:
        body = b" " * 200 * KIB + with_image(900 * KIB)
        reading = await reader.read_with_images(SCOPE, pieces(body, b""), held, prepared)
        assert reading.images.size == 900 * KIB
        for large in (blanks(301), b" " * 301 * KIB + with_image(900 * KIB)):
            with pytest.raises(BodyTooLargeError):
                await reader.read_with_images(SCOPE, pieces(large, b""), held, prepared)
    with pytest.raises(BodyTooLargeError):
        await reader.read(SCOPE, pieces(with_image(900 * KIB), b""), dict)


async def test_images_of_waiting_requests_count_until_they_are_released() -> None:
    """Requests may wait for a place at the model for minutes."""
    reader = BodyReader(100 * KIB, 1900 * KIB)
    body = with_image(900 * KIB)
    with reader.held() as first, reader.held() as second:
        await reader.read_with_images(SCOPE, pieces(body, b""), first, prepared)
        with pytest.raises(ServiceError) as refused:
            await reader.read_with_images(SCOPE, pieces(body, b""), second, prepared)
        assert refused.value.reason == "TOO_MANY_BODIES"
        second.release()
        first.release()
        await reader.read_with_images(SCOPE, pieces(body, b""), second, prepared)
    with reader.held() as third:
        await reader.read_with_images(SCOPE, pieces(body, b""), third, prepared)
