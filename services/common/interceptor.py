"""The server interceptor of all RPCs: callers, request ids, typed errors, one log line per call."""

import inspect
import logging
import re
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Collection
from typing import Any

import grpc
from google.protobuf.message import DecodeError

from services.common import tracing
from services.common.accounts import identity
from services.common.accounts.authenticator import Authenticator
from services.common.accounts.identity import ANYONE, Identity
from services.common.errors import abort, internal_error
from services.common.failures import failure
from services.common.logging import request_id, traceparent
from services.common.priority import PRIORITY_KEY, TENANT_KEY, parse_priority
from services.common.sharing.tenant import current_tenant
from services.common.span import Span
from tokenwire.errors import ServiceError

__all__ = [
    "RpcInterceptor",
    "metadata_priority",
    "metadata_value",
    "sane_request_id",
    "sane_traceparent",
]

_LOG = logging.getLogger("rpc")
_PROBES = frozenset(
    {
        "/tokenwire.completion.v1.CompletionService/GetStatus",
        "/tokenwire.completion.v1.CompletionService/ListModels",
        "/tokenwire.engine.v1.EngineControlService/GetLoad",
        "/tokenwire.jobs.v1.UsageService/RecordUsage",
    }
)
"""Calls that services repeat every few seconds; a log of them would hide all else"""
_LOAD_REPORTS = "/xds.service.orca.v3.OpenRcaService/"
_SANE = re.compile(r"[A-Za-z0-9._:/+=@-]{1,128}")
_TRACEPARENT = re.compile(r"[0-9a-f]{2}-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]{2}")


def sane_request_id(offered: str | None) -> str:
    """Return a client's request id if it is fit for logs and headers, a new id otherwise."""
    if offered and _SANE.fullmatch(offered):
        return offered
    return f"req_{uuid.uuid4().hex}"


def sane_traceparent(offered: str | None) -> str:
    """Return a client's trace context if it is well-formed, "" otherwise."""
    return offered if offered and _TRACEPARENT.fullmatch(offered) else ""


def metadata_value(context: grpc.aio.ServicerContext[Any, Any], key: str) -> str | None:
    """Return the first value of a metadata key."""
    for name, value in context.invocation_metadata() or ():
        if name == key:
            return value if isinstance(value, str) else value.decode("utf-8", "replace")
    return None


def metadata_priority(context: grpc.aio.ServicerContext[Any, Any]) -> int:
    """Return x-priority, 0 if it is absent. Raises INVALID_ARGUMENT if it is not an int32."""
    return parse_priority(metadata_value(context, PRIORITY_KEY) or "0")


class RpcInterceptor(grpc.aio.ServerInterceptor):
    """Interceptor that checks the caller, sets request ids, turns ServiceErrors into statuses and
    logs the call. Health checks and load reports are open to everyone: balancers show no token."""

    def __init__(
        self, authenticator: Authenticator | None = None, peer_methods: Collection[str] = ()
    ) -> None:
        """authenticator: check of callers; None = all are accepted. peer_methods: full names of the
        methods that only services of the installation may call."""
        self._authenticator = authenticator
        self._peer_methods = peer_methods

    async def intercept_service(
        self,
        continuation: Callable[
            [grpc.HandlerCallDetails], Awaitable["grpc.RpcMethodHandler[Any, Any] | None"]
        ],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> "grpc.RpcMethodHandler[Any, Any]":
        handler: Any = await continuation(handler_call_details)
        method = handler_call_details.method
        if handler is None or method.startswith("/grpc.health"):
            return handler  # type: ignore[no-any-return]
        try:
            caller = self._identify(handler_call_details)
        except ServiceError as error:  # refused before a message is read
            return grpc.stream_stream_rpc_method_handler(_stream(_refusal(error), method, None))
        if method.startswith("/grpc.reflection"):
            return handler  # type: ignore[no-any-return]
        inner = handler.unary_unary or handler.unary_stream or handler.stream_unary
        inner = inner or handler.stream_stream
        if handler.response_streaming:
            wrapped: Any = _stream(inner, method, caller)
            make = (
                grpc.stream_stream_rpc_method_handler
                if handler.request_streaming
                else grpc.unary_stream_rpc_method_handler
            )
        else:
            wrapped = _unary(inner, method, caller)
            make = (
                grpc.stream_unary_rpc_method_handler
                if handler.request_streaming
                else grpc.unary_unary_rpc_method_handler
            )
        return make(wrapped, _reader(handler.request_deserializer), handler.response_serializer)

    def _identify(self, details: grpc.HandlerCallDetails) -> Identity:
        if self._authenticator is None or details.method.startswith(_LOAD_REPORTS):
            return ANYONE
        metadata: Any = details.invocation_metadata or ()
        given = next((value for key, value in metadata if key == "authorization"), None)
        caller = self._authenticator.identify(given)
        if details.method in self._peer_methods:
            caller.require_peer(details.method.rpartition("/")[2])
        return caller


def _refusal(error: ServiceError) -> Any:
    async def refuse(
        requests: AsyncIterator[Any], context: grpc.aio.ServicerContext[Any, Any]
    ) -> AsyncIterator[bytes]:
        raise error
        yield b""

    return refuse


_UNREADABLE = object()
"""Placeholder of a request that can't be parsed"""


def _reader(deserialize: Callable[[bytes], Any]) -> Callable[[bytes], Any]:
    def read(data: bytes) -> Any:
        try:
            return deserialize(data)
        except DecodeError:  # gRPC itself would send a Python error, or nothing
            return _UNREADABLE

    return read


def _readable(request: Any) -> Any:
    """Return the request or stream of requests; raise INVALID_ARGUMENT for an unparsed one."""
    if isinstance(request, AsyncIterator):
        return _all_readable(request)
    if request is _UNREADABLE:
        raise ServiceError(
            grpc.StatusCode.INVALID_ARGUMENT,
            "INVALID_MESSAGE",
            "The request is not a protobuf message of the type that the method takes.",
        )
    return request


async def _all_readable(requests: AsyncIterator[Any]) -> AsyncIterator[Any]:
    async for request in requests:
        yield _readable(request)


def _unary(inner: Any, method: str, caller: Identity) -> Any:
    # spans of polls would hide the others
    is_poll = method.rpartition("/")[2].startswith("Get") or method in _PROBES

    async def handle(request: Any, context: grpc.aio.ServicerContext[Any, Any]) -> Any:
        async with _Rpc(method, context, caller, is_traced=not is_poll):
            return await inner(_readable(request), context)

    return handle


def _stream(inner: Any, method: str, caller: Identity | None) -> Any:
    async def handle(request: Any, context: grpc.aio.ServicerContext[Any, Any]) -> None:
        async with _Rpc(method, context, caller, is_traced=False):  # each request has its own span
            responses = inner(_readable(request), context)
            if not inspect.isasyncgen(responses):
                raise TypeError(f"{method} must be an async generator")
            try:
                async for response in responses:
                    await context.write(response)
            finally:
                await responses.aclose()

    return handle


class _Rpc:
    """The context of one call: its caller, request ids and span, and its log line at the end."""

    def __init__(
        self,
        method: str,
        context: grpc.aio.ServicerContext[Any, Any],
        caller: Identity | None,
        *,
        is_traced: bool,
    ) -> None:
        """caller: None if the call is refused."""
        self._method = method
        self._context = context
        self._caller = caller
        self._is_traced = is_traced
        self._span = Span("")
        self._started = time.monotonic()

    async def __aenter__(self) -> None:
        if self._caller is not None:
            identity.current.set(self._caller)
            asked = metadata_value(self._context, TENANT_KEY)
            current_tenant.set(self._caller.paying_tenant(asked or ""))
        own_id = sane_request_id(metadata_value(self._context, "x-request-id"))
        request_id.set(own_id)
        parent = sane_traceparent(metadata_value(self._context, "traceparent"))
        if self._is_traced:
            self._span = tracing.start(self._method.removeprefix("/"), parent, own_id)
            tracing.current.set(self._span)
            parent = self._span.traceparent
        traceparent.set(parent)
        self._context.set_trailing_metadata((("x-request-id", own_id),))

    async def __aexit__(self, kind: Any, error: BaseException | None, traceback: Any) -> None:
        try:
            await self._end(error)
        finally:
            self._span.end()

    async def _end(self, error: BaseException | None) -> None:
        if error is None:
            self._log("OK", logging.DEBUG if self._method in _PROBES else logging.INFO)
        elif isinstance(error, ServiceError):
            why = failure(_LOG, error)
            # peers ask again and again until the model is loaded
            level = logging.DEBUG if error.reason == "LOADING" else logging.INFO
            self._log(error.code.name, level, **why)
            self._span.fail(**why)
            await abort(self._context, error)
        elif isinstance(error, grpc.aio.AbortError):  # raised by `cut_stalled`
            self._log("RESOURCE_EXHAUSTED", logging.INFO, reason="STALLED")
        elif isinstance(error, Exception):
            _LOG.exception("unexpected failure in %s", self._method)
            self._log("INTERNAL", logging.ERROR)
            self._span.fail("INTERNAL")
            await abort(self._context, internal_error())
        else:
            self._log("CANCELLED", logging.INFO)

    def _log(self, code: str, level: int, **fields: object) -> None:
        milliseconds = round((time.monotonic() - self._started) * 1e3, 2)
        extra = {"method": self._method, "code": code, "milliseconds": milliseconds, **fields}
        if self._caller is not None and self._caller.key_id:
            extra["key"] = self._caller.key_id
        _LOG.log(level, "%s %s", self._method, code, extra=extra)
