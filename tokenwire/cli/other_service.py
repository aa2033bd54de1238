"""Diagnosis of a call that failed because its target is not a tokenizer service."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import grpc

from services.common.network.reach import speaks_http, why_unreachable
from tokenwire.channel import connect
from tokenwire.errors import ServiceError
from tokenwire.pb.completion.v1 import models_pb2
from tokenwire.pb.completion.v1.completion_pb2_grpc import CompletionServiceStub
from tokenwire.pb.engine.v1 import engine_pb2
from tokenwire.pb.engine.v1.engine_pb2_grpc import EngineControlServiceStub
from tokenwire.pb.grammar.v1 import grammar_pb2
from tokenwire.pb.grammar.v1.grammar_pb2_grpc import GrammarServiceStub
from tokenwire.tls import ClientTls

__all__ = ["explain"]

_SECONDS = 2.0
_NO_ANSWER = {grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.UNIMPLEMENTED, grpc.StatusCode.INTERNAL}
_CLIENT_REASONS = {"UNREACHABLE", "SESSION_LOST", "UNKNOWN"}
"""Error reasons that the client itself sets, and no service of Tokenwire sends"""


async def explain(target: str, error: ServiceError, tls: ClientTls | None) -> str:
    """Return the reason why a call to a tokenizer service failed, as a sentence."""
    if error.reason == "MISSING_API_KEY":
        return f"{target} requires an API key: set TOKENWIRE_API_KEY, or use --key-file."
    if error.code not in _NO_ANSWER or error.reason not in _CLIENT_REASONS:
        return error.message
    if why := await asyncio.to_thread(why_unreachable, target):
        return f"No server answers at {target} ({why})."
    kind = await _kind(target, tls)
    if kind is not None:
        return (
            f"{target} is {kind}. This command needs the tokenizer service, "
            "which has port 50051 by default; use --target."
        )
    return f"The server at {target} does not answer ({error.message.rstrip('.')})."


async def _kind(target: str, tls: ClientTls | None) -> str | None:
    """Return the kind of a server; None for a tokenizer service."""
    if await asyncio.to_thread(speaks_http, target):
        return "an HTTP server"
    async with connect(target, tls=tls) as channel:
        completions = CompletionServiceStub(channel)
        if await _offers(completions.ListModels, models_pb2.ListModelsRequest()):
            return None
        engine = EngineControlServiceStub(channel)
        if await _offers(engine.GetModel, engine_pb2.GetModelRequest()):
            return "an engine"
        if await _offers(GrammarServiceStub(channel).Compile, grammar_pb2.CompileRequest()):
            return "a grammar service"
    return "no service of Tokenwire"


async def _offers(rpc: Callable[..., Awaitable[Any]], request: object) -> bool:
    """Return whether the server has the method."""
    try:
        await rpc(request, timeout=_SECONDS)
    except grpc.aio.AioRpcError as error:
        return error.code() is not grpc.StatusCode.UNIMPLEMENTED
    return True
