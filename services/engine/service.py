"""EngineService and EngineControlService over the frontend."""

import asyncio
import logging
import math
import os
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from importlib.metadata import version
from typing import Any, TypeAlias

import grpc

from services.common.errors import cut_stalled, internal_error
from services.common.interceptor import (
    metadata_priority,
    metadata_value,
    sane_request_id,
    sane_traceparent,
)
from services.common.logging import request_id, traceparent
from services.common.server import Application
from services.common.settings import StartupError
from services.engine.admission import default_sampling
from services.engine.frontend import Caller, Frontend
from services.engine.messages import Token
from services.engine.outbox import Outbox
from services.engine.settings import EngineSettings
from tokenwire.engine.v1 import engine_pb2, engine_pb2_grpc
from tokenwire.engine.v1.engine_pb2 import (
    Capability,
    GenerateRequest,
    GenerateResponse,
    SessionCommand,
    SessionEvent,
    SessionRequest,
    SessionResponse,
)
from tokenwire.errors import ServiceError, invalid

__all__ = ["EngineApplication"]

_LOG = logging.getLogger("engine")
_NICENESS = 5
"""Of this process, beside the loop's: what the loop reports would interrupt its next step"""
_MESSAGE_BYTES = 16 << 20
"""Of events that go in one message, but for one that alone has more; gRPC refuses 64 MiB"""
_CAPABILITIES = (
    Capability.CAPABILITY_SAMPLING,
    Capability.CAPABILITY_PENALTIES,
    Capability.CAPABILITY_LOGIT_BIAS,
    Capability.CAPABILITY_DRY,
    Capability.CAPABILITY_MIROSTAT,
    Capability.CAPABILITY_STOPPING,
    Capability.CAPABILITY_LOGPROBS,
    Capability.CAPABILITY_PROMPT_LOGPROBS,
    Capability.CAPABILITY_RESUME,
    Capability.CAPABILITY_PREFIX_CACHE,
)

GenerateContext: TypeAlias = "grpc.aio.ServicerContext[GenerateRequest, GenerateResponse]"
Context: TypeAlias = "grpc.aio.ServicerContext[Any, Any]"
SetServing: TypeAlias = Callable[[bool], None]
SessionContext: TypeAlias = "grpc.aio.ServicerContext[SessionRequest, SessionResponse]"


class EngineApplication(Application):
    """The engine service: its servicers and the loop behind them."""

    def __init__(self, settings: EngineSettings) -> None:
        super().__init__()
        if not settings.model.is_dir():
            raise StartupError(f"--model {settings.model} is not a directory.")
        self._frontend = Frontend(settings, self._on_failure)
        self._sessions = _Engine(self._frontend, settings)
        self._control = _EngineControl(self._frontend, settings, self.set_serving)

    def register(self, server: grpc.aio.Server) -> Sequence[str]:
        engine_pb2_grpc.add_EngineServiceServicer_to_server(self._sessions, server)
        engine_pb2_grpc.add_EngineControlServiceServicer_to_server(self._control, server)
        services = engine_pb2.DESCRIPTOR.services_by_name
        return [service.full_name for service in services.values()]

    async def start(self) -> None:
        await self._frontend.start()
        os.nice(_NICENESS)
        model = self._frontend.model
        _LOG.info(
            "serving %s: %s in %s, %.2f GiB of weights, KV cache for %d tokens (%.2f GiB)",
            self._frontend.model_id,
            model.architecture,
            model.dtype,
            model.weight_bytes / 2**30,
            model.total_blocks * model.block_size,
            model.kv_bytes / 2**30,
        )
        self.set_serving(True)

    async def drain(self) -> None:
        self._frontend.draining = True
        await self._frontend.drained()

    async def stop(self) -> None:
        await self._frontend.stop()

    def _on_failure(self, why: str) -> None:
        self.set_serving(False)
        self.fail(why)


class _Engine(engine_pb2_grpc.EngineServiceServicer):
    def __init__(self, frontend: Frontend, settings: EngineSettings) -> None:
        self._frontend = frontend
        self._heartbeat_seconds = settings.heartbeat_seconds
        self._stall_seconds = settings.stall_seconds

    async def Generate(
        self, request: GenerateRequest, context: GenerateContext
    ) -> AsyncIterator[GenerateResponse]:
        call = _Call()
        handle = await self._frontend.submit(request, _caller(context), None, call)
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
        session = _Session(self._frontend)
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


class _Call:
    """The sink of a Generate call."""

    def __init__(self) -> None:
        self.outbox: Outbox[GenerateResponse] = Outbox()
        self.is_accepted = False
        self.ended = False
        self.error: ServiceError | None = None

    def on_accepted(self, accepted: engine_pb2.Accepted) -> None:
        self.is_accepted = True
        self.outbox.put(GenerateResponse(accepted=accepted))

    def on_prompt_scores(self, scores: engine_pb2.PromptScores) -> None:
        self.outbox.put(GenerateResponse(prompt_scores=scores))

    def on_token(self, token: Token) -> None:
        self.outbox.put_token(0, token, GenerateResponse)

    def on_finished(self, finished: engine_pb2.SequenceFinished) -> None:
        self.outbox.put(GenerateResponse(finished=finished))

    def on_completed(self, completed: engine_pb2.Completed) -> None:
        self.outbox.put(GenerateResponse(completed=completed))
        self.ended = True

    def on_error(self, error: ServiceError) -> None:
        self.error = error
        self.ended = True
        self.outbox.wake()


class _Session:
    """The requests of one Session stream."""

    def __init__(self, frontend: Frontend) -> None:
        self.outbox: Outbox[SessionEvent] = Outbox()
        self.ended = False
        self.error: ServiceError | None = None
        self._frontend = frontend
        self._handles: dict[int, int] = {}
        """The client's handle to the engine's"""
        self._response = SessionResponse()
        """Of the events that wait in the outbox"""
        self._used: int = -1
        self._starting: dict[int, asyncio.Task[None]] = {}

    async def read(self, requests: AsyncIterator[SessionRequest]) -> None:
        """Carry out the client's commands until it closes its side; what runs then goes on."""
        try:
            async for request in requests:
                for command in request.commands:
                    self._carry_out(command)
        except ServiceError as error:
            self._fail(error)
            return
        while self._handles or self._starting:
            await self._frontend.changed_since(self._frontend.version)
        self.ended = True
        self.outbox.wake()

    def add(self, **event: Any) -> SessionEvent:
        """A new event, made in the response that it will leave with."""
        return self._response.events.add(**event)

    def take_responses(self) -> Iterator[SessionResponse]:
        """What to send, after all events were taken from the outbox: a message, or several."""
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
        """Abort everything that the Session started, and drop what it was to be told."""
        for task in self._starting.values():
            task.cancel()
        for handle in self._handles.values():
            self._frontend.drop(handle)
        self._handles.clear()
        self._response = SessionResponse()

    def ended_request(self, client_handle: int) -> None:
        """A request had its terminal event."""
        self._handles.pop(client_handle, None)

    def _fail(self, error: ServiceError) -> None:
        self.error = error
        self.ended = True
        self.outbox.wake()

    def _carry_out_later(self, command: SessionCommand) -> None:
        """What a request was told while it was starting."""
        try:
            self._carry_out(command)
        except ServiceError as error:
            self._fail(error)

    def _carry_out(self, command: SessionCommand) -> None:
        match command.WhichOneof("command"):
            case "start":
                self._start(command)
            case "cancel" | "credit" if (task := self._starting.get(command.handle)) is not None:
                is_cancelled = command.HasField("cancel") and not command.cancel.sequences
                if not (is_cancelled and task.cancel()):
                    task.add_done_callback(lambda _: self._carry_out_later(command))
            case "cancel":
                if command.handle in self._handles:
                    self._frontend.cancel(self._handles[command.handle], command.cancel.sequences)
            case "credit":
                if command.credit.tokens < 1:
                    raise invalid("credit.tokens", "Credit must be at least 1 token.")
                if command.handle in self._handles:
                    self._frontend.grant(self._handles[command.handle], command.credit.tokens)
            case None:
                raise invalid("commands", "A command needs one of its fields.")

    def _start(self, command: SessionCommand) -> None:
        handle, start = command.handle, command.start
        if handle <= self._used:
            raise invalid("handle", f"Handle {handle} is not above those used before.")
        self._used = handle
        caller = Caller(
            sane_request_id(start.request_id),
            sane_traceparent(start.traceparent),
            start.tenant,
            start.priority,
            start.timeout_seconds if start.HasField("timeout_seconds") else None,
        )
        credit = start.credit if start.HasField("credit") else None
        task = asyncio.ensure_future(self._submit(handle, start.request, caller, credit))
        self._starting[handle] = task
        # not in the task itself: one that is cancelled before its first step never runs
        task.add_done_callback(lambda task: self._started(handle, task))

    def _started(self, handle: int, task: asyncio.Task[None]) -> None:
        del self._starting[handle]
        if task.cancelled():
            _SessionSink(self, handle).on_error(
                ServiceError(grpc.StatusCode.CANCELLED, "CANCELLED", "Cancelled by the client.")
            )
        self._frontend.notify()  # `read` may wait for the last one

    async def _submit(
        self, handle: int, request: GenerateRequest, caller: Caller, credit: int | None
    ) -> None:
        request_id.set(caller.request_id)
        traceparent.set(caller.traceparent)
        sink = _SessionSink(self, handle)
        began = time.monotonic()
        try:
            if caller.timeout_seconds is not None and math.isnan(caller.timeout_seconds):
                raise invalid("timeout_seconds", "The timeout must be a number.")
            self._handles[handle] = await self._frontend.submit(request, caller, credit, sink)
            _LOG.info(
                "started",
                extra={"prompts": len(request.prompts), "handle": self._handles[handle]},
            )
        except ServiceError as error:
            _LOG.info("refused", extra={"reason": error.reason, "error": error.message})
            sink.on_error(error)
        except Exception:
            _LOG.exception("unexpected failure")
            sink.on_error(internal_error())
        _LOG.debug("submitted in %.4f s", time.monotonic() - began)


class _SessionSink:
    """The sink of one request within a Session."""

    def __init__(self, session: _Session, handle: int) -> None:
        self._session = session
        self._outbox = session.outbox
        self._handle = handle
        self._add = partial(session.add, handle=handle)

    def on_accepted(self, accepted: engine_pb2.Accepted) -> None:
        self._outbox.put(self._add(accepted=accepted))

    def on_prompt_scores(self, scores: engine_pb2.PromptScores) -> None:
        self._outbox.put(self._add(prompt_scores=scores))

    def on_token(self, token: Token) -> None:
        self._outbox.put_token(self._handle, token, self._add)

    def on_finished(self, finished: engine_pb2.SequenceFinished) -> None:
        self._outbox.put(self._add(finished=finished))

    def on_completed(self, completed: engine_pb2.Completed) -> None:
        self._outbox.put(self._add(completed=completed))
        self._session.ended_request(self._handle)

    def on_error(self, error: ServiceError) -> None:
        self._outbox.put(self._add(error=error.to_status()))
        self._session.ended_request(self._handle)


class _EngineControl(engine_pb2_grpc.EngineControlServiceServicer):
    def __init__(
        self, frontend: Frontend, settings: EngineSettings, set_serving: SetServing
    ) -> None:
        self._frontend = frontend
        self._settings = settings
        self._set_serving = set_serving

    async def GetModel(
        self, request: engine_pb2.GetModelRequest, context: Context
    ) -> engine_pb2.GetModelResponse:
        model, settings = self._frontend.model, self._settings
        grammar = (Capability.CAPABILITY_GRAMMAR,) if settings.grammar else ()
        return engine_pb2.GetModelResponse(
            model=self._frontend.model_id,
            architecture=model.architecture,
            dtype=model.dtype,
            device=model.device,
            context_length=model.context_length,
            vocabulary_size=model.vocabulary_size,
            eos_token_ids=model.eos_token_ids,
            bos_token_id=model.bos_token_id,
            recommended_sampling=default_sampling(model),
            capabilities=(*_CAPABILITIES, *grammar),
            max_logprobs=settings.max_logprobs,
            max_sequences_per_request=self._frontend.admission.max_sequences,
            max_running_sequences=settings.max_running,
            max_waiting_sequences=settings.max_waiting,
            max_step_tokens=settings.max_step_tokens,
            block_size=model.block_size,
            total_blocks=model.total_blocks,
            version=version("tokenwire"),
            weights_fingerprint=model.weights_fingerprint,
            weights=settings.weights,
        )

    async def GetLoad(
        self, request: engine_pb2.GetLoadRequest, context: Context
    ) -> engine_pb2.GetLoadResponse:
        return engine_pb2.GetLoadResponse(load=self._load())

    async def WatchLoad(
        self, request: engine_pb2.WatchLoadRequest, context: Context
    ) -> AsyncIterator[engine_pb2.WatchLoadResponse]:
        interval = request.interval_seconds if request.HasField("interval_seconds") else 0.5
        if not 0.05 <= interval <= 60:
            raise invalid("interval_seconds", "The interval must be between 0.05 and 60 s.")
        while True:
            version = self._frontend.version
            yield engine_pb2.WatchLoadResponse(load=self._load())
            await asyncio.sleep(interval)
            await self._frontend.changed_since(version)

    async def Abort(
        self, request: engine_pb2.AbortRequest, context: Context
    ) -> engine_pb2.AbortResponse:
        if not request.all and not request.request_ids:
            raise invalid("request_ids", "Name requests, or set `all`.")
        ids = None if request.all else request.request_ids
        return engine_pb2.AbortResponse(aborted=self._frontend.abort(ids))

    async def Drain(
        self, request: engine_pb2.DrainRequest, context: Context
    ) -> engine_pb2.DrainResponse:
        timeout = request.timeout_seconds if request.HasField("timeout_seconds") else 30.0
        if not 0 <= timeout <= 3600:
            raise invalid("timeout_seconds", "The timeout must be between 0 and 3600 s.")
        self._frontend.draining = True
        self._set_serving(False)
        with suppress(TimeoutError):
            await asyncio.wait_for(self._frontend.drained(), timeout)
        return engine_pb2.DrainResponse(remaining_requests=self._frontend.num_requests)

    async def FlushCache(
        self, request: engine_pb2.FlushCacheRequest, context: Context
    ) -> engine_pb2.FlushCacheResponse:
        return engine_pb2.FlushCacheResponse(freed_blocks=await self._frontend.flush_cache())

    def _load(self) -> engine_pb2.Load:
        load = self._frontend.load
        return engine_pb2.Load(
            running_sequences=load.running,
            waiting_sequences=load.waiting,
            queued_tokens=load.queued_tokens,
            free_blocks=load.free_blocks,
            total_blocks=load.total_blocks,
            tokens_per_second=self._frontend.tokens_per_second,
            draining=self._frontend.draining,
        )


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
