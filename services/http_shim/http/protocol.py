"""A connection with a client: how large a head may be, and how long a client may keep us waiting.

uvicorn documents nothing of what is relied upon here, as 0.40 to 0.54 have it:

- HttpToolsProtocol listens to `parser`, and `data_received` does no more than to feed that, after
  `_unset_keepalive_if_required`; `on_response_complete` follows every answer;
- its `cycle` is the latest request, with `response_started`, `response_complete`, `keep_alive`
  (cleared, it closes the connection behind the answer), and `disconnected`, told to the application
  by `message_event`; `url`, `headers` and `scope` are of the latest head;
- it answers with `app`; the cycle decides at the answer's start whether to send chunks, unless
  `chunked_encoding` says it already, and without them sends `expected_content_length` more bytes;
- `flow` says whether reading or writing is paused, and resumes reading; nothing is written while
  writing is paused;
- `loop`, `transport`, `timeout_keep_alive` and `server_state.default_headers`.
"""

import asyncio
import logging
import math
from collections.abc import Iterable
from http import HTTPStatus
from typing import ClassVar, cast

import httptools
from starlette.types import Message, Receive, Scope, Send
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from services.common.interceptor import sane_request_id
from services.http_shim.errors import refusal
from services.http_shim.http.exchange import exchange_of
from services.http_shim.metrics import NO_ROUTE, REQUESTS

__all__ = ["HttpProtocol", "protocol_of"]

_LOG = logging.getLogger("connection")
_MAX_HEAD_BYTES = 64 * 1024
_BEATS = 4  # in a stall: it is noticed late by one of them at most
_FRAMING = (b"content-length", b"transfer-encoding")  # which say where a body ends


def protocol_of(stall_seconds: float) -> type["HttpProtocol"]:
    """The protocol of connections whose clients may keep us waiting for so long."""
    return type("HttpProtocol", (HttpProtocol,), {"stall_seconds": stall_seconds})


class HttpProtocol(HttpToolsProtocol):
    """uvicorn's, with limits, and with the API's errors for what never reaches a route.

    One request at a time: what a client sends behind one that still runs is dropped, and the
    connection is closed after the answer, so that reading never pauses and who leaves is noticed.
    """

    stall_seconds: ClassVar[float]

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._heads = self.parser
        self._offers_upgrade = False  # with a body, which the parser takes for what comes after
        self._in_head = True  # or before it; else in the body
        self._is_deaf = False  # what still comes is dropped
        self._undelivered = 0  # bytes since the parser had a head, a piece of a body or its end
        self._unsent = 0  # bytes at the last beat
        self._heard = self._moved = self.loop.time()  # when the client sent, and when it read
        self._timer = self.loop.call_later(self.stall_seconds / _BEATS, self._beat)

    def connection_lost(self, exc: Exception | None) -> None:
        self._timer.cancel()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._is_deaf:
            return
        if not self._in_head or self._is_idle():
            self._heard = self.loop.time()  # a head has one stall for all of it
        self._undelivered += len(data)
        self._parse(data)
        has_ended = self._is_deaf or self.transport.is_closing()
        if self._undelivered > _MAX_HEAD_BYTES and not has_ended:
            self.send_400_response("")

    def _parse(self, data: bytes) -> None:
        self._unset_keepalive_if_required()
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserUpgrade as offer:
            rest = data[offer.args[0] :]
            if self._offers_upgrade:
                self._offers_upgrade = False
                self.parser = httptools.HttpRequestParser(_Body(self))
                rest = b"POST / HTTP/1.1\r\n%b\r\n%b" % (self._framing(), rest)
            if rest:
                self._parse(rest)
        except httptools.HttpParserError:
            self.send_400_response("")

    def _framing(self) -> bytes:
        """The lines of the head that say where the body ends; none: there is no body."""
        lines = [b"%b: %b\r\n" % field for field in self.headers if field[0] in _FRAMING]
        return b"".join(lines)

    def on_message_begin(self) -> None:
        if self._is_answering():
            raise ValueError("a request came behind one that still runs")
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        if self._undelivered > _MAX_HEAD_BYTES and self._head_bytes() > _MAX_HEAD_BYTES:
            raise ValueError("the head is too large")
        has_chunks = self.parser.get_http_version() == "1.1"
        self.app = self._answer_with_trailers if has_chunks else self._answer_without_chunks
        super().on_headers_complete()
        self._in_head = False
        self._undelivered = 0
        self._offers_upgrade = self.parser.should_upgrade() and bool(self._framing())

    def on_body(self, body: bytes) -> None:
        super().on_body(body)
        self._undelivered = 0

    def on_message_complete(self) -> None:
        if self._offers_upgrade:
            return
        self.parser = self._heads
        super().on_message_complete()
        self._in_head = True
        self._undelivered = 0

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._heard = self.loop.time()

    def send_400_response(self, msg: str) -> None:
        """What can't be parsed, or is too large, is the last that is read."""
        if self._is_answering():
            _LOG.info("a request came behind one that still runs and is dropped")
            self._is_deaf = True
            self.cycle.keep_alive = False
        elif self._undelivered > _MAX_HEAD_BYTES:
            size = f"{_MAX_HEAD_BYTES} bytes"
            self._refuse(431, f"The request's head is larger than {size}.", "head_too_large")
        else:
            self._refuse(400, "The request is not valid HTTP.", "invalid_http")

    def _refuse(self, status: int, message: str, code: str) -> None:
        """Answers instead of the application, for which the client has left.

        The connection closes when the client has read that, or when it has had a stall for it.
        """
        if not self._in_head and self.cycle.response_started:
            self.transport.close()
            return
        identity = self._identity()
        fields = {"request_id": identity, "status": status}
        _LOG.info("refused before it was read: %s", message, extra=fields)
        if self._in_head:  # else the application counts it, as one whose client left
            REQUESTS.labels(NO_ROUTE, status).inc()
        body = refusal(status, message, code)
        head = [f"HTTP/1.1 {status} {HTTPStatus(status).phrase}\r\n".encode()]
        for name, value in (
            *self.server_state.default_headers,
            (b"content-type", b"application/json"),
            (b"content-length", str(len(body)).encode()),
            (b"x-request-id", identity.encode()),
            (b"connection", b"close"),
        ):
            head += [name, b": ", value, b"\r\n"]
        self.transport.write(b"".join([*head, b"\r\n", body]))
        self.transport.write_eof()  # closed with bytes unread, the connection would lose the answer
        self._is_deaf = True
        self._heard = self.loop.time()
        self.flow.resume_reading()
        if not self._in_head:
            self.cycle.disconnected = True
            self.cycle.message_event.set()

    async def _answer_with_trailers(self, scope: Scope, receive: Receive, send: Send) -> None:
        """The application for a client that takes chunks: behind them there may be trailers, which
        uvicorn does not know."""
        cycle = self.cycle
        scope.setdefault("extensions", {})["http.response.trailers"] = {}
        promised, last = False, b""

        async def send_on(message: Message) -> None:
            nonlocal promised, last
            if message["type"] == "http.response.start":
                promised = message.get("trailers", False)
            elif message["type"] == "http.response.trailers":
                end = _end_of_chunks(last, message["headers"])
                cycle.chunked_encoding = False  # the chunks are made already
                cycle.expected_content_length = len(end)
                message = {"type": "http.response.body", "body": end, "more_body": False}
            elif promised and not message.get("more_body", False):
                last = message.get("body", b"")
                return
            await send(message)

        await self.config.loaded_app(scope, receive, send_on)

    async def _answer_without_chunks(self, scope: Scope, receive: Receive, send: Send) -> None:
        """The application for a client of HTTP/1.0: a body ends with its connection."""
        cycle = self.cycle
        cycle.keep_alive = False

        async def send_on(message: Message) -> None:
            cycle.chunked_encoding = False
            cycle.expected_content_length = len(message.get("body", b""))
            await send(message)

        await self.config.loaded_app(scope, receive, send_on)

    def _identity(self) -> str:
        """As the application calls the request, where it has begun with it."""
        scope = cast(Scope, self.scope)
        if not self._in_head and "exchange" in scope:
            return exchange_of(scope).identity
        offered = dict(self.headers or ()).get(b"x-request-id", b"")
        return sane_request_id(offered.decode("latin-1"))

    def _head_bytes(self) -> int:
        return len(self.url) + sum(len(name) + len(value) + 4 for name, value in self.headers)

    def _is_answering(self) -> bool:
        """Whether a request that was read to its end still runs."""
        return self._in_head and self.cycle is not None and not self.cycle.response_complete

    def _is_idle(self) -> bool:
        """Whether nothing has come since the last request."""
        return self._in_head and self.cycle is not None and not self._undelivered

    def _beat(self) -> None:
        """The connection's one timer."""
        now = self.loop.time()
        unsent = self.transport.get_write_buffer_size()
        if unsent != self._unsent or not self._is_waiting_for_reader():
            self._unsent, self._moved = unsent, now
        if self.flow.read_paused:
            self._heard = now
        if now - self._moved >= self.stall_seconds:
            self._cut()
            return
        if now - self._heard >= self._silence_allowed() and not self.transport.is_closing():
            self._end_silence()
        self._timer = self.loop.call_later(self.stall_seconds / _BEATS, self._beat)

    def _is_waiting_for_reader(self) -> bool:
        """Whether bytes wait that only the client can make fewer, and nothing makes more."""
        if not self.transport.get_write_buffer_size():
            return False
        has_ended = (
            self.transport.is_closing() or self.cycle is None or self.cycle.response_complete
        )
        return has_ended or self.flow.write_paused

    def _silence_allowed(self) -> float:
        """Seconds."""
        if self._is_answering():
            return math.inf
        return self.timeout_keep_alive if self._is_idle() else self.stall_seconds

    def _cut(self) -> None:
        if not self.transport.is_closing():
            _LOG.warning("the client read nothing for %g s and was cut", self.stall_seconds)
        self.transport.abort()

    def _end_silence(self) -> None:
        if self._in_head or self._is_deaf:
            self.transport.close()
            return
        message = f"Nothing of the body came for {self.stall_seconds:g} s."
        self._refuse(408, message, "body_timeout")


def _end_of_chunks(body: bytes, trailers: Iterable[tuple[bytes, bytes]]) -> bytes:
    """The last part of a body in chunks, and the trailers behind it (RFC 9112, section 7.1)."""
    chunk = b"%x\r\n%b\r\n" % (len(body), body) if body else b""
    lines = [b"%b: %b\r\n" % field for field in trailers]
    return b"".join([chunk, b"0\r\n", *lines, b"\r\n"])


class _Body:
    """Listens to the body of a request whose head offers another protocol, as `curl --http2` and
    Java's client do. We decline and answer the request, but the parser takes such an offer for
    accepted, and the request for ended: so the body is parsed behind a head that offers nothing."""

    def __init__(self, request: HttpProtocol) -> None:
        self.on_body = request.on_body
        self.on_message_complete = request.on_message_complete
        self._has_begun = False

    def on_message_begin(self) -> None:
        if self._has_begun:
            raise ValueError("a request came behind one that still runs")
        self._has_begun = True
