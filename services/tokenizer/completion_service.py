"""CompletionService: requests to generate, each as its own call or many over one Session."""

import asyncio
from collections.abc import AsyncIterator
from dataclasses import asdict
from functools import partial

from services.common.accounts import identity
from services.common.accounts.account import TextRequest
from services.common.accounts.identity import Identity
from services.common.bounds import check_bounds
from services.common.interceptor import sane_request_id, sane_traceparent
from services.common.logging import request_id, traceparent
from services.common.model_files.checkpoint_facts import CheckpointFacts
from services.common.settings import StreamSettings
from services.common.sharing.tenant import current_tenant
from services.tokenizer.completion.completion_registry import CompletionRegistry
from services.tokenizer.completion.completion_span import start_span
from services.tokenizer.completion.completion_stream import CompletionStream
from services.tokenizer.completion.engine_request import CallContext
from services.tokenizer.completion_call import (
    CompletionCall,
    Context,
    StalledCalls,
    context_of_call,
    deadline_after,
    meter_of,
)
from services.tokenizer.embedding.embedding_calls import EmbeddingCalls
from services.tokenizer.engines.engine_pool import EnginePool
from services.tokenizer.model_status import model_status
from services.tokenizer.processor_factory import ProcessorFactory
from services.tokenizer.send_queue import SendQueue
from tokenwire.errors import ServiceError, invalid
from tokenwire.pb.completion.v1 import completion_pb2, models_pb2
from tokenwire.pb.completion.v1.completion_pb2_grpc import CompletionServiceServicer
from tokenwire.pb.engine.v1 import engine_pb2
from tokenwire.time_slice import TimeSlice

__all__ = ["CompletionServicer"]

_FULL_BYTES = 4 * 1024 * 1024  # size at which a message of a Session takes no more output
_CHECK_EVERY = 8  # streams after which the size is measured; it rarely reaches the limit


class CompletionServicer(CompletionServiceServicer):
    """The rpcs of CompletionService."""

    def __init__(
        self,
        registry: CompletionRegistry,
        processors: ProcessorFactory,
        embeddings: EmbeddingCalls,
        pool: EnginePool,
        model: str,
        created: int,
        facts: CheckpointFacts,
        settings: StreamSettings,
    ) -> None:
        """created: Unix time of the checkpoint. The list of models has it, and the facts."""
        self._registry = registry
        self._processors = processors
        self._embeddings = embeddings
        self._pool = pool
        self._model = model
        self._created = created
        self._facts = facts
        self._settings = settings
        self._stalled = StalledCalls(settings)

    async def Generate(
        self, request: completion_pb2.GenerateRequest, context: Context
    ) -> AsyncIterator[completion_pb2.GenerateResponse]:
        """Stream one request. The metadata goes out with the first message, the admission."""
        processor = self._processors.processor(request)
        call = _context_of_call(context, request, self._model)
        completion = CompletionCall(self._registry, processor, call, self._settings)
        async for response in completion.responses(context, self._stalled):
            yield response

    async def Session(
        self, request_iterator: AsyncIterator[completion_pb2.SessionRequest], context: Context
    ) -> AsyncIterator[completion_pb2.SessionResponse]:
        """Stream the events of many requests.

        Requests that the client starts before it ends its side are answered; requests that run
        when the call breaks are cancelled.
        """
        await context.send_initial_metadata(())
        send_queue: SendQueue[CompletionStream] = SendQueue(self._settings)
        client = _ClientSession(self._registry, self._processors, send_queue, self._model)

        def abandon() -> None:
            self._stalled.spawn(client.abandon())

        send_queue.start(partial(self._stalled.cut, context, abandon))
        reader = asyncio.ensure_future(client.read(request_iterator))
        reader.add_done_callback(partial(_wake_writer, send_queue))
        try:
            while not (reader.done() and client.is_idle):
                is_heartbeat_due = await send_queue.wait()
                response = completion_pb2.SessionResponse()
                if is_heartbeat_due:
                    response.events.add().heartbeat.SetInParent()
                client.write(response)
                if response.events:
                    yield response
                else:
                    await asyncio.sleep(0)  # streams that stay marked must not block the loop
                if reader.done():
                    reader.result()
        finally:
            reader.cancel()
            abandon()
            send_queue.close()

    async def Embed(
        self, request: completion_pb2.EmbedRequest, context: Context
    ) -> completion_pb2.EmbedResponse:
        call = _context_of_call(context, request, self._model)
        return await self._embeddings.embed(request, call)

    async def Score(
        self, request: completion_pb2.ScoreRequest, context: Context
    ) -> completion_pb2.ScoreResponse:
        call = _context_of_call(context, request, self._model)
        return await self._embeddings.score(request, call)

    async def Classify(
        self, request: completion_pb2.ClassifyRequest, context: Context
    ) -> completion_pb2.ClassifyResponse:
        call = _context_of_call(context, request, self._model)
        return await self._embeddings.classify(request, call)

    async def ListModels(
        self, request: models_pb2.ListModelsRequest, context: Context
    ) -> models_pb2.ListModelsResponse:
        """Return the one model, and its adapters."""
        limits = self._pool.limits
        model = models_pb2.Model(
            id=self._model,
            created=self._created,
            context_length=limits.context_length,
            max_output_length=limits.context_length,
            max_logprobs=limits.max_logprobs,
            infill=self._processors.infill is not None,
            grammar=engine_pb2.CAPABILITY_GRAMMAR in limits.capabilities,
            system_fingerprint=limits.system_fingerprint,
            chat=self._processors.templates.is_available and not limits.only_embeds,
            max_chat_logprobs=limits.max_chat_logprobs,
            embedding_width=0 if limits.vectors_are_scores else limits.vector_width,
            scores_pairs=limits.only_tokens_have_vectors
            or (limits.vectors_are_scores and limits.vector_width == 1),
            only_embeds=limits.only_embeds,
            model_code=limits.model_code,
            labels=self._embeddings.labels_of(limits),
            tools=self._processors.templates.shows_tools,
            reasoning=self._processors.templates.has_reasoning,
            images=self._processors.templates.takes_images,
            checkpoint=models_pb2.CheckpointFacts(**asdict(self._facts)),
        )
        models = [model]
        for name in sorted(self._pool.adapters):
            adapter = models_pb2.Model()
            adapter.CopyFrom(model)
            adapter.id, adapter.parent = name, model.id
            models.append(adapter)
        return models_pb2.ListModelsResponse(models=models)

    async def GetStatus(
        self, request: models_pb2.GetStatusRequest, context: Context
    ) -> models_pb2.GetStatusResponse:
        """Return the counts of the one model and the loads of its engines."""
        engines = await self._pool.statuses()
        return models_pb2.GetStatusResponse(models=[model_status(self._model, engines)])

    async def LoadAdapter(
        self, request: models_pb2.LoadAdapterRequest, context: Context
    ) -> models_pb2.LoadAdapterResponse:
        await self._pool.load_adapter(request.name, request.path)
        return models_pb2.LoadAdapterResponse()

    async def UnloadAdapter(
        self, request: models_pb2.UnloadAdapterRequest, context: Context
    ) -> models_pb2.UnloadAdapterResponse:
        await self._pool.unload_adapter(request.name)
        return models_pb2.UnloadAdapterResponse()


class _ClientSession:
    """Requests of one Session by handle."""

    def __init__(
        self,
        registry: CompletionRegistry,
        processors: ProcessorFactory,
        send_queue: SendQueue[CompletionStream],
        model: str,
    ) -> None:
        self._registry = registry
        self._processors = processors
        self._send_queue = send_queue
        self._model = model
        self._caller = identity.current.get()
        self._streams: dict[int, CompletionStream] = {}
        self._handles: dict[CompletionStream, int] = {}

    @property
    def is_idle(self) -> bool:
        """True if every request has been answered."""
        return not self._streams

    async def read(self, messages: AsyncIterator[completion_pb2.SessionRequest]) -> None:
        """Execute the client's commands until it ends its side."""
        async for message in messages:
            time_slice = TimeSlice()
            for command in message.commands:
                self._execute(command)
                if time_slice.is_over:
                    await time_slice.renew()

    def write(self, response: completion_pb2.SessionResponse) -> None:
        """Write ready output, up to the size of a message and one time slice of the event loop."""
        time_slice = TimeSlice()
        for place, stream in enumerate(self._send_queue.take()):
            handle = self._handles.get(stream)
            if handle is not None:
                self._write_stream(stream, handle, response)
            if place % _CHECK_EVERY == _CHECK_EVERY - 1 and (
                time_slice.is_over or response.ByteSize() > _FULL_BYTES
            ):
                break
        if self._send_queue.has_marks:
            self._send_queue.wake()

    async def abandon(self) -> None:
        """End all requests of a client that has disconnected."""
        time_slice = TimeSlice()
        for stream in list(self._handles):
            stream.abandon()
            if time_slice.is_over:
                await time_slice.renew()

    def _write_stream(
        self, stream: CompletionStream, handle: int, response: completion_pb2.SessionResponse
    ) -> None:
        def add() -> completion_pb2.GenerateResponse:
            return response.events.add(handle=handle).response

        try:
            stream.write(add, lambda: response.ByteSize() > _FULL_BYTES)
        except Exception:
            stream.fail_unexpectedly()
        if stream.error is not None:
            response.events.add(handle=handle, error=stream.error.to_status())
        if stream.error is not None or stream.is_written:
            del self._streams[handle], self._handles[stream]

    def _execute(self, command: completion_pb2.SessionCommand) -> None:
        kind, handle = command.WhichOneof("command"), command.handle
        if kind == "credit":
            check_bounds(command.credit, "commands.credit")
        if kind == "start":
            if handle in self._streams:
                raise invalid("commands.handle", f"The handle {handle} is in use.")
            self._start(handle, command.start)
        elif kind is None:
            raise invalid("commands", "A command must have one of the known kinds.")
        elif (stream := self._streams.get(handle)) is not None:  # a missing stream has ended
            if kind == "cancel":
                stream.cancel()
            else:
                stream.credit(command.credit.tokens)

    def _start(self, handle: int, start: completion_pb2.SessionStart) -> None:
        context = _context_of_start(start.context, start.request, self._caller, self._model)
        previous = current_tenant.set(context.tenant)  # inherited by the request's tasks
        try:
            stream = self._registry.start(
                self._processors.processor(start.request),
                context,
                self._send_queue,
                credit=start.credit if start.HasField("credit") else None,
            )
        finally:
            current_tenant.reset(previous)
        self._streams[handle] = stream
        self._handles[stream] = handle


def _wake_writer(send_queue: SendQueue[CompletionStream], reader: asyncio.Task[None]) -> None:
    if not reader.cancelled():
        reader.exception()  # asyncio logs an exception that is not retrieved
    send_queue.wake()


def _context_of_call(context: Context, request: TextRequest, model: str) -> CallContext:
    start = partial(start_span, request, traceparent.get(), request_id.get())
    return context_of_call(context, request, model, request_id.get(), start)


def _context_of_start(
    context: completion_pb2.RequestContext,
    request: completion_pb2.GenerateRequest,
    caller: Identity,
    model: str,
) -> CallContext:
    request_id = sane_request_id(context.request_id)
    tenant, priority, refusal = "", 0, None
    try:
        tenant = caller.tenant(context.tenant, "context.tenant")
        priority = caller.priority(context.priority, "context.priority")
    except ServiceError as error:  # the error ends this request alone: the Session goes on
        refusal = error
    return CallContext(
        request_id=request_id,
        span=start_span(request, sane_traceparent(context.traceparent), request_id),
        tenant=tenant,
        priority=priority,
        deadline=deadline_after(
            context.timeout_seconds if context.HasField("timeout_seconds") else None
        ),
        user=request.user,
        meter=meter_of(caller, request, model),
        refusal=refusal,
    )
