"""HTTP/1.1 client with low CPU use during a measurement.

The client shares its cores with the server. It only records the pieces of a reply and their
times of arrival; the caller parses them after the measurement.
"""

import asyncio
import ssl
import time
from dataclasses import dataclass, field
from typing import cast
from urllib.parse import urlsplit

import httptools

__all__ = ["HttpClient", "HttpReply"]


@dataclass(slots=True)
class HttpReply:
    """The body of a reply in the pieces that arrived, each with its time (`time.perf_counter`)."""

    status: int = 0
    pieces: list[tuple[float, bytes]] = field(default_factory=list)

    @property
    def body(self) -> bytes:
        return b"".join(piece for _, piece in self.pieces)


class _Connection(asyncio.Protocol):
    """One keep-alive connection; it carries one request at a time."""

    def __init__(self) -> None:
        self._transport: asyncio.Transport | None = None
        self._parser = httptools.HttpResponseParser(self)
        self._reply = HttpReply()
        self._complete: asyncio.Future[HttpReply] | None = None
        self._arrived = 0.0
        self.reusable = True
        self.answered = False

    async def request(self, message: bytes) -> HttpReply:
        assert self._transport is not None
        self.answered = False
        self._complete = asyncio.get_running_loop().create_future()
        self._parser = httptools.HttpResponseParser(self)
        self._reply = HttpReply()
        self._transport.write(message)
        return await self._complete

    def close(self) -> None:
        self.reusable = False
        if self._transport is not None:
            self._transport.abort()

    # asyncio.Protocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        self._arrived = time.perf_counter()
        self.answered = True
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            self._fail(ConnectionError(f"not HTTP: {error}"))
            self.close()

    def connection_lost(self, exc: Exception | None) -> None:
        self.reusable = False
        self._fail(exc or ConnectionError("the server closed the connection"))

    # httptools callbacks

    def on_body(self, piece: bytes) -> None:
        self._reply.pieces.append((self._arrived, piece))

    def on_message_complete(self) -> None:
        self._reply.status = self._parser.get_status_code()
        self.reusable = self.reusable and self._parser.should_keep_alive()
        if self._complete is not None and not self._complete.done():
            self._complete.set_result(self._reply)

    def _fail(self, error: Exception) -> None:
        if self._complete is not None and not self._complete.done():
            self._complete.set_exception(error)


class HttpClient:
    """Requests to one server over as many connections as there are requests at a time."""

    def __init__(
        self,
        url: str,
        *,
        timeout: float = 300.0,
        key: str = "",
        tls: ssl.SSLContext | None = None,
    ) -> None:
        """key: API key of each request; empty = none. tls: for https; None = the system's."""
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or parts.hostname is None:
            raise ValueError(f"expected a URL such as http://127.0.0.1:8000, not {url!r}")
        is_secure = parts.scheme == "https"
        self._tls = (tls or ssl.create_default_context()) if is_secure else None
        self._host = parts.hostname
        self._port = parts.port or (443 if is_secure else 80)
        self._path = parts.path.rstrip("/")
        self._timeout = timeout
        self._authorization = f"authorization: Bearer {key}\r\n" if key else ""
        self._idle: list[_Connection] = []

    async def get(self, path: str) -> HttpReply:
        return await self._send(self._head("GET", path) + b"\r\n")

    async def post(self, path: str, body: bytes) -> HttpReply:
        """Send a JSON body. Raises OSError or TimeoutError when no whole response comes back."""
        head = self._head("POST", path)
        head += b"content-type: application/json\r\ncontent-length: %d\r\n\r\n" % len(body)
        return await self._send(head + body)

    def close(self) -> None:
        while self._idle:
            self._idle.pop().close()

    def _head(self, method: str, path: str) -> bytes:
        host = f"[{self._host}]" if ":" in self._host else self._host
        head = f"{method} {self._path}{path} HTTP/1.1\r\nhost: {host}:{self._port}\r\n"
        return (head + self._authorization).encode()

    async def _send(self, message: bytes) -> HttpReply:
        while connection := self._idle_connection():
            try:
                return await self._exchange(connection, message)
            except ConnectionError:
                if connection.answered:
                    raise
                # A server may close an idle connection at any time: try another one.
        return await self._exchange(await self._fresh_connection(), message)

    async def _exchange(self, connection: _Connection, message: bytes) -> HttpReply:
        try:
            async with asyncio.timeout(self._timeout):
                response = await connection.request(message)
        except BaseException:
            connection.close()
            raise
        if connection.reusable:
            self._idle.append(connection)
        else:
            connection.close()
        return response

    def _idle_connection(self) -> _Connection | None:
        while self._idle:
            connection = self._idle.pop()
            if connection.reusable:
                return connection
        return None

    async def _fresh_connection(self) -> _Connection:
        loop = asyncio.get_running_loop()
        _, connection = await loop.create_connection(
            _Connection, self._host, self._port, ssl=self._tls
        )
        return connection
