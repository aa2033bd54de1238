"""Probes of running services: grpc.health.v1, an HTTP status, an engine's load."""

import asyncio
import http.client
import json
import ssl
from pathlib import Path
from typing import cast
from urllib.parse import urlsplit

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from services.common.network.reach import speaks_http, why_unreachable
from tokenwire.channel import connect
from tokenwire.pb.engine.v1 import engine_pb2
from tokenwire.pb.engine.v1.engine_pb2_grpc import EngineControlServiceStub
from tokenwire.tls import ClientTls
from tokenwire.token_file import TokenFile, shown

__all__ = [
    "LIVENESS",
    "PART_PREFIX",
    "REASON_KEY",
    "is_ready",
    "is_serving",
    "reports_failure",
    "reports_serving",
    "until_idle",
    "why_not_ready",
    "why_not_serving",
]

LIVENESS = "liveness"
"""Name by which the health service knows the process: SERVING from its first answer to its end"""
PART_PREFIX = "tokenwire.part."
"""Beginning of the names by which the health service knows the parts of a process"""
REASON_KEY = "tokenwire-reason-bin"
"""Key of the trailing metadata in which a health check gives the reason of NOT_SERVING"""
_TIMEOUT_SECONDS = 2.0
_LATE = f"no answer within {_TIMEOUT_SECONDS:g} s"


async def is_serving(target: str, tls: ClientTls | None = None) -> bool:
    """Return whether the gRPC server at "host:port" reports SERVING."""
    async with connect(target, tls=tls) as channel:
        return await reports_serving(channel)


async def reports_failure(
    channel: grpc.aio.Channel, service: str, seconds: float = _TIMEOUT_SECONDS
) -> bool:
    """Return whether a health check reports NOT_SERVING within some seconds.

    One that is not known has never failed.
    """
    request = health_pb2.HealthCheckRequest(service=service)
    try:
        answer = await health_pb2_grpc.HealthStub(channel).Check(request, timeout=seconds)
    except grpc.aio.AioRpcError:
        return False
    return bool(answer.status == health_pb2.HealthCheckResponse.NOT_SERVING)


async def reports_serving(
    channel: grpc.aio.Channel,
    service: str = "",
    seconds: float = _TIMEOUT_SECONDS,
    wait_for_ready: bool = False,
) -> bool:
    """Return whether a health check reports SERVING within some seconds.

    `service`: full name of a gRPC service; empty for the whole server.
    """
    request = health_pb2.HealthCheckRequest(service=service)
    check = health_pb2_grpc.HealthStub(channel).Check
    try:
        answer = await check(request, timeout=seconds, wait_for_ready=wait_for_ready)
    except grpc.aio.AioRpcError:
        return False
    return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)


async def until_idle(target: str, token_file: Path | None = None) -> None:
    """Wait until the engine at "host:port" has no running or waiting sequence, or has ended.

    token_file: token of the engine's installation. Raises TokenError if it can't be used.
    """
    token = None if token_file is None else TokenFile(token_file)
    async with connect(target, token=shown(token)) as channel:
        stub = EngineControlServiceStub(channel)
        try:
            async for answer in stub.WatchLoad(engine_pb2.WatchLoadRequest()):
                if not answer.load.running_sequences + answer.load.waiting_sequences:
                    return
        except grpc.aio.AioRpcError:
            return


async def why_not_serving(target: str, tls: ClientTls | None = None) -> str | None:
    """Return why the gRPC server at "host:port" does not report SERVING; None if it does."""
    async with connect(target, tls=tls) as channel:
        request = health_pb2.HealthCheckRequest()
        call = health_pb2_grpc.HealthStub(channel).Check(request, timeout=_TIMEOUT_SECONDS)
        try:
            answer = await call
            if answer.status == health_pb2.HealthCheckResponse.SERVING:
                return None
            metadata = dict(await call.trailing_metadata() or ())
        except grpc.aio.AioRpcError as error:
            return await _why_no_health(target, error)
    reason = cast(bytes, metadata.get(REASON_KEY, b"")).decode("utf-8", "replace")
    return reason or "it starts or stops (NOT_SERVING)"


async def _why_no_health(target: str, error: grpc.aio.AioRpcError) -> str:
    """Return why a health check failed."""
    if error.code() is grpc.StatusCode.DEADLINE_EXCEEDED:
        return _LATE
    if error.code() is grpc.StatusCode.UNIMPLEMENTED:
        return "it is a gRPC server without health checks"
    if why := await asyncio.to_thread(why_unreachable, target):
        return why
    if await asyncio.to_thread(speaks_http, target):
        return f"it is an HTTP server; ask http://{target}/ready"
    return error.details() or error.code().name


async def is_ready(url: str, context: ssl.SSLContext | None = None) -> bool:
    """Return whether a GET answers 200; no proxy is used. Raises ValueError for an invalid URL.

    context: for https; None = the system's authorities.
    """
    return await why_not_ready(url, context) is None


async def why_not_ready(url: str, context: ssl.SSLContext | None = None) -> str | None:
    """Return why a GET does not answer 200; None if it does. Raises ValueError as `is_ready`."""
    return await asyncio.to_thread(_why_not_200, url, context)


def _why_not_200(url: str, context: ssl.SSLContext | None) -> str | None:
    parts = urlsplit(url)
    host, port = parts.hostname or "", parts.port
    connection: http.client.HTTPConnection
    if parts.scheme == "https":
        connection = http.client.HTTPSConnection(
            host, port, timeout=_TIMEOUT_SECONDS, context=context
        )
    else:
        connection = http.client.HTTPConnection(host, port, timeout=_TIMEOUT_SECONDS)
    try:
        connection.request("GET", parts.path or "/")
        answer = connection.getresponse()
        if answer.status == 200:
            return None
        return f"HTTP {answer.status}{_reason(answer.read(_BODY_BYTES))}"
    except TimeoutError:
        return _LATE
    except ssl.SSLError as error:
        return f"TLS fails: {error.reason or error}"
    except (OSError, http.client.HTTPException) as error:
        if isinstance(error, http.client.HTTPException):
            return "it does not speak HTTP"
        return why_unreachable(f"{host}:{port or http.client.HTTP_PORT}") or "the connection broke"
    finally:
        connection.close()


_BODY_BYTES = 65536


def _reason(body: bytes) -> str:
    """Return the message of an error's body, after a colon; "" without one."""
    try:
        return f": {json.loads(body)['error']['message']}"
    except (ValueError, KeyError, TypeError):
        return ""
