"""The tokenizer service as the shim uses it: one Session for what generates, calls for the rest."""

from collections.abc import Awaitable
from typing import Any, TypeVar

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from services.common.logging import request_id, traceparent
from services.http_shim.limits import GenerationRequest
from tokenwire.channel import connect
from tokenwire.completion.v1 import completion_pb2
from tokenwire.completion.v1.completion_pb2_grpc import CompletionServiceStub
from tokenwire.errors import ServiceError
from tokenwire.session import CompletionSession, Listener, completion_session
from tokenwire.tokenizer.v1 import tokenizer_pb2
from tokenwire.tokenizer.v1.tokenizer_pb2_grpc import TokenizerServiceStub

__all__ = ["Backend", "Submission"]

_SERVICE = completion_pb2.DESCRIPTOR.services_by_name["CompletionService"].full_name
_CALL_SECONDS = 30.0
_HEALTH_SECONDS = 2.0
Answer = TypeVar("Answer")


class Submission:
    """A completion or a chat that was submitted: what can still be said about it."""

    __slots__ = ("_handle", "_session")

    def __init__(self, session: CompletionSession, handle: int) -> None:
        self._session = session
        self._handle = handle

    def grant(self, tokens: int) -> None:
        """Let every choice send so many tokens more."""
        credit = completion_pb2.Credit(tokens=tokens)
        self._session.send(completion_pb2.SessionCommand(handle=self._handle, credit=credit))

    def cancel(self) -> None:
        """End it; its listener hears nothing more."""
        self._session.forget(self._handle)
        cancel = completion_pb2.Cancel()
        self._session.send(completion_pb2.SessionCommand(handle=self._handle, cancel=cancel))


class Backend:
    """The tokenizer service at "host:port". Make it on the event loop that uses it."""

    def __init__(self, target: str) -> None:
        self._channel = connect(target)
        self._session = completion_session(self._channel)
        self._completion = CompletionServiceStub(self._channel)
        self._tokenizer = TokenizerServiceStub(self._channel)
        self._health = health_pb2_grpc.HealthStub(self._channel)

    def submit(
        self,
        request: GenerationRequest,
        listener: Listener[completion_pb2.SessionEvent],
        *,
        tenant: str,
        credit: int | None = None,
    ) -> Submission:
        """Start a completion or a chat; all that comes of it goes to `listener`.

        tenant: whose prompts it may find in the prefix cache.
        credit: tokens per choice that may be sent before more is granted; None = unlimited.
        """
        handle = self._session.open(listener)
        context = completion_pb2.RequestContext(
            request_id=request_id.get(), traceparent=traceparent.get(), tenant=tenant
        )
        if isinstance(request, completion_pb2.ChatRequest):
            chat = completion_pb2.StartChat(request=request, context=context, credit=credit)
            command = completion_pb2.SessionCommand(handle=handle, start_chat=chat)
        else:
            start = completion_pb2.StartComplete(request=request, context=context, credit=credit)
            command = completion_pb2.SessionCommand(handle=handle, start_complete=start)
        self._session.send(command)
        return Submission(self._session, handle)

    async def models(self) -> list[completion_pb2.Model]:
        """The models that are served."""
        call = self._completion.ListModels(completion_pb2.ListModelsRequest(), **_context())
        return list((await _answer(call)).models)

    async def tokenizer(self, model: str) -> tokenizer_pb2.GetTokenizerResponse:
        """A model's tokenizer."""
        request = tokenizer_pb2.GetTokenizerRequest(model=model)
        return await _answer(self._tokenizer.GetTokenizer(request, **_context()))

    async def encode(self, request: tokenizer_pb2.EncodeRequest) -> tokenizer_pb2.EncodeResponse:
        """Text to ids."""
        return await _answer(self._tokenizer.Encode(request, **_context()))

    async def decode(self, request: tokenizer_pb2.DecodeRequest) -> tokenizer_pb2.DecodeResponse:
        """Ids to text."""
        return await _answer(self._tokenizer.Decode(request, **_context()))

    async def render(
        self, request: tokenizer_pb2.RenderChatRequest
    ) -> tokenizer_pb2.RenderChatResponse:
        """Messages to the prompt that they make."""
        return await _answer(self._tokenizer.RenderChat(request, **_context()))

    async def is_ready(self) -> bool:
        """Whether completions would be served."""
        request = health_pb2.HealthCheckRequest(service=_SERVICE)
        try:
            answer = await self._health.Check(request, timeout=_HEALTH_SECONDS)
        except grpc.aio.AioRpcError:
            return False
        return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)

    async def close(self) -> None:
        """End the Session, and with it what still runs."""
        await self._session.close()
        await self._channel.close()


def _context() -> dict[str, Any]:
    names = (("x-request-id", request_id.get()), ("traceparent", traceparent.get()))
    return {"timeout": _CALL_SECONDS, "metadata": [name for name in names if name[1]]}


async def _answer(call: Awaitable[Answer]) -> Answer:
    try:
        return await call
    except grpc.aio.AioRpcError as error:
        raise ServiceError.from_rpc_error(error) from None
