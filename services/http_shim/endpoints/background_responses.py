"""Responses in the background: they go on without the connection that asked for them."""

import asyncio
import logging
from collections.abc import Iterator
from contextlib import contextmanager

import grpc
import msgspec
from starlette.responses import Response
from starlette.types import Receive, Send

from services.common.sharing.shares import Shares
from services.common.sharing.tenant import current_tenant
from services.http_shim.dialects.responses.types import ResponseObject
from services.http_shim.dialects.responses.write import (
    CANCELLED,
    ResponseWriter,
    fail_response,
    has_ended,
)
from services.http_shim.endpoints.event_stream import EventStream
from services.http_shim.endpoints.generation import AsgiCall
from services.http_shim.endpoints.generator import Running
from services.http_shim.endpoints.stream_sender import (
    PING,
    PING_SECONDS,
    STREAM_HEADERS,
    client_left,
)
from services.http_shim.errors import ClientGoneError, public_message
from services.http_shim.stored.event_log import EventLog, EventLogs
from tokenwire.errors import ServiceError

__all__ = ["BackgroundResponse", "BackgroundResponses", "send_log"]

_LOG = logging.getLogger("responses")
_MAX_SENT_BYTES = 64 * 1024  # per send, so that other streams get a turn


class BackgroundResponse:
    """A running response."""

    def __init__(
        self, owner: str, writer: ResponseWriter, events: EventStream, running: Running
    ) -> None:
        self.owner = owner
        """Owner: the API key, or the tenant on a server without keys"""
        self.is_streamed = running.reading.is_streamed
        self.ended = asyncio.Event()
        self._writer = writer
        self._events = events
        self._output = running.output
        self._submission = running.submission

    @property
    def response(self) -> ResponseObject:
        """The response as it is now."""
        return self._writer.kept.response

    def cancel(self) -> None:
        """End it with the output that it has; `ended` is set soon after."""
        if self._output.is_open():
            self._submission.cancel()
            message = "The response was cancelled."
            self._output.on_error(ServiceError(grpc.StatusCode.CANCELLED, CANCELLED, message))

    async def run(self, log: EventLog | None) -> None:
        """Run it to its end; log: keeps its events."""
        try:
            while not has_ended(self.response):
                body = await self._next()
                if log is not None:
                    log.add(body)
        finally:
            if not has_ended(self.response):  # unexpected
                code, message = grpc.StatusCode.INTERNAL, "The response ended unexpectedly."
                self.response.output = []
                fail_response(self.response, ServiceError(code, "INTERNAL", message))
                await self._writer.keep()
            if log is not None:
                log.end()
            self.ended.set()

    async def _next(self) -> bytes:
        """Wait for the next events."""
        output = self._output
        await output.changed.wait()
        output.changed.clear()
        is_last = output.ended.is_set()
        body = self._events.take()
        if output.pending:
            output.changed.set()
            await asyncio.sleep(0)  # other requests get a turn
        elif is_last:
            body += await self._events.last()
        return body


class BackgroundResponses:
    """The running responses, and the kept events of those that are streamed."""

    def __init__(self, most: int, max_event_bytes: int, stall_seconds: float) -> None:
        """most: of running ones. max_event_bytes: of all kept events."""
        self.logs = EventLogs(max_event_bytes)
        self.stall_seconds = stall_seconds
        self._most = most
        self._admitted = Shares(most, reserve=most)
        self._running: dict[str, BackgroundResponse] = {}

    def find(self, identity: str, owner: str) -> BackgroundResponse | None:
        """Return an owner's running response."""
        running = self._running.get(identity)
        return None if running is None or running.owner != owner else running

    @contextmanager
    def admitted(self) -> Iterator[None]:
        """Count a response while it runs. Raises RESOURCE_EXHAUSTED if too many do."""
        owner = current_tenant.get()
        if not self._admitted.has_room(owner, 1):
            raise ServiceError(
                grpc.StatusCode.RESOURCE_EXHAUSTED,
                "TOO_MANY_BACKGROUND",
                f"{self._most} responses already run in the background; try again, or omit "
                "background.",
                field="background",
                retry_seconds=1,
            )
        self._admitted.add(owner, 1)
        try:
            yield
        finally:
            self._admitted.add(owner, -1)

    async def answer(self, call: AsgiCall, running: BackgroundResponse) -> None:
        """Run a response to its end, beside the answer to the client that asked for it.

        The answer is its events if they are streamed, else the queued response.
        """
        scope, receive, send = call.scope, call.receive, call.send
        identity = running.response.id
        self._running[identity] = running
        log = self.logs.open(identity, running.owner) if running.is_streamed else None
        answer: asyncio.Future[None]
        if log is None:
            queued = Response(msgspec.json.encode(running.response), media_type="application/json")
            answer = asyncio.ensure_future(queued(scope, receive, send))
        else:
            answer = asyncio.ensure_future(send_log(receive, send, log, 0, self.stall_seconds))
        try:
            await running.run(log)
        finally:
            del self._running[identity]
        await answer


async def send_log(
    receive: Receive,
    send: Send,
    log: EventLog,
    number: int,
    stall_seconds: float,
    ping_seconds: float = PING_SECONDS,
) -> None:
    """Send the events of a log from a number on as a stream, until they end or the client leaves.

    A silent stream gets a comment every `ping_seconds`. Raises ClientGoneError if the client
    leaves, or reads nothing for `stall_seconds`.
    """
    await send({"type": "http.response.start", "status": 200, "headers": [*STREAM_HEADERS]})
    leaving = asyncio.ensure_future(client_left(receive))
    try:
        is_last = False
        while not is_last:
            growing = asyncio.ensure_future(log.grown(number))
            await asyncio.wait(
                (growing, leaving), timeout=ping_seconds, return_when=asyncio.FIRST_COMPLETED
            )
            growing.cancel()
            if leaving.done():
                raise ClientGoneError
            try:
                body, number = log.read(number, _MAX_SENT_BYTES)
                is_last = log.has_ended and number == log.next
            except ServiceError as error:  # the client reads too slowly
                body, is_last = _error_event(error, number), True
            async with asyncio.timeout(stall_seconds):
                more = {"more_body": not is_last}
                await send({"type": "http.response.body", "body": body or PING} | more)
    except TimeoutError:
        _LOG.warning("disconnected a client that read nothing for %g s", stall_seconds)
        raise ClientGoneError from None
    finally:
        leaving.cancel()


def _error_event(error: ServiceError, number: int) -> bytes:
    data = {
        "type": "error",
        "code": error.reason.lower(),
        "message": public_message(error),
        "param": None,
        "sequence_number": number,
    }
    return b"event: error\ndata: %b\n\n" % msgspec.json.encode(data)
