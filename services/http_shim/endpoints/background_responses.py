"""Responses in the background, which the jobs service runs, and the streams of their events."""

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable, Sequence

import msgspec
from starlette.responses import Response
from starlette.types import Receive, Send

from services.http_shim.dialects.writer import EVENT_STREAM, PING
from services.http_shim.endpoints.stream_sender import (
    PING_SECONDS,
    AsgiCall,
    client_left,
    stream_headers,
)
from services.http_shim.errors import ClientGoneError, public_message
from services.http_shim.http.exchange import exchange_of
from services.http_shim.http.gate import Gate
from services.http_shim.jobs.jobs import context_of
from services.http_shim.jobs.jobs_client import JobsClient
from tokenwire.errors import ServiceError, invalid
from tokenwire.pb.jobs.v1 import jobs_pb2

__all__ = ["TOO_LARGE", "BackgroundResponses", "send_events", "started_events"]

_LOG = logging.getLogger("responses")
_MOST_BODY = 32 << 20
"""Bytes of a body; the response of a larger one could not be kept"""
TOO_LARGE = (
    "background needs a response that can be kept, and this one can't: its context is too large."
)


class BackgroundResponses:
    """Starts responses in the background."""

    def __init__(self, jobs: JobsClient, gate: Gate, stall_seconds: float) -> None:
        self._jobs = jobs
        self._gate = gate
        self._stall_seconds = stall_seconds

    async def answer(
        self, call: AsgiCall, body: bytes, on_started: Callable[[], None], *, stream: bool
    ) -> None:
        """Start a response, and send it as it began, or with `stream` its events.

        body: the encoded body of the request. on_started: called when it is held no longer.
        Raises ServiceError.
        """
        exchange = exchange_of(call.scope)
        if len(body) > _MOST_BODY:
            raise invalid("background", TOO_LARGE)
        context = context_of(exchange)
        started = await self._jobs.start_response(
            jobs_pb2.StartResponseRequest(context=context, body_json=body, keep_events=stream)
        )
        del body
        on_started()
        exchange.model = started.model
        exchange.ignored = [*started.ignored]
        if not stream:
            queued = Response(started.response_json, media_type="application/json")
            await queued(call.scope, call.receive, call.send)
            return
        watched = jobs_pb2.WatchResponseRequest(context=context, response_id=started.response_id)
        events = await started_events(self._jobs, watched)
        await send_events(call.receive, call.send, events, self._gate, self._stall_seconds)


async def started_events(
    jobs: JobsClient, request: jobs_pb2.WatchResponseRequest
) -> AsyncGenerator[Sequence[jobs_pb2.ResponseEvent], None]:
    """Return the events of a response once they can be read. Raises ServiceError."""
    events = jobs.watch_response(request)
    await anext(events)
    return events


async def send_events(
    receive: Receive,
    send: Send,
    events: AsyncGenerator[Sequence[jobs_pb2.ResponseEvent], None],
    gate: Gate,
    stall_seconds: float,
    ping_seconds: float = PING_SECONDS,
) -> None:
    """Send events as a stream, until they end or the client leaves.

    A silent stream gets a comment every `ping_seconds`. Raises ClientGoneError if the client
    leaves, or reads nothing for `stall_seconds`.
    """
    stop = _Stop()
    with gate.admit(stop):
        leaving = asyncio.ensure_future(client_left(receive))
        reading: asyncio.Future[Sequence[jobs_pb2.ResponseEvent] | None] | None = None
        number = 0
        try:
            headers = stream_headers(EVENT_STREAM)
            await send({"type": "http.response.start", "status": 200, "headers": headers})
            is_last = False
            while not is_last:
                reading = reading or asyncio.ensure_future(anext(events, None))
                await asyncio.wait(
                    (reading, leaving, stop.error),
                    timeout=ping_seconds,
                    return_when=asyncio.FIRST_COMPLETED,
                )
                if leaving.done():
                    raise ClientGoneError
                body = PING
                if reading.done():
                    body, number, is_last = _next_body(reading, number)
                    reading = None
                elif stop.error.done():
                    body, is_last = _error_event(stop.error.result(), number), True
                async with asyncio.timeout(stall_seconds):
                    more = {"more_body": not is_last}
                    await send({"type": "http.response.body", "body": body} | more)
        except TimeoutError:
            _LOG.warning("disconnected a client that read nothing for %g s", stall_seconds)
            raise ClientGoneError from None
        finally:
            leaving.cancel()
            if reading is not None:
                reading.cancel()
                await asyncio.wait((reading,))
            await events.aclose()


class _Stop:
    """The end of the server, which a stream of events waits for."""

    def __init__(self) -> None:
        self.error: asyncio.Future[ServiceError] = asyncio.get_running_loop().create_future()

    def on_error(self, error: ServiceError) -> None:
        """Tell the stream that the server stops."""
        if not self.error.done():
            self.error.set_result(error)


def _next_body(
    read: "asyncio.Future[Sequence[jobs_pb2.ResponseEvent] | None]", number: int
) -> tuple[bytes, int, bool]:
    """Return the next events, the number of the event after them, and whether they are the last."""
    try:
        events = read.result()
    except ServiceError as error:  # the client reads too slowly, or the jobs service was lost
        return _error_event(error, number), number, True
    if events is None:
        return b"", number, True
    if not events:  # a sign of life
        return PING, number, False
    body = b"".join(
        b"event: %b\ndata: %b\n\n" % (event.type.encode(), event.event_json) for event in events
    )
    return body, events[-1].number + 1, False


def _error_event(error: ServiceError, number: int) -> bytes:
    data = {
        "type": "error",
        "code": error.reason.lower(),
        "message": public_message(error),
        "param": None,
        "sequence_number": number,
    }
    return b"event: error\ndata: %b\n\n" % msgspec.json.encode(data)
