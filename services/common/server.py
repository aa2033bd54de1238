"""The frame of a service process: gRPC server, health, reflection, metrics, drain on SIGTERM."""

import asyncio
import gc
import logging
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, TypeVar

import grpc
import uvloop
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_health.v1.health import aio as health_aio
from grpc_reflection.v1alpha import reflection

from services.common import logging as service_logging
from services.common import tracing
from services.common.accounts.authenticator import Authenticator
from services.common.accounts.key_metrics import KeyMetrics
from services.common.accounts.keyring import Keyring, open_keyring
from services.common.accounts.ledger import UsageLedger
from services.common.accounts.usage_client import UsageClient
from services.common.background import keep_running
from services.common.failed_start import tell_reason
from services.common.faults import follow_faults
from services.common.interceptor import RpcInterceptor
from services.common.model_files.checkpoint import opened
from services.common.network.addresses import (
    METRICS_PORT_OFFSET,
    address,
    is_loopback,
    why_unusable,
)
from services.common.network.health import LIVENESS, PART_PREFIX
from services.common.process import (
    end_on_termination,
    open_standard_files,
    raise_file_limit,
    stop_signal,
)
from services.common.settings import (
    LimitSettings,
    PeerSettings,
    ReportSettings,
    ServerSettings,
    StartupError,
    StreamSettings,
    UsageSettings,
    parse,
    print_startup_error,
)
from services.common.sharing.fair_executor import use_fair_threads
from services.common.standby import awaited_arguments
from services.common.telemetry import LOST_LOG_LINES, serve_metrics
from tokenwire.channel_options import MESSAGE_LIMITS, QUIET

__all__ = ["SERVER_OPTIONS", "Application", "main", "run"]

_LOG = logging.getLogger("server")
_UNIX = "unix:"
S = TypeVar("S", bound=ServerSettings)

SERVER_OPTIONS: list[tuple[str, Any]] = [
    *MESSAGE_LIMITS,
    *QUIET,
    ("grpc.so_reuseport", 0),  # a second server on the same port must fail instead of sharing it
    # gRPC admits streams before it knows the caller. Without a limit, one connection could open, or
    # open and reset, as many as it has bytes for; beyond it they are refused at almost no cost.
    ("grpc.max_concurrent_streams", 1000),
    ("grpc.http2.min_ping_interval_without_data_ms", 250),
    # Gateways ping while a call waits for its only message. Data that is sent clears the strikes,
    # so that only a flood has so many of them.
    ("grpc.http2.max_ping_strikes", 1000),
    ("grpc.keepalive_permit_without_calls", 1),
]


class Application(ABC):
    """Base class of the part of a service that differs from other services."""

    peer_methods: Collection[str] = ()
    """Full names of the methods that holders of API keys must not call"""

    def __init__(self) -> None:
        self._report_serving: Callable[[bool], None] = lambda serving: None
        self.keyring: Keyring | None = None
        """API keys of the callers, once the service starts; None = callers need no key"""
        self.ledger = UsageLedger()
        """Counts the usage of the keys"""
        self.failed: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        """Future whose result is the reason, one sentence, when the service can't continue"""

    @property
    @abstractmethod
    def model(self) -> str:
        """Name of the model, which the service's metrics have as a label."""

    @abstractmethod
    def register(self, server: grpc.aio.Server) -> Sequence[str]:
        """Add the servicers to the server; return the full names of their gRPC services."""

    @abstractmethod
    async def start(self) -> None:
        """Prepare to serve, and call `set_serving(True)` when ready."""

    @abstractmethod
    async def drain(self) -> None:
        """Refuse new requests, and return when all running work has ended. May be cancelled."""

    @abstractmethod
    async def stop(self) -> None:
        """Abort running work, and release everything."""

    def on_serving(self, report: Callable[[bool], None]) -> None:
        """Call `report` at each change of the health."""
        self._report_serving = report

    def set_serving(self, serving: bool) -> None:
        """Set the health of all gRPC services."""
        self._report_serving(serving)

    def fail(self, why: str) -> None:
        """End the process because the service can't continue. `why` is one sentence."""
        if not self.failed.done():
            self.failed.set_result(why)


def main(name: str, settings_type: type[S], make: Callable[[S], Application]) -> None:
    """Run a service process; exit with 0, 1 (failed), 2 (could not start) or 130 (interrupted)."""
    open_standard_files()
    arguments = awaited_arguments()
    prefix = f"TOKENWIRE_{name.upper()}"
    try:
        settings = parse(settings_type, f"python -m services.{name}", prefix, arguments)
    except StartupError as error:
        print_startup_error(name, error)
        sys.exit(2)
    run(name, settings, make)


def run(
    name: str,
    settings: S,
    make: Callable[[S], Application],
    held: AbstractContextManager[object] | None = None,
) -> None:
    """Run a service process as `main` does, with settings that have been read.

    held: context that is left when the service has ended or failed to start, before the process
    waits for `hold_on_error` seconds.
    """
    try:
        service_logging.configure(name, settings.log_level, settings.log_format, LOST_LOG_LINES.inc)
        raise_file_limit()
        end_on_termination()
        with (
            held or nullcontext(),
            tracing.exporting(name, settings.otlp_endpoint),
            opened(settings) as opened_settings,
        ):
            code = uvloop.run(_serve(opened_settings, make))
    except StartupError as error:
        service_logging.flush()
        print(f"{name}: {error}", file=sys.stderr, flush=True)
        if settings.hold_on_error > 0:
            uvloop.run(tell_reason(settings, str(error)))
        code = 2
    except KeyboardInterrupt:
        code = 130
    sys.exit(code)


async def _serve(settings: S, make: Callable[[S], Application]) -> int:
    stop = stop_signal()
    use_fair_threads()
    application = make(settings)
    ledger, reports = application.ledger, _usage_client(settings)
    if reports is not None:
        ledger.report = reports.report
    if isinstance(settings, UsageSettings):
        ledger.metrics = KeyMetrics(settings.metrics_by_key)
    authenticator = _authenticator(settings, ledger)
    application.keyring = authenticator.keyring
    interceptor = RpcInterceptor(authenticator, application.peer_methods)
    server = grpc.aio.server(options=SERVER_OPTIONS, interceptors=[interceptor])
    health = _Health(application.register(server))
    application.on_serving(health.set_serving)
    health.register(server)
    follow_faults(health.set_part)
    port = _bind(server, settings)
    _serve_metrics(settings, port, application.model)
    await server.start()
    _LOG.info("listening on %s", _place(settings, port), extra={"port": port})
    watching: list[asyncio.Future[None]] = [keep_running("usage", ledger.run)]
    if authenticator.keyring is not None:
        watching.append(asyncio.ensure_future(authenticator.keyring.watch()))
    starting: asyncio.Future[Any] = asyncio.ensure_future(application.start())
    ends = (stop, application.failed)
    code = 0
    try:
        await asyncio.wait([starting, *ends], return_when=asyncio.FIRST_COMPLETED)
        if starting.done():
            starting.result()
            gc.freeze()  # objects from the start live on; no collection needs to visit them
            await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
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
        for each in watching:
            each.cancel()
        await ledger.close()
        if reports is not None:
            await reports.close()
        if authenticator.keyring is not None:
            await authenticator.keyring.close()
    _LOG.info("stopped")
    return code


def _usage_client(settings: ServerSettings) -> UsageClient | None:
    """Return the client that reports usage; None if there is no jobs service for it."""
    if not isinstance(settings, ReportSettings) or not settings.jobs:
        return None
    assert isinstance(settings, PeerSettings)
    return UsageClient(settings.jobs, settings)


def _authenticator(settings: ServerSettings, ledger: UsageLedger) -> Authenticator:
    """Return the check of the callers. Raises StartupError."""
    if not isinstance(settings, StreamSettings):
        return Authenticator(None, settings.peer_token)
    limits_url = settings.limits_url if isinstance(settings, LimitSettings) else ""
    keyring = open_keyring(settings.keys, limits_url, ledger)
    return Authenticator(keyring, settings.peer_token, settings.trust_scheduling_headers)


class _Health:
    """The health of a server's gRPC services, NOT_SERVING at first."""

    def __init__(self, services: Sequence[str]) -> None:
        self._servicer = health_aio.HealthServicer()
        self._services = services
        self._changes: set[asyncio.Task[None]] = set()
        self._names: set[str] = set()
        self._is_final = False
        self._loop = asyncio.get_running_loop()
        self._set(LIVENESS, True)
        self.set_serving(False)

    def register(self, server: grpc.aio.Server) -> None:
        """Add the health and reflection services to the server."""
        health_pb2_grpc.add_HealthServicer_to_server(self._servicer, server)
        name = health_pb2.DESCRIPTOR.services_by_name["Health"].full_name
        names = [*self._services, name, reflection.SERVICE_NAME]
        reflection.enable_server_reflection(names, server)

    def set_serving(self, serving: bool) -> None:
        """Set the health of all services, and of the whole server."""
        for service in (*self._services, ""):
            self._set(service, serving)

    def set_part(self, part: str, works: bool) -> None:
        """Set the health of a part of the process, which leaves that of the services as it is.

        Any thread may call it.
        """
        self._loop.call_soon_threadsafe(self._set, f"{PART_PREFIX}{part}", works)

    def _set(self, service: str, serving: bool) -> None:
        if self._is_final:
            return
        if service != LIVENESS:
            self._names.add(service)
        status = health_pb2.HealthCheckResponse.ServingStatus
        value = status.SERVING if serving else status.NOT_SERVING
        task = asyncio.ensure_future(self._servicer.set(service, value))
        self._changes.add(task)
        task.add_done_callback(self._changes.discard)

    async def shut_down(self) -> None:
        """Set the health of all but the process to NOT_SERVING. Later changes have no effect."""
        await asyncio.gather(*self._changes)
        for name in self._names:
            self._set(name, False)
        self._is_final = True
        await asyncio.gather(*self._changes)


async def _drain(application: Application, health: _Health, grace: float) -> None:
    _LOG.info("draining")
    await health.shut_down()
    try:
        await asyncio.wait_for(application.drain(), grace)
    except TimeoutError:
        _LOG.warning("requests still ran after %g s and were aborted", grace)


def _serve_metrics(settings: ServerSettings, port: int, model: str) -> None:
    """Serve the metrics; a server on a Unix socket serves them only on a port that is set."""
    if settings.host.startswith(_UNIX):
        if settings.metrics_port > 0:
            serve_metrics("127.0.0.1", settings.metrics_port, model)
    elif settings.metrics_port >= 0:
        serve_metrics(settings.host, settings.metrics_port or port + METRICS_PORT_OFFSET, model)


def _place(settings: ServerSettings, port: int) -> str:
    is_socket = settings.host.startswith(_UNIX)
    return settings.host if is_socket else address(settings.host, port)


def _has_keys(settings: ServerSettings) -> bool:
    return isinstance(settings, StreamSettings) and bool(settings.keys)


def _bind(server: grpc.aio.Server, settings: ServerSettings) -> int:
    """Listen, and return the port. Raises StartupError."""
    place, tls = _place(settings, settings.port), settings.tls
    is_local = settings.host.startswith(_UNIX) or is_loopback(settings.host)
    if tls is None and not settings.plaintext and not is_local:
        raise StartupError(
            f"{settings.host} is served only with --tls-cert and --tls-key, or with --plaintext "
            "(anyone who reaches the port can use it)."
        )
    if tls is None and not is_local and (settings.peer_token_file or _has_keys(settings)):
        _LOG.warning("keys and tokens of callers cross the network in clear text: there is no TLS")
    try:
        if tls is not None:
            return server.add_secure_port(place, tls.credentials())
        return server.add_insecure_port(place)
    except RuntimeError:  # gRPC's error doesn't say why
        why = "the socket's folder is not writable, or the path is too long"
        if not settings.host.startswith(_UNIX):
            why = why_unusable(settings.host, settings.port) or "gRPC gives no reason"
        raise StartupError(f"Can't listen on {place}: {why}.") from None
