"""HTTP server on loopback with scripted completions."""

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

Answer = Callable[[dict[str, Any]], Awaitable[Sequence[bytes]]]
"""Function from a request's body to the pieces of its response, which are written one by one"""


@dataclass
class Seen:
    """Requests that the server received."""

    bodies: list[dict[str, Any]] = field(default_factory=list)
    running: int = 0
    most_running: int = 0
    refuses: set[str] = field(default_factory=set)
    """Fields of a body that are answered with status 400"""


@asynccontextmanager
async def scripted_server(
    answer: Answer, status: int = 200, *, keeps_alive: bool = True
) -> AsyncIterator[tuple[str, Seen]]:
    """Yield the server's URL and its requests.

    Without `keeps_alive`, the server closes each connection without a `connection: close` header.
    """
    seen = Seen()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while head := await _head(reader):
            (length,) = [
                int(line.split(":")[1])
                for line in head.decode().lower().splitlines()
                if line.startswith("content-length")
            ]
            seen.bodies.append(json.loads(await reader.readexactly(length)))
            seen.running += 1
            seen.most_running = max(seen.most_running, seen.running)
            pieces = await answer(seen.bodies[-1])
            seen.running -= 1
            code = 400 if seen.refuses & seen.bodies[-1].keys() else status
            writer.write(b"HTTP/1.1 %d X\r\ntransfer-encoding: chunked\r\n\r\n" % code)
            for piece in pieces:
                writer.write(b"%x\r\n%b\r\n" % (len(piece), piece))
                await writer.drain()
            writer.write(b"0\r\n\r\n")
            if not keeps_alive:
                break
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    host, port = server.sockets[0].getsockname()
    try:
        yield f"http://{host}:{port}", seen
    finally:
        server.close()


async def _head(reader: asyncio.StreamReader) -> bytes:
    try:
        return await reader.readuntil(b"\r\n\r\n")
    except (asyncio.IncompleteReadError, ConnectionError):
        return b""


def event(data: object) -> bytes:
    return b"data: " + json.dumps(data).encode() + b"\n\n"


def stream(events: int, tokens: int) -> bytes:
    """Return a completion of `tokens` tokens in `events` events, its end, usage and [DONE]."""
    text = [event({"choices": [{"text": f"t{i}", "finish_reason": None}]}) for i in range(events)]
    end = event({"choices": [{"text": "", "finish_reason": "length"}]})
    usage = event({"choices": [], "usage": {"prompt_tokens": 3, "completion_tokens": tokens}})
    return b"".join([*text, end, usage, b"data: [DONE]\n\n"])
