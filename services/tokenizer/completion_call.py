"""Completions that have a gRPC call of their own: their context, stream and end."""

import asyncio
from collections.abc import AsyncGenerator, Callable, Coroutine
from functools import partial
from typing import Any

import grpc

from services.common.accounts import identity
from services.common.accounts.account import TextRequest
from services.common.accounts.identity import Identity
from services.common.accounts.metering import Meter
from services.common.errors import cut_stalled
from services.common.interceptor import metadata_priority, metadata_value
from services.common.logging import traceparent
from services.common.priority import PRIORITY_KEY, TENANT_KEY
from services.common.settings import StreamSettings
from services.common.span import Span
from services.tokenizer.completion.completion_registry import CompletionRegistry
from services.tokenizer.completion.completion_stream import CompletionStream
from services.tokenizer.completion.engine_request import CallContext
from services.tokenizer.completion.request_processor import RequestProcessor
from services.tokenizer.send_queue import SendQueue
from tokenwire.pb.completion.v1 import completion_pb2

__all__ = [
    "CompletionCall",
    "Context",
    "StalledCalls",
    "context_of_call",
    "deadline_after",
    "meter_of",
]

Context = grpc.aio.ServicerContext[Any, Any]
_NO_DEADLINE_SECONDS = 1e8  # a call without a deadline reports a deadline centuries ahead


class StalledCalls:
    """The tasks that end calls whose clients read nothing."""

    def __init__(self, settings: StreamSettings) -> None:
        self._seconds = settings.stall_seconds
        self._tasks: set[asyncio.Task[None]] = set()

    def cut(self, context: Context, abandon: Callable[[], None]) -> None:
        """End a call. abandon: ends the work of the call."""
        abandon()
        self.spawn(cut_stalled(context, self._seconds))

    def spawn(self, work: Coroutine[Any, Any, None]) -> None:
        """Run a coroutine in a task of its own."""
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


class CompletionCall:
    """One completion, whose output is the stream of one call."""

    def __init__(
        self,
        registry: CompletionRegistry,
        processor: RequestProcessor,
        call: CallContext,
        settings: StreamSettings,
    ) -> None:
        """Start the completion."""
        self._send_queue: SendQueue[CompletionStream] = SendQueue(settings)
        self.stream: CompletionStream = registry.start(
            processor, call, self._send_queue, is_windowed=True
        )

    async def responses(
        self, context: Context, stalled: StalledCalls
    ) -> AsyncGenerator[completion_pb2.GenerateResponse, None]:
        """Yield the responses. Raises the completion's error at its end.

        A client that leaves, or reads nothing, ends the completion.
        """
        stream, send_queue = self.stream, self._send_queue
        send_queue.start(partial(stalled.cut, context, stream.abandon))
        responses: list[completion_pb2.GenerateResponse] = []

        def add() -> completion_pb2.GenerateResponse:
            responses.append(completion_pb2.GenerateResponse())
            return responses[-1]

        try:
            while not stream.is_written:
                is_heartbeat_due = await send_queue.wait()
                send_queue.clear()
                if is_heartbeat_due and stream.is_admitted:
                    add().heartbeat.SetInParent()
                stream.write(add)
                for response in responses:
                    yield response
                    send_queue.sent()
                responses.clear()
                stream.extend_window()
                if stream.error is not None:
                    raise stream.error
        finally:
            stream.abandon()
            send_queue.close()


def context_of_call(
    context: Context,
    request: TextRequest,
    model: str,
    request_id: str,
    start_span: Callable[[], Span],
) -> CallContext:
    """Return the origin of a call's request, from its metadata.

    model: canonical id of the model that serves the request. start_span: starts the request's span
    if the metadata is valid. Raises INVALID_ARGUMENT for a wrong x-priority, and PERMISSION_DENIED
    for a tenant or a priority that the caller may not choose.
    """
    caller, tenant = identity.current.get(), metadata_value(context, TENANT_KEY) or ""
    tenant = caller.tenant(tenant, TENANT_KEY)
    priority = caller.priority(metadata_priority(context), PRIORITY_KEY)
    span = start_span()
    traceparent.set(span.traceparent)  # for the log line of the call
    return CallContext(
        request_id=request_id,
        span=span,
        tenant=tenant,
        priority=priority,
        deadline=deadline_after(context.time_remaining()),
        user=request.user,
        meter=meter_of(caller, request, model),
    )


def meter_of(caller: Identity, request: TextRequest, model: str) -> Meter | None:
    """Return the meter that counts a request against its key's limits; None without a key."""
    return Meter(caller, request, model) if caller.account is not None else None


def deadline_after(seconds: float | None) -> float | None:
    """Return the loop time after `seconds`; None without a deadline. NaN is refused later."""
    if seconds is None or seconds > _NO_DEADLINE_SECONDS:
        return None
    return asyncio.get_running_loop().time() + seconds
