"""CompletionService: completions over calls of their own, and many over one Session."""

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from dataclasses import dataclass
from typing import Any, TypeVar

import grpc

from services.common.errors import cut_stalled
from services.common.interceptor import (
    metadata_priority,
    metadata_value,
    sane_request_id,
    sane_traceparent,
)
from services.common.logging import request_id, traceparent
from services.common.settings import StreamSettings
from services.tokenizer.chat.prompt import ChatTemplates
from services.tokenizer.chat.work import ChatWork
from services.tokenizer.completion.completion import CallContext, Completion, Completions
from services.tokenizer.completion.plan import CompleteWork, Work
from services.tokenizer.outbox import Outbox
from services.tokenizer.text.infill import InfillTemplate
from services.tokenizer.text.vocabulary import Vocabulary
from tokenwire.errors import invalid
from tokenwire.pb.completion.v1 import completion_pb2
from tokenwire.pb.completion.v1.completion_pb2_grpc import CompletionServiceServicer
from tokenwire.pb.engine.v1 import engine_pb2
from tokenwire.time_slice import TimeSlice

__all__ = ["CompletionServicer", "Works"]

Context = grpc.aio.ServicerContext[Any, Any]
R = TypeVar("R", completion_pb2.CompleteResponse, completion_pb2.ChatResponse)
_FULL = 4 * 1024 * 1024  # bytes after which a message of a Session takes no more
_CHECK_EVERY = 8  # completions; so many together stay far below the limit of a message


@dataclass(frozen=True, slots=True)
class Works:
    """Makes work of requests."""

    vocabulary: Vocabulary
    infill: InfillTemplate | None
    templates: ChatTemplates

    def complete(self, request: completion_pb2.CompleteRequest) -> CompleteWork:
        """A completion."""
        return CompleteWork(request, self.vocabulary, self.infill)

    def chat(self, request: completion_pb2.ChatRequest) -> ChatWork:
        """A chat."""
        return ChatWork(request, self.vocabulary, self.templates)


class CompletionServicer(CompletionServiceServicer):
    """The rpcs; what they share is in `Completions`."""

    def __init__(
        self,
        completions: Completions,
        works: Works,
        model: str,
        created: int,
        settings: StreamSettings,
    ) -> None:
        self._completions = completions
        self._works = works
        self._model = model
        self._created = created
        self._settings = settings
        self._tasks: set[asyncio.Task[None]] = set()

    async def Complete(
        self, request: completion_pb2.CompleteRequest, context: Context
    ) -> AsyncIterator[completion_pb2.CompleteResponse]:
        """One completion. The first message, and with it the metadata, is its admission."""
        work = self._works.complete(request)
        async for response in self._answer(
            work, request.user, context, completion_pb2.CompleteResponse, Completion.write
        ):
            yield response

    async def Chat(
        self, request: completion_pb2.ChatRequest, context: Context
    ) -> AsyncIterator[completion_pb2.ChatResponse]:
        """One chat, likewise."""
        work = self._works.chat(request)
        async for response in self._answer(
            work, request.user, context, completion_pb2.ChatResponse, work.write
        ):
            yield response

    async def _answer(
        self,
        work: Work,
        user: str,
        context: Context,
        make: type[R],
        write: Callable[[Completion, Callable[[], R]], None],
    ) -> AsyncIterator[R]:
        outbox = Outbox(self._settings, lambda: self._cut(context, completion.abandon))
        completion: Completion = self._completions.start(
            work, _context_of_call(context, user), outbox, windowed=True
        )
        responses: list[R] = []

        def add() -> R:
            responses.append(make())
            return responses[-1]

        try:
            while not completion.is_written:
                is_heartbeat_due = await outbox.wait()
                outbox.clear()
                if is_heartbeat_due and completion.is_admitted:
                    add().heartbeat.SetInParent()
                write(completion, add)
                for response in responses:
                    yield response
                    outbox.sent()
                responses.clear()
                completion.grant()
                if completion.error is not None:
                    raise completion.error
        finally:
            completion.abandon()
            outbox.close()

    async def Session(
        self, request_iterator: AsyncIterator[completion_pb2.SessionRequest], context: Context
    ) -> AsyncIterator[completion_pb2.SessionResponse]:
        """Many completions. What the client starts before it ends its side is still answered; what
        runs when the call breaks is cancelled."""
        await context.send_initial_metadata(())

        def abandon() -> None:
            self._spawn(client.abandon())

        outbox = Outbox(self._settings, lambda: self._cut(context, abandon))
        client = _ClientSession(self._completions, self._works, outbox)
        reader = asyncio.ensure_future(client.read(request_iterator))

        def on_end(reader: asyncio.Task[None]) -> None:
            if not reader.cancelled():
                reader.exception()  # or asyncio would log it, of a call that has been cut
            outbox.wake()

        reader.add_done_callback(on_end)
        try:
            while not (reader.done() and client.is_idle):
                is_heartbeat_due = await outbox.wait()
                response = completion_pb2.SessionResponse()
                if is_heartbeat_due:
                    response.events.add().heartbeat.SetInParent()
                client.write(response)
                if response.events:
                    yield response
                else:
                    await asyncio.sleep(0)  # what is left over must not keep the loop to itself
                if reader.done():
                    reader.result()
        finally:
            reader.cancel()
            abandon()
            outbox.close()

    async def ListModels(
        self, request: completion_pb2.ListModelsRequest, context: Context
    ) -> completion_pb2.ListModelsResponse:
        """The one model."""
        limits = self._completions.link.limits
        model = completion_pb2.Model(
            id=self._model,
            created=self._created,
            context_length=limits.context_length,
            max_output_length=limits.context_length,
            max_logprobs=limits.max_logprobs,
            infill=self._works.infill is not None,
            grammar=engine_pb2.CAPABILITY_GRAMMAR in limits.capabilities,
            system_fingerprint=limits.system_fingerprint,
            chat=self._works.templates.is_available,
            max_chat_logprobs=limits.max_chat_logprobs,
        )
        return completion_pb2.ListModelsResponse(models=[model])

    def _cut(self, context: Context, abandon: Callable[[], None]) -> None:
        """End a call whose client reads nothing."""
        abandon()
        self._spawn(cut_stalled(context, self._settings.stall_seconds))

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


class _ClientSession:
    """The requests of one Session, by handle."""

    def __init__(self, completions: Completions, works: Works, outbox: Outbox) -> None:
        self._completions = completions
        self._works = works
        self._outbox = outbox
        self._by_handle: dict[int, Completion] = {}
        self._handles: dict[Completion, int] = {}
        self._chats: dict[Completion, ChatWork] = {}

    @property
    def is_idle(self) -> bool:
        """Whether every request has been answered."""
        return not self._by_handle

    async def read(self, messages: AsyncIterator[completion_pb2.SessionRequest]) -> None:
        """Carry out the client's commands until it ends its side."""
        async for message in messages:
            time_slice = TimeSlice()
            for command in message.commands:
                self._carry_out(command)
                if time_slice.is_over:
                    await time_slice.renew()

    def write(self, response: completion_pb2.SessionResponse) -> None:
        """What is ready, as far as one message holds it and one turn of the event loop allows."""
        time_slice = TimeSlice()
        for place, source in enumerate(self._outbox.take()):
            if isinstance(source, Completion) and source in self._handles:
                self._write_completion(source, self._handles[source], response)
            if place % _CHECK_EVERY == _CHECK_EVERY - 1 and (
                time_slice.is_over or response.ByteSize() > _FULL
            ):
                break
        if self._outbox.pending:
            self._outbox.wake()

    async def abandon(self) -> None:
        """The client is gone."""
        time_slice = TimeSlice()
        for completion in list(self._handles):
            completion.abandon()
            if time_slice.is_over:
                await time_slice.renew()

    def _write_completion(
        self, completion: Completion, handle: int, response: completion_pb2.SessionResponse
    ) -> None:
        def add() -> completion_pb2.SessionEvent:
            return response.events.add(handle=handle)

        try:
            if (chat := self._chats.get(completion)) is not None:
                chat.write(completion, lambda: add().chat)
            else:
                completion.write(lambda: add().complete, lambda: response.ByteSize() > _FULL)
        except Exception:
            completion.fail_unexpectedly()
        if completion.error is not None:
            response.events.add(handle=handle, error=completion.error.to_status())
        if completion.error is not None or completion.is_written:
            del self._by_handle[handle], self._handles[completion]
            self._chats.pop(completion, None)

    def _carry_out(self, command: completion_pb2.SessionCommand) -> None:
        kind, handle = command.WhichOneof("command"), command.handle
        if kind in ("start_complete", "start_chat") and handle in self._by_handle:
            raise invalid("commands.handle", f"The handle {handle} is in use.")
        if kind == "start_complete":
            start = command.start_complete
            self._start(handle, start, self._works.complete(start.request))
        elif kind == "start_chat":
            chat = self._works.chat(command.start_chat.request)
            self._chats[self._start(handle, command.start_chat, chat)] = chat
        elif kind is None:
            raise invalid("commands", "A command must be one of those that are known.")
        elif kind == "credit" and command.credit.tokens < 1:
            raise invalid("commands.credit.tokens", "Credit must be at least 1 token.")
        elif (completion := self._by_handle.get(handle)) is not None:  # else it met its end
            if kind == "cancel":
                completion.cancel()
            else:
                completion.credit(command.credit.tokens)

    def _start(
        self,
        handle: int,
        start: completion_pb2.StartComplete | completion_pb2.StartChat,
        work: Work,
    ) -> Completion:
        completion = self._completions.start(
            work,
            _context_of_start(start.context, start.request.user),
            self._outbox,
            credit=start.credit if start.HasField("credit") else None,
        )
        self._by_handle[handle] = completion
        self._handles[completion] = handle
        return completion


def _context_of_call(context: Context, user: str) -> CallContext:
    left = context.time_remaining()
    return CallContext(
        request_id=request_id.get(),
        traceparent=traceparent.get(),
        tenant=metadata_value(context, "x-tenant") or "",
        priority=metadata_priority(context),
        deadline=_deadline(left),
        user=user,
    )


def _context_of_start(context: completion_pb2.RequestContext, user: str) -> CallContext:
    return CallContext(
        request_id=sane_request_id(context.request_id),
        traceparent=sane_traceparent(context.traceparent),
        tenant=context.tenant,
        priority=context.priority,
        deadline=_deadline(
            context.timeout_seconds if context.HasField("timeout_seconds") else None
        ),
        user=user,
    )


def _deadline(seconds: float | None) -> float | None:
    """In the loop's time; None for none. A call without a deadline has one in centuries. NaN stays
    that, and is refused with the request."""
    if seconds is None or seconds > 1e8:
        return None
    return asyncio.get_running_loop().time() + seconds
