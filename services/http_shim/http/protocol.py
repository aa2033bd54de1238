"""HTTP connection with a limit on the head and on the time a client may stall.

The class relies on undocumented parts of uvicorn, tested with 0.40 to 0.54:

- HttpToolsProtocol receives the events of `parser`. `data_received` calls
  `_unset_keepalive_if_required` and feeds the parser, no more. `on_response_complete` follows every
  response.
- `cycle` is the latest request, with `response_started`, `response_complete` and `keep_alive`;
  clearing the last closes the connection after the response. The application learns of
  `disconnected` by `message_event`. `url`, `headers` and `scope` belong to the latest head.
- `eof_received` does nothing, so that asyncio closes the connection.
- `app` answers. The cycle chooses chunked encoding when the response starts, unless
  `chunked_encoding` is set. Without chunks it sends `expected_content_length` more bytes.
- `flow` says whether reading or writing is paused, and resumes reading. Nothing is written while
  writing is paused.
- `loop`, `transport`, `timeout_keep_alive` and `server_state.default_headers` exist.
"""

import asyncio
import logging
import math
import socket
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

__all__ = ["protocol_class"]

_LOG = logging.getLogger("connection")
_MAX_HEAD_BYTES = 64 * 1024
_CHECKS_PER_STALL = 4  # a stall is noticed at most a quarter too late
_INTERIM = b"HTTP/1.1 100 Continue\r\n\r\n"
_FIRST_LOOK, _LAST_LOOK = 0.05, 10.0  # seconds between looks for a reset, ever longer
_LEAST_RATE = 500
"""Bytes of a body that must arrive in a second, on average after the first stall"""
_FRAMING = (b"content-length", b"transfer-encoding")  # headers that define the end of a body


def protocol_class(stall_seconds: float) -> type["HttpProtocol"]:
    """Return the protocol class whose clients may stall for `stall_seconds`."""
    return type("HttpProtocol", (HttpProtocol,), {"stall_seconds": stall_seconds})


class HttpProtocol(HttpToolsProtocol):
    """uvicorn's protocol with limits, and with the API's errors for requests it refuses itself.

    A connection has one request at a time. A pipelined request is dropped and the connection
    closes after the response. Thus reading never pauses, and a disconnect is always noticed.
    """

    stall_seconds: ClassVar[float]

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._head_parser = self.parser
        self._offers_upgrade = False  # with a body, which the parser mistakes for the new protocol
        self._in_head = True  # or before it; else in the body
        self._drops_input = False
        self._undelivered = 0  # bytes since the parser's last event: a head, or a part of a body
        self._body_bytes = 0  # that arrived since the head
        self._body_began = 0.0
        self._unsent = 0  # bytes at the last check
        self._last_received = self._last_sent = self.loop.time()
        self._timer = self.loop.call_later(self._check_seconds(), self._check_stall)

    def connection_lost(self, exc: Exception | None) -> None:
        self._timer.cancel()
        super().connection_lost(exc)

    def eof_received(self) -> bool:  # type: ignore[override]  # asyncio takes True to keep it open
        """Keep the connection if an answer is due: the client may only have ended its requests."""
        has_tls = self.transport.get_extra_info("sslcontext") is not None  # can't be half closed
        if has_tls or not self._is_answering():
            return False
        self.cycle.keep_alive = False
        self._send_interim()
        self._look_for_reset(_FIRST_LOOK)
        return True

    def _send_interim(self) -> None:
        """Make the system of a client that is gone reset the connection.

        Nothing else tells it from a client that waits. HTTP/1.0 has no interim answers.
        """
        scope = cast(Scope, self.scope)
        if not self.cycle.response_started and scope["http_version"] != "1.0":
            self.transport.write(_INTERIM)

    def _look_for_reset(self, pause: float) -> None:
        """Abort a half-closed connection once it is reset, which asyncio does not notice."""
        if self.transport.is_closing() or self.cycle.response_complete:
            return
        connection = self.transport.get_extra_info("socket")
        if connection.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
            self.transport.abort()
            return
        if pause >= _LAST_LOOK:
            self._send_interim()
        self.loop.call_later(pause, self._look_for_reset, min(2 * pause, _LAST_LOOK))

    def data_received(self, data: bytes) -> None:
        if self._drops_input:
            return
        if not self._in_head or self._is_idle():
            self._last_received = self.loop.time()  # a whole head must come within one stall
        self._undelivered += len(data)
        self._parse(data)
        has_ended = self._drops_input or self.transport.is_closing()
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
                self.parser = httptools.HttpRequestParser(_UpgradeBody(self))
                rest = b"POST / HTTP/1.1\r\n%b\r\n%b" % (self._framing(), rest)
            if rest:
                self._parse(rest)
        except httptools.HttpParserError:
            self.send_400_response("")

    def _framing(self) -> bytes:
        """Return the header lines that define the end of the body; empty = no body."""
        lines = [b"%b: %b\r\n" % field for field in self.headers if field[0] in _FRAMING]
        return b"".join(lines)

    def on_message_begin(self) -> None:
        if self._is_answering():
            raise ValueError("pipelined request")
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        if self._undelivered > _MAX_HEAD_BYTES and self._head_bytes() > _MAX_HEAD_BYTES:
            raise ValueError("the head is too large")
        self._require_certain_end()
        has_chunks = self.parser.get_http_version() == "1.1"
        self.app = self._answer_with_trailers if has_chunks else self._answer_without_chunks
        super().on_headers_complete()
        self._in_head = False
        self._body_bytes, self._body_began = 0, self.loop.time()
        self._undelivered = 0
        self._offers_upgrade = self.parser.should_upgrade() and bool(self._framing())

    def _require_certain_end(self) -> None:
        """Refuse a head that a proxy may read otherwise: it would see other requests behind it."""
        version = self.parser.get_http_version()
        if version not in ("1.0", "1.1"):
            raise ValueError("another version of HTTP")
        codings = [value for name, value in self.headers if name == b"transfer-encoding"]
        if codings and (version == "1.0" or [each.lower() for each in codings] != [b"chunked"]):
            raise ValueError("a transfer coding besides chunked, or with HTTP/1.0")

    def on_body(self, body: bytes) -> None:
        super().on_body(body)
        self._body_bytes += len(body)
        self._undelivered = 0

    def on_message_complete(self) -> None:
        if self._offers_upgrade:
            return
        self.parser = self._head_parser
        super().on_message_complete()
        self._in_head = True
        self._undelivered = 0

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._last_received = self.loop.time()

    def send_400_response(self, msg: str) -> None:
        """Answer unparsable or oversized input, and read no more of the connection."""
        if self._is_answering():
            _LOG.info("dropped a pipelined request")
            self._drops_input = True
            self.cycle.keep_alive = False
        elif self._undelivered > _MAX_HEAD_BYTES:
            message = f"The request's head is larger than {_MAX_HEAD_BYTES} bytes."
            self._refuse(431, message, "head_too_large")
        else:
            self._refuse(400, "The request is not valid HTTP.", "invalid_http")

    def _refuse(self, status: int, message: str, code: str) -> None:
        """Answer in place of the application, which sees a disconnect.

        The connection closes when the client has read the answer, or after a stall.
        """
        if not self._in_head and self.cycle.response_started:
            self.transport.close()
            return
        identity = self._identity()
        fields = {"request_id": identity, "status": status}
        _LOG.info("refused an unread request: %s", message, extra=fields)
        if self._in_head:  # else the application counts the request, as disconnected
            REQUESTS.labels(NO_ROUTE, status, "").inc()
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
        self.transport.write_eof()  # a close with unread bytes would discard the answer
        self._drops_input = True
        self._last_received = self.loop.time()
        self.flow.resume_reading()
        if not self._in_head:
            self.cycle.disconnected = True
            self.cycle.message_event.set()

    async def _answer_with_trailers(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Run the application with support for trailers, which uvicorn lacks (HTTP/1.1)."""
        cycle = self.cycle
        scope.setdefault("extensions", {})["http.response.trailers"] = {}
        promised, last = False, b""

        async def send_on(message: Message) -> None:
            nonlocal promised, last
            if message["type"] == "http.response.start":
                promised = message.get("trailers", False)
            elif message["type"] == "http.response.trailers":
                end = _end_of_chunks(last, message["headers"])
                cycle.chunked_encoding = False  # `end` is chunked already
                cycle.expected_content_length = len(end)
                message = {"type": "http.response.body", "body": end, "more_body": False}
            elif promised and not message.get("more_body", False):
                last = message.get("body", b"")
                return
            await send(message)

        await self.config.loaded_app(scope, receive, send_on)

    async def _answer_without_chunks(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Run the application for HTTP/1.0, where the end of the connection ends the body."""
        cycle = self.cycle
        cycle.keep_alive = False

        async def send_on(message: Message) -> None:
            cycle.chunked_encoding = False
            cycle.expected_content_length = len(message.get("body", b""))
            await send(message)

        await self.config.loaded_app(scope, receive, send_on)

    def _identity(self) -> str:
        """Return the request id, the application's if it knows the request."""
        scope = cast(Scope, self.scope)
        if not self._in_head and "exchange" in scope:
            return exchange_of(scope).request_id
        offered = dict(self.headers or ()).get(b"x-request-id", b"")
        return sane_request_id(offered.decode("latin-1"))

    def _head_bytes(self) -> int:
        return len(self.url) + sum(len(name) + len(value) + 4 for name, value in self.headers)

    def _is_answering(self) -> bool:
        """Return whether a completely read request is still being answered."""
        return self._in_head and self.cycle is not None and not self.cycle.response_complete

    def _is_idle(self) -> bool:
        """Return whether nothing arrived since the last request."""
        return self._in_head and self.cycle is not None and not self._undelivered

    def _check_seconds(self) -> float:
        return self.stall_seconds / _CHECKS_PER_STALL

    def _check_stall(self) -> None:
        """Disconnect a client that stalls; runs periodically on the connection's one timer."""
        now = self.loop.time()
        unsent = self.transport.get_write_buffer_size()
        if unsent != self._unsent or not self._is_waiting_for_reader():
            self._unsent, self._last_sent = unsent, now
        if self.flow.read_paused:  # the server does not read: the client is not late
            self._last_received = now
            self._body_began += self._check_seconds()
        if now - self._last_sent >= self.stall_seconds:
            self._abort()
            return
        if (
            now - self._last_received >= self._receive_timeout() or self._is_too_slow(now)
        ) and not self.transport.is_closing():
            self._on_receive_timeout()
        self._timer = self.loop.call_later(self._check_seconds(), self._check_stall)

    def _is_waiting_for_reader(self) -> bool:
        """Return whether unsent bytes wait for the client and no more are written."""
        if not self.transport.get_write_buffer_size():
            return False
        has_ended = (
            self.transport.is_closing() or self.cycle is None or self.cycle.response_complete
        )
        return has_ended or self.flow.write_paused

    def _receive_timeout(self) -> float:
        """Return the longest silence of the client, in seconds."""
        if self._is_answering():
            return math.inf
        return self.timeout_keep_alive if self._is_idle() else self.stall_seconds

    def _is_too_slow(self, now: float) -> bool:
        """Return whether a body arrives at less than the least rate: it takes others' room."""
        if self._in_head or self._drops_input:
            return False
        return now - self._body_began >= self.stall_seconds + self._body_bytes / _LEAST_RATE

    def _abort(self) -> None:
        if not self.transport.is_closing():
            _LOG.warning("disconnected a client that read nothing for %g s", self.stall_seconds)
        self.transport.abort()

    def _on_receive_timeout(self) -> None:
        if self._in_head or self._drops_input:
            self.transport.close()
            return
        message = (
            f"The body arrives too slowly: nothing for {self.stall_seconds:g} s, or less than "
            f"{_LEAST_RATE} bytes a second."
        )
        self._refuse(408, message, "body_timeout")


def _end_of_chunks(body: bytes, trailers: Iterable[tuple[bytes, bytes]]) -> bytes:
    """Return the last chunk of a body and its trailers (RFC 9112, section 7.1)."""
    chunk = b"%x\r\n%b\r\n" % (len(body), body) if body else b""
    lines = [b"%b: %b\r\n" % field for field in trailers]
    return b"".join([chunk, b"0\r\n", *lines, b"\r\n"])


class _UpgradeBody:
    """Parser events for the body of a request whose head offers an upgrade.

    `curl --http2` and Java's client send such heads. The server declines and answers the request.
    The parser, however, considers the upgrade accepted and the request ended. A second parser
    therefore reads the body, after a head without the offer.
    """

    def __init__(self, request: HttpProtocol) -> None:
        self.on_body = request.on_body
        self.on_message_complete = request.on_message_complete
        self._has_begun = False

    def on_message_begin(self) -> None:
        if self._has_begun:
            raise ValueError("pipelined request")
        self._has_begun = True
