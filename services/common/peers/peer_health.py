"""Health of a gRPC service in another process, as it changes."""

import asyncio
import logging
from collections.abc import AsyncGenerator

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

__all__ = ["PeerHealth", "Status"]

Status = health_pb2.HealthCheckResponse
_LOG = logging.getLogger("peer_health")
_CALL_SECONDS = 10.0
_SILENT_SECONDS = 5.0
"""Time after which the log says that the service does not answer"""


class PeerHealth:
    """Health of one service, followed over a channel. Each loss is logged once."""

    def __init__(self, channel: grpc.aio.Channel, service: str, peer: str) -> None:
        """service: name of its gRPC service. peer: name for logs ("the engine at host:port")."""
        self._stub = health_pb2_grpc.HealthStub(channel)
        self._request = health_pb2.HealthCheckRequest(service=service)
        self._peer = peer
        self._is_loss_logged = False

    async def statuses(self) -> AsyncGenerator[int, None]:
        """Wait for the service; yield each Status until the connection is lost.

        Close the generator if you leave it early.
        """
        silence = asyncio.ensure_future(self._log_silence())
        try:
            await self.reach()
            async for answer in self._stub.Watch(self._request):
                silence.cancel()
                yield answer.status
                self._is_loss_logged = False
        except grpc.aio.AioRpcError as error:
            self.log_loss(error)
        finally:
            silence.cancel()

    async def reach(self) -> None:
        """Wait until the service answers.

        No single call waits for long, because a call that waits for a connection does not notice
        renewed certificates.
        """
        while True:  # `channel_ready` crashed the process with gRPC 1.85
            try:
                await self._stub.Check(self._request, timeout=_CALL_SECONDS, wait_for_ready=True)
            except grpc.aio.AioRpcError as error:
                if error.code() is grpc.StatusCode.DEADLINE_EXCEEDED:
                    continue
            return

    def log_loss(self, error: grpc.aio.AioRpcError) -> None:
        """Log why the service is not reachable, unless that was logged since it last answered."""
        if not self._is_loss_logged:
            self._is_loss_logged = True
            _LOG.warning("%s is not reachable: %s", self._peer, error.details())

    async def _log_silence(self) -> None:
        """Log why the service does not answer, because a waiting call does not report it."""
        await asyncio.sleep(_SILENT_SECONDS)
        try:
            await self._stub.Check(self._request, timeout=_CALL_SECONDS)
        except grpc.aio.AioRpcError as error:
            self.log_loss(error)
