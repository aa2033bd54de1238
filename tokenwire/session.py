"""Client side of a Session: one long-lived stream that carries many requests.

A message on a stream costs the same whatever it holds, so a Session carries one message per step
for all requests. `Session` batches the commands of one turn of the event loop into one message and
delivers each event to the listener of its request.
"""

import asyncio
import logging
from collections.abc import Callable, Sequence
from contextvars import Context
from typing import Any, Generic, Protocol, TypeVar, cast

import grpc
from google.protobuf.message import Message

from tokenwire.channel import stop_writing_at_end
from tokenwire.channel_options import MESSAGE_LIMIT
from tokenwire.errors import ServiceError
from tokenwire.pb.completion.v1 import completion_pb2
from tokenwire.pb.completion.v1.completion_pb2_grpc import CompletionServiceStub
from tokenwire.pb.engine.v1 import engine_pb2
from tokenwire.pb.engine.v1.engine_pb2_grpc import EngineServiceStub

__all__ = [
    "CompletionSession",
    "EngineSession",
    "Listener",
    "Session",
    "completion_session",
    "engine_session",
]

_LOG = logging.getLogger("session")
_MESSAGE_BYTES = MESSAGE_LIMIT // 4
"""Bytes of commands above which a new message starts"""
_COMMAND_BYTES = MESSAGE_LIMIT - 16
"""Largest command in bytes; the rest is for the message around it"""
_REFUSALS = (grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.PERMISSION_DENIED)

Command = TypeVar("Command")
Event = TypeVar("Event")
EventIn = TypeVar("EventIn", contravariant=True)


class Listener(Protocol[EventIn]):
    """Receiver of one request's events. Its methods run on the event loop and must not block."""

    def on_event(self, event: EventIn) -> None:
        """Take an event. The last event completes the request."""

    def on_error(self, error: ServiceError) -> None:
        """Take the end of a request that was refused, that failed, or whose stream was lost."""


class Session(Generic[Command, Event]):
    """Many requests over one stream. A request opens the stream if there is none.

    When the stream is lost or can't be opened, the listener of every open request gets UNAVAILABLE
    (SESSION_LOST); the owner of the Session decides whether to submit them again. Where the server
    refuses the caller, they get UNAUTHENTICATED or PERMISSION_DENIED. A request too large for a
    message gets INVALID_ARGUMENT (REQUEST_TOO_LARGE); the others continue.
    """

    def __init__(
        self,
        call: Callable[[], "grpc.aio.StreamStreamCall[Any, Any]"],
        bundle: Callable[[Sequence[Command]], Any],
        is_last: Callable[[Event], bool],
    ) -> None:
        self._call = call
        self._bundle = bundle
        self._is_last = is_last
        self._listeners: dict[int, Listener[Event]] = {}
        self._next_handle = 1
        self._outbox: list[Command] = []
        self._wake = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    @property
    def num_open(self) -> int:
        """Number of requests that have not ended."""
        return len(self._listeners)

    def open(self, listener: Listener[Event]) -> int:
        """Return a new handle, whose events go to `listener`. Send the start command next."""
        handle = self._next_handle
        self._next_handle += 1
        self._listeners[handle] = listener
        if self._task is None or self._task.done():
            self._outbox.clear()
            # The stream serves all requests, so it must not log under the ids of the first request.
            self._task = asyncio.create_task(self._run(), context=Context())
        return handle

    def send(self, command: Command) -> None:
        """Queue a command; it is sent with the others of this turn of the event loop."""
        self._outbox.append(command)
        self._wake.set()

    def detach(self, handle: int) -> None:
        """Drop the remaining events of a request. Send its cancel command too."""
        self._listeners.pop(handle, None)

    async def close(self) -> None:
        """End the stream; the server aborts its requests."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])
        # A task that never started has not called _lose itself.
        self._lose(_lost("The stream was closed."))

    async def _run(self) -> None:
        try:
            call = self._call()
        except grpc.aio.UsageError as failure:  # raised by a closed channel
            self._lose(_lost(f"The stream can't be opened: {failure}"))
            return
        writer = asyncio.ensure_future(self._write(call))
        stop_writing_at_end(call, writer)
        error = _lost("The stream ended.")
        try:
            while (response := cast(Any, await call.read())) is not grpc.aio.EOF:
                for event in response.events:
                    self._dispatch(event)
        except grpc.aio.AioRpcError as failure:
            error = ServiceError.from_rpc_error(failure)
            if error.code not in _REFUSALS:
                error = _lost(error.message)
        finally:
            writer.cancel()
            call.cancel()
            self._lose(error)

    def _lose(self, error: ServiceError) -> None:
        """End every open request with an error; the next request opens another stream."""
        self._task = None
        lost, self._listeners = self._listeners, {}
        for listener in lost.values():
            listener.on_error(error)

    async def _write(self, call: "grpc.aio.StreamStreamCall[Any, Any]") -> None:
        try:
            while True:
                await self._wake.wait()
                self._wake.clear()
                commands, self._outbox = self._outbox, []
                for batch in self._split(commands):
                    await call.write(self._bundle(batch))
        except (grpc.aio.AioRpcError, asyncio.InvalidStateError):
            pass  # The reader sees the same failure and reports it.
        except Exception:  # without a writer, every request would wait forever
            _LOG.exception("the stream can't be written")
            call.cancel()

    def _dispatch(self, event: Any) -> None:
        listener = self._listeners.get(event.handle)
        if listener is None:
            return
        if event.HasField("error"):
            del self._listeners[event.handle]
            listener.on_error(ServiceError.from_status(event.error))
            return
        if self._is_last(event):
            del self._listeners[event.handle]
        listener.on_event(event)

    def _split(self, commands: Sequence[Command]) -> list[list[Command]]:
        """Group commands into messages well below the limit; refuse a command above it."""
        messages: list[list[Command]] = []
        filled = 0
        for command in commands:
            size = cast(Message, command).ByteSize()
            if size > _COMMAND_BYTES:
                self._refuse(command, size)
            elif messages and filled + size <= _MESSAGE_BYTES:
                messages[-1].append(command)
                filled += size
            else:
                messages.append([command])
                filled = size
        return messages

    def _refuse(self, command: Any, size: int) -> None:
        listener = self._listeners.pop(command.handle, None)
        if listener is not None:
            message = f"The request has {size:,} bytes; at most {_COMMAND_BYTES:,} can be sent."
            code = grpc.StatusCode.INVALID_ARGUMENT
            listener.on_error(ServiceError(code, "REQUEST_TOO_LARGE", message))


def _lost(message: str) -> ServiceError:
    code = grpc.StatusCode.UNAVAILABLE
    return ServiceError(code, "SESSION_LOST", message, retry_seconds=1)


EngineSession = Session[engine_pb2.SessionCommand, engine_pb2.SessionEvent]
CompletionSession = Session[completion_pb2.SessionCommand, completion_pb2.SessionEvent]


def engine_session(channel: grpc.aio.Channel) -> EngineSession:
    """Return a Session of EngineService."""
    stub = EngineServiceStub(channel)

    def is_last(event: engine_pb2.SessionEvent) -> bool:
        return event.HasField("completed")

    return Session(stub.Session, lambda c: engine_pb2.SessionRequest(commands=c), is_last)


def completion_session(channel: grpc.aio.Channel) -> CompletionSession:
    """Return a Session of CompletionService."""
    stub = CompletionServiceStub(channel)

    def is_last(event: completion_pb2.SessionEvent) -> bool:
        return event.response.WhichOneof("event") == "completed"

    return Session(stub.Session, lambda c: completion_pb2.SessionRequest(commands=c), is_last)
