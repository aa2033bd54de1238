"""Server of a service that could not start; its health checks give the reason."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from services.common.network.addresses import address
from services.common.network.health import REASON_KEY
from services.common.process import stop_signal
from services.common.settings import ServerSettings, StartupError
from tokenwire.tls import TlsError

__all__ = ["tell_reason"]

_Context = grpc.aio.ServicerContext[Any, Any]


async def tell_reason(settings: ServerSettings, why: str) -> None:
    """Answer health checks with NOT_SERVING and `why` for `hold_on_error` seconds.

    Any other call is UNAVAILABLE with the same sentence. TLS is used where its files are usable.
    Returns early on SIGTERM and SIGINT, and at once if the port can't be used.
    """
    stop = stop_signal()
    server = grpc.aio.server(options=[("grpc.so_reuseport", 0)])
    health_pb2_grpc.add_HealthServicer_to_server(_Health(why), server)
    server.add_generic_rpc_handlers((_Refusal(why),))
    is_socket = settings.host.startswith("unix:")
    place = settings.host if is_socket else address(settings.host, settings.port)
    try:
        if (credentials := _credentials(settings)) is not None:
            server.add_secure_port(place, credentials)
        else:
            server.add_insecure_port(place)
    except RuntimeError:
        return
    await server.start()
    await asyncio.wait([stop], timeout=settings.hold_on_error)
    await server.stop(None)


def _credentials(settings: ServerSettings) -> grpc.ServerCredentials | None:
    """Return the server's certificates; None if there are none, or if they can't be used."""
    try:
        return None if settings.tls is None else settings.tls.credentials()
    except (StartupError, TlsError):
        return None


class _Health(health_pb2_grpc.HealthServicer):  # type: ignore[misc]  # untyped
    """Health of all services: NOT_SERVING, with the reason in the trailing metadata."""

    def __init__(self, why: str) -> None:
        self._why = why

    async def Check(
        self, request: health_pb2.HealthCheckRequest, context: _Context
    ) -> health_pb2.HealthCheckResponse:
        """Return NOT_SERVING."""
        context.set_trailing_metadata(((REASON_KEY, self._why.encode()),))
        return health_pb2.HealthCheckResponse(status=health_pb2.HealthCheckResponse.NOT_SERVING)

    async def Watch(
        self, request: health_pb2.HealthCheckRequest, context: _Context
    ) -> AsyncIterator[health_pb2.HealthCheckResponse]:
        """Send NOT_SERVING until the client leaves."""
        yield health_pb2.HealthCheckResponse(status=health_pb2.HealthCheckResponse.NOT_SERVING)
        await asyncio.get_running_loop().create_future()


class _Refusal(grpc.GenericRpcHandler):
    """Handler of all other methods."""

    def __init__(self, why: str) -> None:
        self._why = why

    def service(
        self, handler_call_details: grpc.HandlerCallDetails
    ) -> "grpc.RpcMethodHandler[Any, Any]":
        """Return the handler of any method."""
        return grpc.stream_stream_rpc_method_handler(self._refuse)

    async def _refuse(self, requests: AsyncIterator[bytes], context: _Context) -> None:
        await context.abort(grpc.StatusCode.UNAVAILABLE, self._why)
