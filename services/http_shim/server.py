"""HTTP server of the shim: its start, its sockets and its end."""

import asyncio
import contextlib
import dataclasses
import gc
import logging
import socket
import ssl
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import uvicorn
import uvloop
from prometheus_client import REGISTRY
from starlette.applications import Starlette

from services.common import logging as service_logging
from services.common import tracing
from services.common.accounts.key_metrics import KeyMetrics
from services.common.accounts.keyring import Keyring, open_keyring
from services.common.accounts.ledger import UsageLedger
from services.common.background import keep_running
from services.common.hangup import on_hangup
from services.common.model_files.catalog_file import CatalogError
from services.common.network.addresses import address, listen, why_unusable
from services.common.peers.peer import ChannelSettings
from services.common.peers.targets import parse_targets, warn_of_clear_text
from services.common.process import open_standard_files, raise_file_limit, stop_signal
from services.common.settings import StartupError, parse, print_startup_error
from services.common.sharing.fair_executor import use_fair_threads
from services.common.telemetry import LOST_LOG_LINES, describe_build, serve_metrics
from services.common.vllm_metrics import VllmLoadMetrics
from services.http_shim.app import create_app
from services.http_shim.backends.backend import BackendSettings
from services.http_shim.backends.catalog import Catalog
from services.http_shim.backends.model_manager import manager_of
from services.http_shim.backends.model_source import ModelSource, SingleBackend
from services.http_shim.backends.status_history import StatusHistory
from services.http_shim.http.gate import Gate
from services.http_shim.http.https_context import HttpsContext
from services.http_shim.http.protocol import protocol_class
from services.http_shim.images.kept_images import KeptImages
from services.http_shim.jobs.jobs_client import JobsClient
from services.http_shim.router_metrics import RouterMetrics
from services.http_shim.settings import HttpShimSettings, check

_LOG = logging.getLogger("server")
_UNSENT_BYTES = 64 * 1024
"""Bytes that the kernel buffers per connection; more would hide that a client stopped reading"""
_KEEP_ALIVE_SECONDS = 75  # longer than clients keep theirs, so that the client closes first


class Server(uvicorn.Server):
    """uvicorn server without signal handlers: uvicorn's re-raise the signal and end the process."""

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        for bound in sockets or ():
            host, port = bound.getsockname()[:2]
            _LOG.info("listening on %s", address(host, port), extra={"port": port})

    def stop_accepting(self) -> None:
        """Accept no more connections, and close each open one after its current answer.

        New connections wait in the backlog of the inherited socket for the next process.
        """
        for server in self.servers:
            server.close()
        for connection in list(self.server_state.connections):
            connection.shutdown()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def main() -> None:
    """Run the server. Exits with 0, or with 2 if it could not start."""
    open_standard_files()
    try:
        settings = parse(HttpShimSettings, "python -m services.http_shim", "TOKENWIRE_HTTP_SHIM")
        if settings.fd < 0:
            check(settings)
        service_logging.configure(
            "http_shim", settings.log_level, settings.log_format, LOST_LOG_LINES.inc
        )
        raise_file_limit()
        with tracing.exporting("http_shim", settings.otlp_endpoint):
            uvloop.run(serve(settings))
    except (StartupError, CatalogError) as error:
        service_logging.flush()
        print_startup_error("http_shim", error)
        sys.exit(2)


async def serve(settings: HttpShimSettings) -> None:
    """Serve until SIGTERM or SIGINT; requests then have the grace period to finish."""
    stop = stop_signal()
    use_fair_threads()
    ledger = UsageLedger()
    ledger.metrics = KeyMetrics(settings.metrics_by_key)
    keyring = open_keyring(settings.keys, settings.limits_url, ledger)
    with _listen(settings) as bound:
        settings = dataclasses.replace(settings, host=bound.getsockname()[0])
        check(settings)
        models, gate = _models(settings), Gate()
        describe_build("http_shim")
        context = None if settings.tls is None else settings.tls.context(HttpsContext)
        jobs = _jobs(settings)
        history = StatusHistory(models)
        if settings.jobs:
            ledger.report = jobs.record_usage
        app = create_app(models, gate, settings, keyring, jobs, ledger, history)
        server = _server(settings, app, context)
        if settings.metrics_port > 0:
            serve_metrics(settings.host, settings.metrics_port)
        watching = [
            _watch(keyring),
            keep_running("usage", ledger.run),
            keep_running("status_history", history.run),
        ]
        if settings.vllm_metrics:
            router_metrics = RouterMetrics(models)
            REGISTRY.register(VllmLoadMetrics(router_metrics.loads))
            watching.append(keep_running("router_metrics", router_metrics.follow))
        if settings.tls is not None and context is not None:
            follow = partial(settings.tls.follow, context)
            watching.append(keep_running("certificate", follow))
        serving = asyncio.ensure_future(server.serve(sockets=[bound]))
        gc.freeze()  # start-up objects live as long as the process; collections can skip them
        await asyncio.wait([serving, stop], return_when=asyncio.FIRST_COMPLETED)
        _LOG.info("draining")
        is_inherited = settings.fd >= 0
        if is_inherited:
            server.stop_accepting()
        if not await gate.close(settings.grace, admits=is_inherited):
            _LOG.warning("requests still ran after %g s and were aborted", settings.grace)
        server.should_exit = True
        await serving
    for each in watching:
        each.cancel()
    await ledger.close()
    if keyring is not None:
        await keyring.close()
    await models.close()
    await jobs.close()
    _LOG.info("stopped")


def _server(settings: HttpShimSettings, app: Starlette, context: ssl.SSLContext | None) -> Server:
    return Server(
        uvicorn.Config(
            app,
            http=protocol_class(settings.stall_seconds),
            ssl_context_factory=None if context is None else lambda *_: context,
            ws="none",
            lifespan="off",
            log_config=None,
            log_level="warning",
            access_log=False,
            server_header=False,
            timeout_keep_alive=_KEEP_ALIVE_SECONDS,
            timeout_graceful_shutdown=1,
        )
    )


def _jobs(settings: HttpShimSettings) -> JobsClient:
    """Return the client of the jobs service, if there is one."""
    if not settings.jobs:
        return JobsClient("")
    warn_of_clear_text([settings.jobs], settings)
    channels = ChannelSettings(settings.lost_seconds, settings.peer_tls, settings.peer_token)
    return JobsClient(settings.jobs, channels)


def _models(settings: HttpShimSettings) -> ModelSource:
    """Return the models of the catalog, reloaded on SIGHUP, or of the one tokenizer service."""
    backend_settings = BackendSettings(
        settings.tokenizer_wait,
        settings.max_waiting,
        settings.lost_seconds,
        settings.peer_tls,
        settings.peer_token,
        KeptImages(settings.max_kept_image_bytes),
    )
    if not settings.catalog:
        warn_of_clear_text(parse_targets(settings.tokenizer, "--tokenizer"), settings)
        return SingleBackend(settings.tokenizer, backend_settings)
    manager = manager_of(settings.model_manager, settings.peer_token)
    catalog = Catalog(Path(settings.catalog), backend_settings, manager)
    on_hangup(catalog.reload)
    return catalog


def _watch(keyring: Keyring | None) -> asyncio.Future[None]:
    """Start to watch the keys file, if there is one."""
    if keyring is None:
        _LOG.warning("the API is open: no keys are configured")
        return asyncio.get_running_loop().create_future()
    return asyncio.ensure_future(keyring.watch())


def _listen(settings: HttpShimSettings) -> socket.socket:
    """Return the listening socket. Raises StartupError."""
    bound = _adopt(settings.fd) if settings.fd >= 0 else _bind(settings)
    if hasattr(socket, "TCP_NOTSENT_LOWAT"):  # not everywhere outside Linux
        bound.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, _UNSENT_BYTES)
    return bound


def _adopt(number: int) -> socket.socket:
    try:
        bound = socket.socket(fileno=number)
        if bound.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
            return bound
        why = "it does not listen"
    except OSError as error:
        why = str(error.strerror)
    raise StartupError(f"--fd {number} is not a listening socket: {why}.")


def _bind(settings: HttpShimSettings) -> socket.socket:
    try:
        return listen(settings.host, settings.port)
    except OSError as error:
        place = address(settings.host, settings.port)
        why = why_unusable(settings.host, settings.port) or str(error.strerror)
        raise StartupError(f"Can't listen on {place}: {why}.") from None
