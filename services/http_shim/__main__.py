"""`python -m services.http_shim`."""

import asyncio
import contextlib
import gc
import logging
import signal
import socket
import sys
from collections.abc import Iterator
from pathlib import Path

import uvicorn
import uvloop

from services.common import logging as service_logging
from services.common import open_files
from services.common.settings import StartupError, parse
from services.common.signals import stop_signal
from services.http_shim.app import create_app
from services.http_shim.catalog import Catalog
from services.http_shim.gate import Gate
from services.http_shim.keys import Keyring
from services.http_shim.protocol import protocol_of
from services.http_shim.served import ModelSource, OneBackend
from services.http_shim.settings import HttpShimSettings, check
from tokenwire.catalog import CatalogError
from tokenwire.keys import KeyFileError
from tokenwire.ports import address, why_unusable

_LOG = logging.getLogger("server")
_UNSENT_BYTES = 64 * 1024
"""That the kernel takes for a client that does not read; more hides for how long it has not"""
_KEEP_ALIVE_SECONDS = 75  # longer than clients keep theirs, so that it is not us who close first


class Server(uvicorn.Server):
    """uvicorn without its signal handling, which would end the process with the signal."""

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        for bound in sockets or ():
            host, port = bound.getsockname()[:2]
            _LOG.info("listening on %s", address(host, port), extra={"port": port})

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def main() -> None:
    """The whole life of the process; exits with 0, or with 2 where it could not start."""
    try:
        settings = parse(HttpShimSettings, "python -m services.http_shim", "TOKENWIRE_HTTP_SHIM")
        check(settings)
        service_logging.configure("http_shim", settings.log_level)
        open_files.allow_many()
        uvloop.run(serve(settings))
    except (StartupError, CatalogError, KeyFileError) as error:
        print(f"http_shim: {error}", file=sys.stderr)
        sys.exit(2)


async def serve(settings: HttpShimSettings) -> None:
    """Serve until SIGTERM or SIGINT; then let what runs finish within the grace period."""
    stop = stop_signal()
    keyring = Keyring(Path(settings.keys)) if settings.keys else None
    models, gate = _models(settings), Gate()
    server = Server(
        uvicorn.Config(
            create_app(models, gate, settings.max_body_bytes, keyring, settings.stall_seconds),
            http=protocol_of(settings.stall_seconds),
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
    with _bind(settings) as bound:
        watching = _watch(keyring)
        serving = asyncio.ensure_future(server.serve(sockets=[bound]))
        gc.freeze()  # what start-up made stays: no collection need walk it
        await asyncio.wait([serving, stop], return_when=asyncio.FIRST_COMPLETED)
        _LOG.info("draining")
        if not await gate.close(settings.grace):
            _LOG.warning("completions still ran after %g s and were cut", settings.grace)
        server.should_exit = True
        await serving
    watching.cancel()
    await models.close()
    _LOG.info("stopped")


def _models(settings: HttpShimSettings) -> ModelSource:
    """Those of the catalog, read again on SIGHUP, or of the one tokenizer service."""
    if not settings.catalog:
        return OneBackend(settings.tokenizer)
    catalog = Catalog(Path(settings.catalog))
    asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, catalog.reload)
    return catalog


def _watch(keyring: Keyring | None) -> asyncio.Future[None]:
    """Follows the keys file, if there is one."""
    if keyring is None:
        _LOG.warning("the API is open: there are no keys")
        return asyncio.get_running_loop().create_future()
    return asyncio.ensure_future(keyring.watch())


def _bind(settings: HttpShimSettings) -> socket.socket:
    family = socket.AF_INET6 if ":" in settings.host else socket.AF_INET
    try:
        bound = socket.create_server(
            (settings.host, settings.port),
            family=family,
            backlog=2048,
            dualstack_ipv6=settings.host == "::" and socket.has_dualstack_ipv6(),  # as gRPC does
        )
    except OSError as error:
        place = address(settings.host, settings.port)
        why = why_unusable(settings.host, settings.port) or str(error.strerror)
        raise StartupError(f"Can't listen on {place}: {why}.") from None
    if hasattr(socket, "TCP_NOTSENT_LOWAT"):  # not everywhere outside Linux
        bound.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, _UNSENT_BYTES)
    return bound


main()
