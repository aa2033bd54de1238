"""Runs a service: gRPC server with health and reflection, metrics, drain on SIGTERM."""

import asyncio
import gc
import logging
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import grpc
import uvloop
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_health.v1.health import aio as health_aio
from grpc_reflection.v1alpha import reflection

from services.common import logging as service_logging
from services.common import open_files
from services.common.interceptor import RpcInterceptor
from services.common.settings import ServerSettings, StartupError, parse
from services.common.signals import stop_signal
from services.common.telemetry import serve_metrics
from tokenwire.channel import MESSAGE_LIMITS, QUIET
from tokenwire.serving.addresses import METRICS_PORT_OFFSET, address, why_unusable

__all__ = ["SERVER_OPTIONS", "Application", "main"]

_LOG = logging.getLogger("server")
S = TypeVar("S", bound=ServerSettings)

SERVER_OPTIONS: list[tuple[str, Any]] = [
    *MESSAGE_LIMITS,
    *QUIET,
    ("grpc.so_reuseport", 0),  # a second server on the same port must fail, not share it
    ("grpc.http2.min_ping_interval_without_data_ms", 250),
    ("grpc.keepalive_permit_without_calls", 1),
]


class Application(ABC):
    """What a service adds to a server."""

    def __init__(self) -> None:
        self._on_serving: Callable[[bool], None] = lambda serving: None
        self.failed: asyncio.Future[Any] = asyncio.get_running_loop().create_future()

    @abstractmethod
    def register(self, server: grpc.aio.Server) -> Sequence[str]:
        """Add the servicers; returns the full names of their services."""

    @abstractmethod
    async def start(self) -> None:
        """Get ready to serve, and call `set_serving(True)` when that is so."""

    @abstractmethod
    async def drain(self) -> None:
        """Take nothing new; return when what runs has ended. May be cancelled."""

    @abstractmethod
    async def stop(self) -> None:
        """Release everything; what still runs is aborted."""

    def set_serving(self, serving: bool) -> None:
        """Set the health of every service."""
        self._on_serving(serving)

    def fail(self, why: str) -> None:
        """End the process: the service can't go on. `why` is one sentence."""
        if not self.failed.done():
            self.failed.set_result(why)


def main(name: str, settings_type: type[S], make: Callable[[S], Application]) -> None:
    """The whole life of a service process; exits with 0, 1 (failed) or 2 (could not start)."""
    try:
        settings = parse(settings_type, f"python -m services.{name}", f"TOKENWIRE_{name.upper()}")
        service_logging.configure(name, settings.log_level)
        open_files.allow_many()
        code = uvloop.run(_serve(settings, make))
    except StartupError as error:
        print(f"{name}: {error}", file=sys.stderr)
        code = 2
    except KeyboardInterrupt:
        code = 130
    sys.exit(code)


async def _serve(settings: S, make: Callable[[S], Application]) -> int:
    stop = stop_signal()
    server = grpc.aio.server(options=SERVER_OPTIONS, interceptors=[RpcInterceptor()])
    application = make(settings)
    health = health_aio.HealthServicer()
    names = [*application.register(server), ""]
    serving: set[asyncio.Task[None]] = set()

    def on_serving(is_serving: bool) -> None:
        status = health_pb2.HealthCheckResponse.ServingStatus
        value = status.SERVING if is_serving else status.NOT_SERVING
        for service in names:
            task = asyncio.ensure_future(health.set(service, value))
            serving.add(task)
            task.add_done_callback(serving.discard)

    application._on_serving = on_serving
    on_serving(False)
    health_pb2_grpc.add_HealthServicer_to_server(health, server)
    reflection.enable_server_reflection(
        [*names[:-1], health_pb2.DESCRIPTOR.services_by_name["Health"].full_name,
         reflection.SERVICE_NAME],
        server,
    )  # fmt: skip
    port = _bind(server, settings)
    if settings.metrics_port >= 0:
        serve_metrics(settings.host, settings.metrics_port or port + METRICS_PORT_OFFSET)
    await server.start()
    _LOG.info("listening on %s", address(settings.host, port), extra={"port": port})
    starting: asyncio.Future[Any] = asyncio.ensure_future(application.start())
    code = 0
    try:
        await asyncio.wait(
            [starting, stop, application.failed], return_when=asyncio.FIRST_COMPLETED
        )
        if starting.done():
            starting.result()
            gc.freeze()  # what start-up made stays: no collection need walk it
            await asyncio.wait([stop, application.failed], return_when=asyncio.FIRST_COMPLETED)
        else:
            starting.cancel()
        if application.failed.done():
            _LOG.error(application.failed.result())
            code = 1
        else:
            await _drain(application, health, settings.grace)
    finally:
        await application.stop()
        await server.stop(1.0)
    _LOG.info("stopped")
    return code


async def _drain(application: Application, health: health_aio.HealthServicer, grace: float) -> None:
    _LOG.info("draining")
    await health.enter_graceful_shutdown()
    try:
        await asyncio.wait_for(application.drain(), grace)
    except TimeoutError:
        _LOG.warning("requests still ran after %g s and were cut", grace)


def _bind(server: grpc.aio.Server, settings: ServerSettings) -> int:
    place = address(settings.host, settings.port)
    try:
        return server.add_insecure_port(place)
    except RuntimeError:  # whose words hold no reason
        why = why_unusable(settings.host, settings.port) or "gRPC gives no reason"
        raise StartupError(f"Can't listen on {place}: {why}.") from None
