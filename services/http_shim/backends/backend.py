"""Client of a tokenizer service: one Session for generation, unary calls for the rest."""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import grpc

from services.common.logging import request_id, traceparent
from services.http_shim.accounts.account import GenerationRequest
from services.http_shim.images.request_images import RequestImages
from tokenwire.channel import LOST_SECONDS, connect
from tokenwire.errors import ServiceError
from tokenwire.pb.completion.v1 import completion_pb2
from tokenwire.pb.completion.v1.completion_pb2_grpc import CompletionServiceStub
from tokenwire.pb.tokenizer.v1 import tokenizer_pb2
from tokenwire.pb.tokenizer.v1.tokenizer_pb2_grpc import TokenizerServiceStub
from tokenwire.serving.health import reports_serving
from tokenwire.session import Listener, completion_session

__all__ = ["Backend", "RetryPolicy", "Submission"]

_SERVICE = completion_pb2.DESCRIPTOR.services_by_name["CompletionService"].full_name
_CALL_SECONDS = 30.0
_PROBE_SECONDS = 0.2
_MAX_LOSSES = 3
"""Losses of the service that a request survives; the request itself may crash the service"""
_RETRIED = frozenset({"SESSION_LOST", "DRAINING"})
"""Reasons after which a request that was not yet admitted is submitted again"""
Answer = TypeVar("Answer")


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """Limits on new requests that wait while a tokenizer service restarts."""

    wait_seconds: float = 60.0
    """Longest wait of a request, in seconds"""
    max_waiting: int = 1024
    """Most requests that wait; more are refused"""
    lost_seconds: float = LOST_SECONDS
    """Silence after which the service counts as lost, in seconds"""


class Submission:
    """A submitted completion or chat: grants credit and cancels.

    A submission listens to its request until admission. The client has received nothing until
    then, so a request that loses the service is submitted again when the service is back. Its
    images are in memory until then.
    """

    __slots__ = (
        "_backend",
        "_cancelled",
        "_command",
        "_handle",
        "_listener",
        "_losses",
        "_on_admitted",
        "_retry",
    )

    def __init__(
        self,
        backend: "Backend",
        command: completion_pb2.SessionCommand,
        listener: Listener[completion_pb2.SessionEvent],
        on_admitted: Callable[[], None],
    ) -> None:
        self._backend = backend
        self._command: completion_pb2.SessionCommand | None = command
        self._on_admitted = on_admitted
        self._listener = listener
        self._losses = 0
        self._cancelled = False
        self._retry: asyncio.Task[None] | None = None
        self._handle = self._submit()

    def on_event(self, event: completion_pb2.SessionEvent) -> None:
        """Hand the admission, and all later events directly, to the listener."""
        self._command = None
        self._on_admitted()
        self._backend.session.hand_over(self._handle, self._listener)
        self._listener.on_event(event)

    def on_error(self, error: ServiceError) -> None:
        """Submit the request again if it lost the service, else hand the error to the listener."""
        self._losses += error.reason == "SESSION_LOST"
        if error.reason in _RETRIED and self._losses <= _MAX_LOSSES and not self._cancelled:
            self._retry = asyncio.ensure_future(self._submit_again(error))
        else:
            self._listener.on_error(error)

    def grant(self, tokens: int) -> None:
        """Let every choice send that many more tokens."""
        credit = completion_pb2.Credit(tokens=tokens)
        command = completion_pb2.SessionCommand(handle=self._handle, credit=credit)
        self._backend.session.send(command)

    def cancel(self) -> None:
        """Abort the request; its listener gets no more events."""
        self._cancelled = True
        if self._retry is not None:
            self._retry.cancel()
        self._backend.session.detach(self._handle)
        cancel = completion_pb2.Cancel()
        command = completion_pb2.SessionCommand(handle=self._handle, cancel=cancel)
        self._backend.session.send(command)

    def _submit(self) -> int:
        session = self._backend.session
        assert self._command is not None  # the request is not admitted
        self._command.handle = handle = session.open(self)
        session.send(self._command)
        return handle

    async def _submit_again(self, error: ServiceError) -> None:
        try:
            await self._backend.wait_until_serving(error)
        except ServiceError as refusal:
            self._listener.on_error(refusal)
        else:
            self._handle = self._submit()


class Backend:
    """Client of the tokenizer service at "host:port". Create it on the event loop that uses it."""

    def __init__(self, target: str, retry_policy: RetryPolicy) -> None:
        self._retry_policy = retry_policy
        self._channel = connect(target, retry_policy.lost_seconds)
        self._waiting = 0
        self._probe: asyncio.Task[bool] | None = None
        self.session = completion_session(self._channel)
        self._completion = CompletionServiceStub(self._channel)
        self._tokenizer = TokenizerServiceStub(self._channel)

    def submit(
        self,
        request: GenerationRequest,
        listener: Listener[completion_pb2.SessionEvent],
        *,
        tenant: str,
        priority: int,
        credit: int | None = None,
        images: RequestImages | None = None,
        on_admitted: Callable[[], None] = lambda: None,
    ) -> Submission:
        """Start a completion or a chat, whose events go to `listener`.

        tenant: tenant whose prefix cache the request uses.
        priority: scheduling priority, higher first.
        credit: tokens per choice that may be sent before more are granted; None = unlimited.
        images: images of the request, which move into the command.
        on_admitted: called when the request is admitted, and its images are no longer in memory.
        """
        context = completion_pb2.RequestContext(
            request_id=request_id.get(),
            traceparent=traceparent.get(),
            tenant=tenant,
            priority=priority,
        )
        command = completion_pb2.SessionCommand()
        start: completion_pb2.StartChat | completion_pb2.StartComplete
        if isinstance(request, completion_pb2.ChatRequest):
            start = command.start_chat
            start.request.CopyFrom(request)
        else:
            start = command.start_complete
            start.request.CopyFrom(request)
        start.context.CopyFrom(context)
        if credit is not None:
            start.credit = credit
        if images is not None:
            images.move_into(start.request)
        return Submission(self, command, listener, on_admitted)

    async def wait_until_serving(self, error: ServiceError) -> None:
        """Wait until the service serves again.

        Raises `error` if that takes too long, and RESOURCE_EXHAUSTED if too many requests wait.
        """
        if self._waiting >= self._retry_policy.max_waiting:
            message = f"{self._waiting} requests already wait for the model; try again."
            code = grpc.StatusCode.RESOURCE_EXHAUSTED
            raise ServiceError(code, "QUEUE_FULL", message, retry_seconds=1)
        if self._probe is None or self._probe.done():
            self._probe = asyncio.ensure_future(self._probe_health(self._retry_policy.wait_seconds))
        self._waiting += 1
        try:
            if not await asyncio.shield(self._probe):
                raise error
        finally:
            self._waiting -= 1

    async def models(self) -> list[completion_pb2.Model]:
        """Return the models that the service serves."""
        call = self._completion.ListModels(completion_pb2.ListModelsRequest(), **_context())
        try:
            return list((await call).models)
        except grpc.aio.AioRpcError as error:
            raise ServiceError.from_rpc_error(error) from None

    async def status(self) -> completion_pb2.ModelStatus:
        """Return the counts and the load of the service's model."""
        call = self._completion.GetStatus(completion_pb2.GetStatusRequest(), **_context())
        try:
            return (await call).models[0]
        except grpc.aio.AioRpcError as error:
            raise ServiceError.from_rpc_error(error) from None

    async def tokenizer(self, model: str) -> tokenizer_pb2.GetTokenizerResponse:
        """Return the description of a model's tokenizer."""
        request = tokenizer_pb2.GetTokenizerRequest(model=model)
        return await self._answer(lambda: self._tokenizer.GetTokenizer(request, **_context()))

    async def encode(self, request: tokenizer_pb2.EncodeRequest) -> tokenizer_pb2.EncodeResponse:
        """Encode text to token ids."""
        return await self._answer(lambda: self._tokenizer.Encode(request, **_context()))

    async def decode(self, request: tokenizer_pb2.DecodeRequest) -> tokenizer_pb2.DecodeResponse:
        """Decode token ids to text."""
        return await self._answer(lambda: self._tokenizer.Decode(request, **_context()))

    async def render(
        self, request: tokenizer_pb2.RenderChatRequest
    ) -> tokenizer_pb2.RenderChatResponse:
        """Render messages to their prompt."""
        return await self._answer(lambda: self._tokenizer.RenderChat(request, **_context()))

    async def is_ready(self) -> bool:
        """Return whether the service accepts completions."""
        return await reports_serving(self._channel, _SERVICE)

    async def _answer(self, call: Callable[[], Awaitable[Answer]]) -> Answer:
        """Return the answer of an idempotent call, which is repeated if the service was lost."""
        losses = 0
        while True:
            try:
                return await call()
            except grpc.aio.AioRpcError as failure:
                error = ServiceError.from_rpc_error(failure)
            if error.code is not grpc.StatusCode.UNAVAILABLE or losses == _MAX_LOSSES:
                raise error
            losses += 1
            await self.wait_until_serving(error)

    async def _probe_health(self, seconds: float) -> bool:
        loop = asyncio.get_running_loop()
        end = loop.time() + seconds
        while loop.time() < end:
            if await self.is_ready():
                return True
            await asyncio.sleep(_PROBE_SECONDS)
        return False

    async def close(self) -> None:
        """End the Session and abort its requests."""
        await self.session.close()
        await self._channel.close()


def _context() -> dict[str, Any]:
    ids = (("x-request-id", request_id.get()), ("traceparent", traceparent.get()))
    return {"timeout": _CALL_SECONDS, "metadata": [entry for entry in ids if entry[1]]}
