"""Asks whether a service serves: grpc.health.v1 for the gRPC ones, an HTTP status for the shim."""

import asyncio
import http.client
from urllib.parse import urlsplit

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

__all__ = ["is_ready", "is_serving"]


async def is_serving(target: str, *, seconds: float = 2.0) -> bool:
    """Whether the gRPC server at "host:port" says SERVING."""
    async with grpc.aio.insecure_channel(target) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        try:
            answer = await stub.Check(health_pb2.HealthCheckRequest(), timeout=seconds)
        except grpc.aio.AioRpcError:
            return False
        return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)


async def is_ready(url: str, *, seconds: float = 2.0) -> bool:
    """Whether a GET of the URL answers 200. No proxy is used."""
    return await asyncio.to_thread(_answers_200, url, seconds)


def _answers_200(url: str, seconds: float) -> bool:
    parts = urlsplit(url)
    connection = http.client.HTTPConnection(parts.hostname or "", parts.port, timeout=seconds)
    try:
        connection.request("GET", parts.path or "/")
        return connection.getresponse().status == 200
    except (OSError, http.client.HTTPException):
        return False
    finally:
        connection.close()
