"""Sends a streamed completion as fast as its client reads."""

import asyncio
import logging
from typing import Any

from starlette.types import Message, Scope, Send

from services.http_shim.backends.backend import Submission
from services.http_shim.backends.output_collector import OutputCollector
from services.http_shim.endpoints.event_stream import EventStream
from services.http_shim.errors import ClientGoneError
from services.http_shim.formats.responses import Delta
from services.http_shim.http.exchange import exchange_of

__all__ = ["CREDIT", "send_stream"]

_LOG = logging.getLogger("stream")
CREDIT = 1024  # tokens per choice that may be on their way to a client that does not read
_HEADERS = (
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
)
_TRAILER = b"x-tokens-used"


async def send_stream(
    scope: Scope,
    send: Send,
    collector: OutputCollector[Delta],
    submission: Submission,
    events: EventStream[Delta],
    *,
    stall_seconds: float,
    ping_seconds: float = 10.0,
) -> None:
    """Send everything until the completion ends; ClientGoneError if the client stops reading.

    While a send waits for the socket, deltas gather in `collector`; credit is granted for what left.
    Where the connection takes trailers, one says how many tokens were used.
    """
    granted = CREDIT
    has_trailers = "http.response.trailers" in scope.get("extensions", ())
    await send(_start(has_trailers=has_trailers))
    try:
        async with asyncio.timeout(None) as patience:
            pulse = _Pulse(collector, patience, ping_seconds, stall_seconds)
            try:
                while True:
                    await collector.changed.wait()
                    collector.changed.clear()
                    ended = collector.ended.is_set()
                    body = events.take()
                    if collector.pending:
                        ended = False
                        collector.changed.set()
                        await asyncio.sleep(0)  # a send alone lets nobody else on
                    if ended:
                        body += events.tail()
                    elif not body:
                        if not pulse.ping_is_due:
                            continue
                        body = b": ping\n\n"
                    pulse.writing()
                    await send({"type": "http.response.body", "body": body, "more_body": not ended})
                    pulse.written()
                    if ended:
                        break
                    if granted - events.most_tokens <= CREDIT // 2:
                        more = events.most_tokens + CREDIT - granted
                        submission.grant(more)
                        granted += more
            finally:
                pulse.stop()
    except TimeoutError:
        _LOG.warning("the client read nothing for %g s and was cut", stall_seconds)
        raise ClientGoneError from None
    if has_trailers:
        used = (_TRAILER, str(exchange_of(scope).tokens_used).encode())
        await send({"type": "http.response.trailers", "headers": [used], "more_trailers": False})


def _start(*, has_trailers: bool) -> Message:
    announced = [(b"trailer", _TRAILER)] if has_trailers else []
    return {
        "type": "http.response.start",
        "status": 200,
        "headers": [*_HEADERS, *announced],
        "trailers": has_trailers,
    }


class _Pulse:
    """One timer a stream: asks for a ping in silence, and loses patience with a stuck socket."""

    def __init__(
        self,
        collector: OutputCollector[Any],
        patience: asyncio.Timeout,
        ping_seconds: float,
        stall_seconds: float,
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._running = collector
        self._patience = patience
        self._ping_seconds = ping_seconds
        self._stall_seconds = stall_seconds
        self._is_writing = False
        self._since = self._loop.time()
        self._timer = self._loop.call_later(self._ping_seconds, self._beat)
        self.ping_is_due = False

    def writing(self) -> None:
        """A send begins."""
        self._is_writing = True
        self._since = self._loop.time()

    def written(self) -> None:
        """The send is over."""
        self._is_writing = self.ping_is_due = False
        self._since = self._loop.time()

    def stop(self) -> None:
        self._timer.cancel()

    def _beat(self) -> None:
        quiet = self._loop.time() - self._since
        limit = self._stall_seconds if self._is_writing else self._ping_seconds
        if quiet < limit:
            self._timer = self._loop.call_later(min(limit - quiet, self._ping_seconds), self._beat)
        elif self._is_writing:
            self._patience.reschedule(self._loop.time())
        else:
            self.ping_is_due = True
            self._running.changed.set()
            self._timer = self._loop.call_later(self._ping_seconds, self._beat)
