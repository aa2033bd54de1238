"""Sending of a streamed response at the pace of its client."""

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from starlette.types import Message, Receive, Scope, Send

from services.http_shim.backends.output_collector import OutputCollector
from services.http_shim.backends.submission import Submission
from services.http_shim.dialects.writer import EventWriter
from services.http_shim.endpoints.event_stream import EventStream
from services.http_shim.errors import ClientGoneError
from services.http_shim.http.exchange import exchange_of

__all__ = [
    "CREDIT",
    "PING_SECONDS",
    "AsgiCall",
    "client_left",
    "send_last",
    "send_stream",
    "send_while_waiting",
    "stream_headers",
]

_LOG = logging.getLogger("stream")
CREDIT = 1024
"""Tokens per choice that may be on their way to a client that does not read"""
PING_SECONDS = 10.0
"""Silence after which a stream gets a ping"""
_QUIET_SECONDS = 1.0
"""Wait for a load after which a stream begins. A refusal before that has a status of its own"""
_PROGRESS_SECONDS = 2.0
"""Time between two pings about a load"""
_TRAILER = b"x-tokens-used"


@dataclass(frozen=True, slots=True)
class AsgiCall:
    """The ASGI arguments of one request."""

    scope: Scope
    receive: Receive
    send: Send


def stream_headers(media_type: bytes) -> list[tuple[bytes, bytes]]:
    """Return the headers of a stream."""
    return [
        (b"content-type", media_type),
        (b"cache-control", b"no-cache"),
        (b"x-accel-buffering", b"no"),
    ]


async def send_stream(
    scope: Scope,
    send: Send,
    collector: OutputCollector,
    submission: Submission,
    events: EventStream,
    *,
    stall_seconds: float,
    ping_seconds: float = PING_SECONDS,
    has_begun: bool = False,
) -> None:
    """Send a whole stream, with the number of used tokens in a trailer if the connection has them.

    While a send waits for the socket, deltas gather in `collector`. Raises ClientGoneError if the
    client reads nothing for `stall_seconds`. A silent stream gets a ping every `ping_seconds`.
    has_begun: whether `send_while_waiting` has sent the headers.
    """
    has_trailers = _has_trailers(scope)
    if not has_begun:
        await send(_start(events.media_type, has_trailers=has_trailers))
    try:
        async with asyncio.timeout(None) as timeout:
            timer = _StreamTimer(collector, timeout, ping_seconds, stall_seconds)
            try:
                await _send_events(send, collector, submission, events, timer)
            finally:
                timer.stop()
    except TimeoutError:
        _LOG.warning("disconnected a client that read nothing for %g s", stall_seconds)
        raise ClientGoneError from None
    if has_trailers:
        used = (_TRAILER, str(exchange_of(scope).tokens_used).encode())
        await send({"type": "http.response.trailers", "headers": [used], "more_trailers": False})


async def send_while_waiting(
    call: AsgiCall,
    admission: "asyncio.Future[Any]",
    writer: EventWriter,
    progress: Callable[[], str],
) -> bool:
    """Begin a stream, and send pings about the progress, until a request is admitted or fails.

    writer: of the stream's form. Returns False if the end of the wait comes before any ping.
    """
    await asyncio.wait([admission], timeout=_QUIET_SECONDS)
    if admission.done():
        return False
    await call.send(_start(writer.media_type, has_trailers=_has_trailers(call.scope)))
    while not admission.done():
        ping = writer.progress(progress())
        await call.send({"type": "http.response.body", "body": ping, "more_body": True})
        await asyncio.wait([admission], timeout=_PROGRESS_SECONDS)
    return True


async def send_last(call: AsgiCall, body: bytes) -> None:
    """Send the end of a stream that has begun."""
    await call.send({"type": "http.response.body", "body": body, "more_body": False})
    if _has_trailers(call.scope):
        await call.send({"type": "http.response.trailers", "headers": [], "more_trailers": False})


def _has_trailers(scope: Scope) -> bool:
    return "http.response.trailers" in scope.get("extensions", ())


def _start(media_type: bytes, *, has_trailers: bool) -> Message:
    announced = [(b"trailer", _TRAILER)] if has_trailers else []
    return {
        "type": "http.response.start",
        "status": 200,
        "headers": [*stream_headers(media_type), *announced],
        "trailers": has_trailers,
    }


async def _send_events(
    send: Send,
    collector: OutputCollector,
    submission: Submission,
    events: EventStream,
    timer: "_StreamTimer",
) -> None:
    """Send the body of a stream, and grant credit for the tokens that were sent."""
    granted = CREDIT
    while True:
        body, is_last = await _next_body(collector, events, timer)
        timer.start_send()
        await send({"type": "http.response.body", "body": body, "more_body": not is_last})
        timer.end_send()
        if is_last:
            return
        if granted - events.max_choice_tokens <= CREDIT // 2:
            more = events.max_choice_tokens + CREDIT - granted
            submission.grant(more)
            granted += more


async def _next_body(
    collector: OutputCollector, events: EventStream, timer: "_StreamTimer"
) -> tuple[bytes, bool]:
    """Wait for the next bytes of a stream; return them, and whether they are the last."""
    while True:
        await collector.changed.wait()
        collector.changed.clear()
        has_ended = collector.ended.is_set()
        body = events.take()
        if collector.pending:
            collector.changed.set()
            await asyncio.sleep(0)  # `send` need not yield; give other streams a turn
        elif has_ended:
            return body + await events.last(), True
        if body:
            return body, False
        if timer.ping_is_due:
            return events.ping(), False


async def client_left(receive: Receive) -> None:
    """Return when the client closes its connection."""
    while (await receive())["type"] != "http.disconnect":
        pass


class _StreamTimer:
    """The one timer of a stream: requests pings in silence, and expires a send that stalls."""

    def __init__(
        self,
        collector: OutputCollector,
        timeout: asyncio.Timeout,
        ping_seconds: float,
        stall_seconds: float,
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._collector = collector
        self._timeout = timeout
        self._ping_seconds = ping_seconds
        self._stall_seconds = stall_seconds
        self._is_sending = False
        self._since = self._loop.time()
        self._timer = self._loop.call_later(self._ping_seconds, self._check)
        self.ping_is_due = False

    def start_send(self) -> None:
        self._is_sending = True
        self._since = self._loop.time()

    def end_send(self) -> None:
        self._is_sending = self.ping_is_due = False
        self._since = self._loop.time()

    def stop(self) -> None:
        self._timer.cancel()

    def _check(self) -> None:
        quiet = self._loop.time() - self._since
        limit = self._stall_seconds if self._is_sending else self._ping_seconds
        if quiet < limit:
            self._timer = self._loop.call_later(min(limit - quiet, self._ping_seconds), self._check)
        elif self._is_sending:
            self._timeout.reschedule(self._loop.time())
        else:
            self.ping_is_due = True
            self._collector.changed.set()
            self._timer = self._loop.call_later(self._ping_seconds, self._check)
