"""The tokenizer service as the shim uses it: one Session for what generates, calls for the rest."""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from services.common.logging import request_id, traceparent
from services.http_shim.accounts.account import GenerationRequest
from tokenwire.channel import LOST_SECONDS, connect
from tokenwire.errors import ServiceError
from tokenwire.pb.completion.v1 import completion_pb2
from tokenwire.pb.completion.v1.completion_pb2_grpc import CompletionServiceStub
from tokenwire.pb.tokenizer.v1 import tokenizer_pb2
from tokenwire.pb.tokenizer.v1.tokenizer_pb2_grpc import TokenizerServiceStub
from tokenwire.session import Listener, completion_session

__all__ = ["Backend", "RetryPolicy", "Submission"]

_SERVICE = completion_pb2.DESCRIPTOR.services_by_name["CompletionService"].full_name
_CALL_SECONDS = 30.0
_HEALTH_SECONDS = 2.0
_PROBE_SECONDS = 0.2
_MOST_LOST = 3
"""Times that a request may lose the service: it may be what kills it"""
_HELD = frozenset({"SESSION_LOST", "DRAINING"})
"""Reasons for which a request waits that was not admitted yet"""
Answer = TypeVar("Answer")


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """What new requests get while the tokenizer service stops, starts, or is lost."""

    wait_seconds: float = 60.0
    """How long they wait for it"""
    max_waiting: int = 1024
    """How many may; more are refused"""
    lost_seconds: float = LOST_SECONDS
    """Silence after which it is lost"""


class Submission:
    """A completion or a chat that was submitted: what can still be said about it.

    It listens until the request is admitted. By then nothing of it was told to the client: where
    the service stops or is lost, it is submitted again once that is back.
    """

    __slots__ = ("_again", "_backend", "_command", "_handle", "_is_cancelled", "_listener", "_lost")

    def __init__(
        self,
        backend: "Backend",
        command: completion_pb2.SessionCommand,
        listener: Listener[completion_pb2.SessionEvent],
    ) -> None:
        self._backend = backend
        self._command = command
        self._listener = listener
        self._lost = 0
        self._is_cancelled = False
        self._again: asyncio.Task[None] | None = None
        self._handle = self._submit()

    def on_event(self, event: completion_pb2.SessionEvent) -> None:
        """The admission; what follows goes straight to the listener."""
        self._backend.session.hand_over(self._handle, self._listener)
        self._listener.on_event(event)

    def on_error(self, error: ServiceError) -> None:
        """It was refused, or lost before it was admitted."""
        self._lost += error.reason == "SESSION_LOST"
        if error.reason in _HELD and self._lost <= _MOST_LOST and not self._is_cancelled:
            self._again = asyncio.ensure_future(self._submit_again(error))
        else:
            self._listener.on_error(error)

    def grant(self, tokens: int) -> None:
        """Let every choice send so many tokens more."""
        credit = completion_pb2.Credit(tokens=tokens)
        command = completion_pb2.SessionCommand(handle=self._handle, credit=credit)
        self._backend.session.send(command)

    def cancel(self) -> None:
        """End it; its listener hears nothing more."""
        self._is_cancelled = True
        if self._again is not None:
            self._again.cancel()
        self._backend.session.detach(self._handle)
        cancel = completion_pb2.Cancel()
        command = completion_pb2.SessionCommand(handle=self._handle, cancel=cancel)
        self._backend.session.send(command)

    def _submit(self) -> int:
        session = self._backend.session
        self._command.handle = handle = session.open(self)
        session.send(self._command)
        return handle

    async def _submit_again(self, error: ServiceError) -> None:
        try:
            await self._backend.comes_back(error)
        except ServiceError as refusal:
            self._listener.on_error(refusal)
        else:
            self._handle = self._submit()


class Backend:
    """The tokenizer service at "host:port". Make it on the event loop that uses it."""

    def __init__(self, target: str, retry_policy: RetryPolicy) -> None:
        self._retry_policy = retry_policy
        self._channel = connect(target, retry_policy.lost_seconds)
        self._waiting = 0
        self._probe: asyncio.Task[bool] | None = None
        self.session = completion_session(self._channel)
        self._completion = CompletionServiceStub(self._channel)
        self._tokenizer = TokenizerServiceStub(self._channel)
        self._health = health_pb2_grpc.HealthStub(self._channel)

    def submit(
        self,
        request: GenerationRequest,
        listener: Listener[completion_pb2.SessionEvent],
        *,
        tenant: str,
        priority: int,
        credit: int | None = None,
    ) -> Submission:
        """Start a completion or a chat; all that comes of it goes to `listener`.

        tenant: whose prompts it may find in the prefix cache.
        priority: higher first.
        credit: tokens per choice that may be sent before more is granted; None = unlimited.
        """
        context = completion_pb2.RequestContext(
            request_id=request_id.get(),
            traceparent=traceparent.get(),
            tenant=tenant,
            priority=priority,
        )
        if isinstance(request, completion_pb2.ChatRequest):
            chat = completion_pb2.StartChat(request=request, context=context, credit=credit)
            command = completion_pb2.SessionCommand(start_chat=chat)
        else:
            start = completion_pb2.StartComplete(request=request, context=context, credit=credit)
            command = completion_pb2.SessionCommand(start_complete=start)
        return Submission(self, command, listener)

    async def comes_back(self, error: ServiceError) -> None:
        """Return when the service serves again, of which `error` told that it does not.

        Raises that error if it takes too long, and RESOURCE_EXHAUSTED if too many wait.
        """
        if self._waiting >= self._retry_policy.max_waiting:
            message = f"{self._waiting} requests wait for the model already; try again."
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
        """The models that are served."""
        call = self._completion.ListModels(completion_pb2.ListModelsRequest(), **_context())
        try:
            return list((await call).models)
        except grpc.aio.AioRpcError as error:
            raise ServiceError.from_rpc_error(error) from None

    async def tokenizer(self, model: str) -> tokenizer_pb2.GetTokenizerResponse:
        """A model's tokenizer."""
        request = tokenizer_pb2.GetTokenizerRequest(model=model)
        return await self._answer(lambda: self._tokenizer.GetTokenizer(request, **_context()))

    async def encode(self, request: tokenizer_pb2.EncodeRequest) -> tokenizer_pb2.EncodeResponse:
        """Text to ids."""
        return await self._answer(lambda: self._tokenizer.Encode(request, **_context()))

    async def decode(self, request: tokenizer_pb2.DecodeRequest) -> tokenizer_pb2.DecodeResponse:
        """Ids to text."""
        return await self._answer(lambda: self._tokenizer.Decode(request, **_context()))

    async def render(
        self, request: tokenizer_pb2.RenderChatRequest
    ) -> tokenizer_pb2.RenderChatResponse:
        """Messages to the prompt that they make."""
        return await self._answer(lambda: self._tokenizer.RenderChat(request, **_context()))

    async def is_ready(self) -> bool:
        """Whether completions would be served."""
        request = health_pb2.HealthCheckRequest(service=_SERVICE)
        try:
            answer = await self._health.Check(request, timeout=_HEALTH_SECONDS)
        except grpc.aio.AioRpcError:
            return False
        return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)

    async def _answer(self, call: Callable[[], Awaitable[Answer]]) -> Answer:
        """Make a call, and make it again where the service was lost; it changes nothing there."""
        for _ in range(_MOST_LOST):
            try:
                return await call()
            except grpc.aio.AioRpcError as failure:
                error = ServiceError.from_rpc_error(failure)
                if error.code is not grpc.StatusCode.UNAVAILABLE:
                    raise error from None
            await self.comes_back(error)
        raise error

    async def _probe_health(self, seconds: float) -> bool:
        loop = asyncio.get_running_loop()
        end = loop.time() + seconds
        while loop.time() < end:
            if await self.is_ready():
                return True
            await asyncio.sleep(_PROBE_SECONDS)
        return False

    async def close(self) -> None:
        """End the Session, and with it what still runs."""
        await self.session.close()
        await self._channel.close()


def _context() -> dict[str, Any]:
    names = (("x-request-id", request_id.get()), ("traceparent", traceparent.get()))
    return {"timeout": _CALL_SECONDS, "metadata": [name for name in names if name[1]]}
