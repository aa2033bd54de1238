"""Asks services how they are: grpc.health.v1, an HTTP status of the shim, an engine's load."""

import asyncio
import http.client
from urllib.parse import urlsplit

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from tokenwire.pb.engine.v1 import engine_pb2
from tokenwire.pb.engine.v1.engine_pb2_grpc import EngineControlServiceStub

__all__ = ["is_ready", "is_serving", "until_idle"]

_SECONDS = 2.0  # that an answer may take


async def is_serving(target: str) -> bool:
    """Whether the gRPC server at "host:port" says SERVING."""
    async with grpc.aio.insecure_channel(target) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        try:
            answer = await stub.Check(health_pb2.HealthCheckRequest(), timeout=_SECONDS)
        except grpc.aio.AioRpcError:
            return False
        return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)


async def until_idle(target: str) -> None:
    """Until the engine at "host:port" runs nothing and nothing waits, or is gone."""
    async with grpc.aio.insecure_channel(target) as channel:
        stub = EngineControlServiceStub(channel)
        try:
            async for answer in stub.WatchLoad(engine_pb2.WatchLoadRequest()):
                if not answer.load.running_sequences + answer.load.waiting_sequences:
                    return
        except grpc.aio.AioRpcError:
            return


async def is_ready(url: str) -> bool:
    """Whether a GET of the URL answers 200. No proxy is used. Raises ValueError for no URL."""
    return await asyncio.to_thread(_answers_200, url)


def _answers_200(url: str) -> bool:
    parts = urlsplit(url)
    connection = http.client.HTTPConnection(parts.hostname or "", parts.port, timeout=_SECONDS)
    try:
        connection.request("GET", parts.path or "/")
        return connection.getresponse().status == 200
    except (OSError, http.client.HTTPException):
        return False
    finally:
        connection.close()
