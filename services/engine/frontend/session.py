"""One EngineService.Session: it reads commands, and sends the events of all its requests."""

import asyncio
import logging
import math
from collections.abc import AsyncIterator, Iterator
from functools import partial
from typing import Any

import grpc

from services.common.accounts import identity
from services.common.bounds import check_bounds
from services.common.errors import internal_error
from services.common.failures import failure
from services.common.interceptor import sane_request_id, sane_traceparent
from services.common.logging import request_id, traceparent
from services.engine.frontend import request_accounting
from services.engine.frontend.event_queue import EventQueue
from services.engine.frontend.frontend import Frontend
from services.engine.frontend.live_request import Caller
from services.engine.frontend.sink import Sink
from tokenwire.errors import ServiceError, invalid
from tokenwire.pb.engine.v1 import engine_pb2
from tokenwire.pb.engine.v1.engine_pb2 import (
    SessionCommand,
    SessionEvent,
    SessionRequest,
    SessionResponse,
    SessionStart,
)
from tokenwire.time_slice import TimeSlice

__all__ = ["Session"]

_LOG = logging.getLogger("engine")
_MESSAGE_BYTES = 16 << 20
"""Most bytes of events in one message, except for one larger event. gRPC refuses 64 MiB."""


class Session:
    """Requests of one Session stream."""

    def __init__(self, frontend: Frontend) -> None:
        self.events: EventQueue[SessionEvent] = EventQueue()
        self.ended = False
        self.error: Exception | None = None
        self._frontend = frontend
        self._who = identity.current.get()
        self._handles: dict[int, int] = {}
        """Handles of the frontend by handles of the client"""
        self._response = SessionResponse()
        """Response that holds the queued events"""
        self._last_handle = -1
        """Highest handle that the client has used"""
        self._starting: dict[int, asyncio.Task[None]] = {}
        """Requests that the frontend has not accepted yet, by the client's handle"""

    async def read(self, requests: AsyncIterator[SessionRequest]) -> None:
        """Carry out commands until the client closes its side, and wait for the last request."""
        try:
            async for request in requests:
                time_slice = TimeSlice()
                for command in request.commands:
                    self._carry_out(command)
                    if time_slice.is_over:
                        await time_slice.renew()
        except (ServiceError, grpc.aio.AbortError) as error:  # AbortError: the client stalled
            self._fail(error)
            return
        except Exception:
            _LOG.exception("unexpected failure")
            self._fail(internal_error())
            return
        while self._handles or self._starting:
            await self._frontend.changed_since(self._frontend.version)
        self.ended = True
        self.events.wake()

    def add(self, **event: Any) -> SessionEvent:
        """Return a new event within the response to be sent."""
        return self._response.events.add(**event)

    def take_responses(self) -> Iterator[SessionResponse]:
        """Return the events taken from the queue, in one or several messages."""
        response, self._response = self._response, SessionResponse()
        if response.ByteSize() <= _MESSAGE_BYTES:
            if response.events:
                yield response
            return
        part, size = SessionResponse(), 0
        for event in response.events:
            size += event.ByteSize()
            if size > _MESSAGE_BYTES and part.events:
                yield part
                part, size = SessionResponse(), event.ByteSize()
            part.events.append(event)
        yield part

    def close(self) -> None:
        """Abort all requests of the Session and drop their events."""
        for task in self._starting.values():
            task.cancel()
        for handle in self._handles.values():
            self._frontend.drop(handle)
        self._handles.clear()
        self._response = SessionResponse()

    def on_request_end(self, handle: int) -> None:
        """Drop the client's handle of a request after its terminal event."""
        self._handles.pop(handle, None)

    def _fail(self, error: Exception) -> None:
        self.error = error
        self.ended = True
        self.events.wake()

    def _carry_out_later(self, command: SessionCommand) -> None:
        """Carry out a command that came while its request was starting."""
        try:
            self._carry_out(command)
        except ServiceError as error:
            self._fail(error)

    def _carry_out(self, command: SessionCommand) -> None:
        match command.WhichOneof("command"):
            case "start":
                self._start(command)
            case "cancel" | "credit" if (task := self._starting.get(command.handle)) is not None:
                # cancel the task, or carry out the command once the request has started
                is_cancelled = command.HasField("cancel") and not command.cancel.sequences
                if not (is_cancelled and task.cancel()):
                    task.add_done_callback(lambda _: self._carry_out_later(command))
            case "cancel":
                if command.handle in self._handles:
                    self._frontend.cancel(self._handles[command.handle], command.cancel.sequences)
            case "credit":
                check_bounds(command.credit, "credit")
                if command.handle in self._handles:
                    self._frontend.grant(self._handles[command.handle], command.credit.tokens)
            case None:
                raise invalid("commands", "A command needs one of start, cancel and credit.")

    def _start(self, command: SessionCommand) -> None:
        handle, start = command.handle, command.start
        if handle <= self._last_handle:
            message = f"Handles must increase: got {handle} after {self._last_handle}."
            raise invalid("handle", message)
        self._last_handle = handle
        credit = start.credit if start.HasField("credit") else None
        task = asyncio.ensure_future(self._submit(handle, start, credit))
        self._starting[handle] = task
        # as a callback, because a task that is cancelled before its first step never runs
        task.add_done_callback(lambda task: self._started(handle, task))

    def _started(self, handle: int, task: asyncio.Task[None]) -> None:
        del self._starting[handle]
        if task.cancelled():
            request_accounting.count_request("cancelled")
            _SessionSink(self, handle).on_error(
                ServiceError(
                    grpc.StatusCode.CANCELLED, "CANCELLED", "The client cancelled the request."
                )
            )
        self._frontend.notify()  # `read` may wait for the last request

    async def _submit(self, handle: int, start: SessionStart, credit: int | None) -> None:
        request_id.set(sane_request_id(start.request_id))
        traceparent.set(sane_traceparent(start.traceparent))
        sink, request = _SessionSink(self, handle), start.request
        try:
            caller = self._caller(start)
            if caller.timeout_seconds is not None and math.isnan(caller.timeout_seconds):
                raise invalid("timeout_seconds", "timeout_seconds must be a number, not NaN.")
            self._handles[handle] = await self._frontend.submit(request, caller, credit, sink)
            _LOG.info(
                "started",
                extra={"prompts": len(request.prompts), "handle": self._handles[handle]},
            )
        except ServiceError as error:
            _LOG.info("refused", extra=failure(_LOG, error))
            sink.on_error(error)
        except Exception:
            _LOG.exception("unexpected failure")
            sink.on_error(internal_error())

    def _caller(self, start: SessionStart) -> Caller:
        """Return the origin of a request. Raises UNAUTHENTICATED and PERMISSION_DENIED."""
        who = self._who
        who.require_valid()
        who.require_unlimited()
        return Caller(
            request_id.get(),
            traceparent.get(),
            who.tenant(start.tenant, "start.tenant"),
            who.priority(start.priority, "start.priority"),
            start.timeout_seconds if start.HasField("timeout_seconds") else None,
            who.account,
        )


class _SessionSink(Sink[SessionEvent]):
    """Sink of one request within a Session."""

    def __init__(self, session: Session, handle: int) -> None:
        super().__init__(session.events, partial(session.add, handle=handle), handle)
        self._session = session

    def on_completed(self, completed: engine_pb2.Completed) -> None:
        super().on_completed(completed)
        self._session.on_request_end(self._handle)

    def on_error(self, error: ServiceError) -> None:
        self.events.put(self._add(error=error.to_status()))
        self._session.on_request_end(self._handle)
