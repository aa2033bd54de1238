"""EngineService: calls of one request each, and Sessions of many requests."""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any, TypeAlias

import grpc

from services.common.accounts import identity
from services.common.errors import cut_stalled
from services.common.interceptor import metadata_priority, metadata_value
from services.common.logging import request_id, traceparent
from services.common.priority import PRIORITY_KEY, TENANT_KEY
from services.engine.frontend import request_accounting
from services.engine.frontend.event_queue import EventQueue
from services.engine.frontend.frontend import Frontend
from services.engine.frontend.live_request import Caller
from services.engine.frontend.session import Session
from services.engine.frontend.sink import Sink
from services.engine.messages import Embedded
from services.engine.settings import EngineSettings
from tokenwire.errors import ServiceError
from tokenwire.pb.engine.v1 import engine_pb2
from tokenwire.pb.engine.v1.engine_pb2 import (
    EmbedRequest,
    EmbedResponse,
    GenerateRequest,
    GenerateResponse,
    SessionRequest,
    SessionResponse,
)
from tokenwire.pb.engine.v1.engine_pb2_grpc import EngineServiceServicer

__all__ = ["EngineServicer"]

_FLOAT_BYTES = 4

Context: TypeAlias = "grpc.aio.ServicerContext[Any, Any]"


class EngineServicer(EngineServiceServicer):
    """Servicer that streams the events of requests to clients."""

    def __init__(self, frontend: Frontend, settings: EngineSettings) -> None:
        self._frontend = frontend
        self._heartbeat_seconds = settings.heartbeat_seconds
        self._stall_seconds = settings.stall_seconds

    async def Generate(
        self, request: GenerateRequest, context: Context
    ) -> AsyncIterator[GenerateResponse]:
        call = _Call()
        try:
            handle = await self._frontend.submit(request, _caller(context), None, call)
        except asyncio.CancelledError:
            request_accounting.count_request("cancelled")
            raise
        watching = self._watch(call.events, context, lambda: self._frontend.drop(handle))
        try:
            while call.events.pending or not call.ended:
                responses = await call.events.take(self._heartbeat_seconds)
                if not responses and call.is_accepted and not call.ended:
                    responses = [GenerateResponse(heartbeat=engine_pb2.Heartbeat())]
                for response in responses:
                    call.events.begin_send()
                    yield response
                    call.events.end_send()
            if call.error is not None:
                raise call.error
        finally:
            watching.cancel()
            call.events.close()
            self._frontend.drop(handle)

    async def Embed(self, request: EmbedRequest, context: Context) -> EmbedResponse:
        of_tokens = request.tokens or request.token_weights
        call = _EmbedCall([len(each.ids) if of_tokens else 1 for each in request.prompts])
        try:
            handle = await self._frontend.submit(request, _caller(context), None, call)
        except asyncio.CancelledError:
            request_accounting.count_request("cancelled")
            raise
        try:
            return await call.response
        finally:
            call.events.close()
            self._frontend.drop(handle)

    async def Session(
        self, requests: AsyncIterator[SessionRequest], context: Context
    ) -> AsyncIterator[SessionResponse]:
        session = Session(self._frontend)
        reading = asyncio.ensure_future(session.read(requests))
        watching = self._watch(session.events, context, session.close)
        try:
            while session.events.pending or not session.ended:
                events = await session.events.take(self._heartbeat_seconds)
                if not events and not session.ended:
                    session.add(heartbeat=engine_pb2.Heartbeat())
                for response in session.take_responses():
                    session.events.begin_send()
                    yield response
                    session.events.end_send()
            if session.error is not None:
                raise session.error
        finally:
            reading.cancel()
            watching.cancel()
            session.events.close()
            session.close()

    def _watch(
        self, events: EventQueue[Any], context: Context, abandon: Callable[[], None]
    ) -> asyncio.Task[None]:
        return asyncio.create_task(_cut_when_stalled(events, context, abandon, self._stall_seconds))


class _Call(Sink[GenerateResponse]):
    """The sink of a Generate call."""

    def __init__(self) -> None:
        super().__init__(EventQueue(), GenerateResponse)
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
        self.events.wake()


class _EmbedCall(Sink[GenerateResponse]):
    """The sink of an Embed call, which has one response."""

    def __init__(self, counts: Sequence[int]) -> None:
        """counts: number of vectors of each prompt."""
        super().__init__(EventQueue(), GenerateResponse)
        self.response: asyncio.Future[EmbedResponse] = asyncio.get_running_loop().create_future()
        self._counts = counts
        self._vectors = [b""] * len(counts)

    def on_accepted(self, accepted: engine_pb2.Accepted) -> None:
        pass

    def on_embedded(self, embedded: Embedded) -> None:
        self._vectors[embedded.prompt] = embedded.vectors

    def on_finished(self, finished: engine_pb2.SequenceFinished) -> None:
        pass

    def on_completed(self, completed: engine_pb2.Completed) -> None:
        if not self.response.done():
            width = len(self._vectors[0]) // (self._counts[0] * _FLOAT_BYTES)
            vectors = b"".join(self._vectors)
            self.response.set_result(
                EmbedResponse(width=width, vectors=vectors, usage=completed.usage)
            )

    def on_error(self, error: ServiceError) -> None:
        if not self.response.done():
            self.response.set_exception(error)


async def _cut_when_stalled(
    events: EventQueue[Any], context: Context, abandon: Callable[[], None], stall_seconds: float
) -> None:
    """End a call whose client has taken no message for `stall_seconds`."""
    while True:
        left = stall_seconds - events.sending_seconds
        if left <= 0:
            break
        await asyncio.sleep(left)
    abandon()
    events.clear()
    await cut_stalled(context, stall_seconds)


def _caller(context: Context) -> Caller:
    who = identity.current.get()
    who.require_unlimited()
    return Caller(
        request_id.get(),
        traceparent.get(),
        who.tenant(metadata_value(context, TENANT_KEY) or "", TENANT_KEY),
        who.priority(metadata_priority(context), PRIORITY_KEY),
        context.time_remaining(),
        who.account,
    )
