"""gRPC servers of loopback whose health tests set."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_health.v1.health import aio as health_aio

__all__ = ["NOT_SERVING", "SERVING", "HealthServer", "health_server"]

SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING


class _Health(health_aio.HealthServicer):  # type: ignore[misc]
    """Health that reports each start of a watch."""

    def __init__(self, on_watch: Callable[[], None]) -> None:
        super().__init__()
        self._on_watch = on_watch

    async def Watch(self, request: Any, context: Any) -> None:
        self._on_watch()
        await super().Watch(request, context)


class HealthServer:
    """A gRPC server of loopback that offers one service, and serves nothing but its health."""

    def __init__(self, service: str) -> None:
        self._service = service
        self.port = 0
        self.watched = asyncio.Queue[None]()
        """An item for each start of a watch"""

    @property
    def target(self) -> str:
        return f"127.0.0.1:{self.port}"

    async def start(self) -> None:
        """Serve at the former port, or at any one at first."""
        self._health = _Health(lambda: self.watched.put_nowait(None))
        self._server = grpc.aio.server()
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)
        await self.report(SERVING)
        self.port = self._server.add_insecure_port(self.target)
        await self._server.start()

    async def report(self, status: int) -> None:
        await self._health.set(self._service, status)

    async def stop(self) -> None:
        await self._server.stop(None)


@asynccontextmanager
async def health_server(service: str) -> AsyncIterator[HealthServer]:
    server = HealthServer(service)
    await server.start()
    try:
        yield server
    finally:
        await server.stop()
