"""EngineService over the frontend."""

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any, TypeAlias

import grpc

from services.common.errors import cut_stalled
from services.common.interceptor import metadata_priority, metadata_value
from services.common.logging import request_id, traceparent
from services.engine.frontend import metrics
from services.engine.frontend.frontend import Caller, Frontend
from services.engine.frontend.outbox import Outbox
from services.engine.frontend.session import Session
from services.engine.frontend.sink import Sink
from services.engine.settings import EngineSettings
from tokenwire.errors import ServiceError
from tokenwire.pb.engine.v1 import engine_pb2
from tokenwire.pb.engine.v1.engine_pb2 import (
    GenerateRequest,
    GenerateResponse,
    SessionRequest,
    SessionResponse,
)
from tokenwire.pb.engine.v1.engine_pb2_grpc import EngineServiceServicer

__all__ = ["EngineServicer"]

Context: TypeAlias = "grpc.aio.ServicerContext[Any, Any]"
GenerateContext: TypeAlias = "grpc.aio.ServicerContext[GenerateRequest, GenerateResponse]"
SessionContext: TypeAlias = "grpc.aio.ServicerContext[SessionRequest, SessionResponse]"


class EngineServicer(EngineServiceServicer):
    """Requests of calls of their own, and of Sessions."""

    def __init__(self, frontend: Frontend, settings: EngineSettings) -> None:
        self._frontend = frontend
        self._heartbeat_seconds = settings.heartbeat_seconds
        self._stall_seconds = settings.stall_seconds

    async def Generate(
        self, request: GenerateRequest, context: GenerateContext
    ) -> AsyncIterator[GenerateResponse]:
        call = _Call()
        try:
            handle = await self._frontend.submit(request, _caller(context), None, call)
        except asyncio.CancelledError:
            metrics.REQUESTS.labels("cancelled").inc()
            raise
        watching = self._watch(call.outbox, context, lambda: self._frontend.drop(handle))
        try:
            while call.outbox.pending or not call.ended:
                events = await call.outbox.take(self._heartbeat_seconds)
                if not events and call.is_accepted and not call.ended:
                    events = [GenerateResponse(heartbeat=engine_pb2.Heartbeat())]
                for event in events:
                    call.outbox.sending()
                    yield event
                    call.outbox.sent()
            if call.error is not None:
                raise call.error
        finally:
            watching.cancel()
            call.outbox.close()
            self._frontend.drop(handle)

    async def Session(
        self, requests: AsyncIterator[SessionRequest], context: SessionContext
    ) -> AsyncIterator[SessionResponse]:
        session = Session(self._frontend)
        reading = asyncio.ensure_future(session.read(requests))
        watching = self._watch(session.outbox, context, session.close)
        try:
            while session.outbox.pending or not session.ended:
                events = await session.outbox.take(self._heartbeat_seconds)
                if not events and not session.ended:
                    session.add(heartbeat=engine_pb2.Heartbeat())
                for response in session.take_responses():
                    session.outbox.sending()
                    yield response
                    session.outbox.sent()
            if session.error is not None:
                raise session.error
        finally:
            reading.cancel()
            watching.cancel()
            session.outbox.close()
            session.close()

    def _watch(
        self, outbox: Outbox[Any], context: Context, abandon: Callable[[], None]
    ) -> asyncio.Task[None]:
        return asyncio.create_task(_cut_when_stalled(outbox, context, abandon, self._stall_seconds))


class _Call(Sink[GenerateResponse]):
    """The sink of a Generate call."""

    def __init__(self) -> None:
        super().__init__(Outbox(), GenerateResponse)
        self.is_accepted = False
        self.ended = False
        self.error: ServiceError | None = None

    def on_accepted(self, accepted: engine_pb2.Accepted) -> None:
        super().on_accepted(accepted)
        self.is_accepted = True

    def on_completed(self, completed: engine_pb2.Completed) -> None:
        super().on_completed(completed)
        self.ended = True

    def on_error(self, error: ServiceError) -> None:
        self.error = error
        self.ended = True
        self.outbox.wake()


async def _cut_when_stalled(
    outbox: Outbox[Any], context: Context, abandon: Callable[[], None], stall_seconds: float
) -> None:
    """End a call whose client takes nothing for too long."""
    while True:
        left = stall_seconds - outbox.sending_seconds
        if left <= 0:
            break
        await asyncio.sleep(left)
    abandon()
    outbox.clear()
    await cut_stalled(context, stall_seconds)


def _caller(context: GenerateContext) -> Caller:
    return Caller(
        request_id.get(),
        traceparent.get(),
        metadata_value(context, "x-tenant") or "",
        metadata_priority(context),
        context.time_remaining(),
    )
