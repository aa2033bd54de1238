"""Probes of running services: grpc.health.v1, an HTTP status, an engine's load."""

import asyncio
import http.client
from urllib.parse import urlsplit

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from tokenwire.pb.engine.v1 import engine_pb2
from tokenwire.pb.engine.v1.engine_pb2_grpc import EngineControlServiceStub

__all__ = ["is_ready", "is_serving", "reports_serving", "until_idle"]

_TIMEOUT_SECONDS = 2.0


async def is_serving(target: str) -> bool:
    """Return whether the gRPC server at "host:port" reports SERVING."""
    async with grpc.aio.insecure_channel(target) as channel:
        return await reports_serving(channel)


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


async def until_idle(target: str) -> None:
    """Wait until the engine at "host:port" has no running or waiting sequence, or has ended."""
    async with grpc.aio.insecure_channel(target) as channel:
        stub = EngineControlServiceStub(channel)
        try:
            async for answer in stub.WatchLoad(engine_pb2.WatchLoadRequest()):
                if not answer.load.running_sequences + answer.load.waiting_sequences:
                    return
        except grpc.aio.AioRpcError:
            return


async def is_ready(url: str) -> bool:
    """Return whether a GET answers 200; no proxy is used. Raises ValueError for an invalid URL."""
    return await asyncio.to_thread(_answers_200, url)


def _answers_200(url: str) -> bool:
    parts = urlsplit(url)
    connection = http.client.HTTPConnection(
        parts.hostname or "", parts.port, timeout=_TIMEOUT_SECONDS
    )
    try:
        connection.request("GET", parts.path or "/")
        return connection.getresponse().status == 200
    except (OSError, http.client.HTTPException):
        return False
    finally:
        connection.close()
