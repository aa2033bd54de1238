"""Answers of the shim's API, computed in this process for the creators of batches and responses.

This is the only module of the service that imports the shim.
"""

import asyncio
from collections.abc import AsyncGenerator, Callable
from contextlib import suppress
from functools import partial
from pathlib import Path

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from services.common.accounts.account import Account
from services.common.accounts.ledger import UsageLedger
from services.common.accounts.metering import count_request
from services.common.errors import internal_error
from services.common.hangup import on_hangup
from services.common.logging import request_id, traceparent
from services.common.model_files.catalog_file import CatalogError
from services.common.peers.targets import parse_targets, warn_of_clear_text
from services.common.settings import StartupError
from services.common.sharing.tenant import current_tenant
from services.http_shim.app import create_inner_app
from services.http_shim.backends.backend import BackendSettings
from services.http_shim.backends.catalog import Catalog
from services.http_shim.backends.model_manager import manager_of
from services.http_shim.backends.model_source import ModelSource, SingleBackend
from services.http_shim.http.exchange import exchange_of
from services.http_shim.http.failures import error_response
from services.http_shim.http.gate import Gate
from services.http_shim.images.kept_images import KeptImages
from services.http_shim.jobs.jobs import InnerJobs
from services.http_shim.settings import HttpShimSettings
from services.jobs.answers import BackgroundAnswer
from services.jobs.creator import Creator
from services.jobs.settings import JobsSettings
from tokenwire.batch_run import Reply
from tokenwire.errors import ServiceError, invalid

__all__ = ["ShimAnswering", "check"]

_OK, _TOO_LARGE = 200, 413
_CREATOR, _COUNTS = "tokenwire.creator", "tokenwire.counts"


def check(settings: JobsSettings) -> None:
    """Raise StartupError for settings that can't be served."""
    if not settings.catalog:
        parse_targets(settings.tokenizer, "--tokenizer")
    try:
        _ = _shim_settings(settings).image_sources
    except ValueError as error:
        raise StartupError(str(error)) from None


class ShimAnswering:
    """The routes of a shim that generate or make vectors, called without a connection."""

    def __init__(
        self,
        settings: JobsSettings,
        jobs: InnerJobs,
        account_of: Callable[[str], Account | None],
        ledger: UsageLedger,
    ) -> None:
        """jobs: keeps the responses of the requests, and reads their documents.

        account_of: returns the account of a key by its id; raises ServiceError if it is gone.
        ledger: counts the usage of the requests. Raises StartupError.
        """
        self._models = _models(settings)
        self._gate = Gate()
        self._app = create_inner_app(
            self._models,
            self._gate,
            _shim_settings(settings),
            jobs,
            partial(_CreatorMiddleware, account_of=account_of),
            ledger,
        )

    async def answer(self, path: str, body: bytes, creator: Creator) -> Reply:
        """Return the whole answer to a body, or the refusal of it. It counts as a request."""
        call = _Call(body, asyncio.Event())
        await self._app(_scope(path, creator, counts=True), call.receive, call.send)
        return Reply(call.status, call.headers, bytes(call.body))

    async def begin(
        self, path: str, body: bytes, creator: Creator, cancelled: asyncio.Event
    ) -> BackgroundAnswer:
        """Start the answer to a body that is to run in the background, as `Answering` says."""
        scope = _scope(path, creator, counts=False)
        call = _StreamedCall(body, cancelled)
        task = asyncio.ensure_future(self._app(scope, call.receive, call.send))
        task.add_done_callback(call.end)
        try:
            await call.begun.wait()
            if call.status != _OK:
                await task
                raise _refusal(scope, call)
        except BaseException:
            task.cancel()
            raise
        exchange = exchange_of(scope)
        return BackgroundAnswer(exchange.model, [*exchange.ignored], call.events(task))

    async def close(self) -> None:
        """End the requests that still run with an error, and close the connections."""
        await self._gate.close(0)
        await self._models.close()


def _shim_settings(settings: JobsSettings) -> HttpShimSettings:
    """Return the settings of the shim whose routes are called."""
    return HttpShimSettings(
        max_body_bytes=settings.max_body_bytes,
        max_held_bytes=settings.max_held_bytes,
        max_kept_image_bytes=settings.max_kept_image_bytes,
        fetch_images=settings.fetch_images,
        fetch_images_from=settings.fetch_images_from,
    )


def _models(settings: JobsSettings) -> ModelSource:
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
    try:
        manager = manager_of(settings.model_manager, settings.peer_token)
        catalog = Catalog(Path(settings.catalog), backend_settings, manager)
    except CatalogError as error:
        raise StartupError(str(error)) from None
    on_hangup(catalog.reload)
    return catalog


class _CreatorMiddleware:
    """Gives a request the account, the tenant and the priority of its creator."""

    def __init__(self, app: ASGIApp, account_of: Callable[[str], Account | None]) -> None:
        self._app = app
        self._account_of = account_of

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        exchange = exchange_of(scope)
        creator: Creator = scope[_CREATOR]
        exchange.tenant, exchange.priority = creator.tenant, creator.priority
        exchange.may_schedule = creator.may_schedule
        try:
            exchange.account = self._account_of(creator.account)
            if exchange.account is not None and scope[_COUNTS]:
                await count_request(exchange.account)
            current_tenant.set(exchange.owner)
        except ServiceError as error:
            await error_response(scope, error)(scope, receive, send)
        else:
            await self._app(scope, receive, send)


def _scope(path: str, creator: Creator, *, counts: bool) -> Scope:
    """Return the scope of a call. counts: whether it counts as a request of its key."""
    headers = [(b"content-type", b"application/json")]
    if not counts:  # a part of the request that started it
        ids = (("x-request-id", request_id.get()), ("traceparent", traceparent.get()))
        headers += [(name.encode(), value.encode()) for name, value in ids if value]
    return {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": "POST",
        "scheme": "http",
        "path": path,
        "raw_path": path.encode(),
        "query_string": b"",
        "root_path": "",
        "headers": headers,
        "client": None,
        "server": None,
        _CREATOR: creator,
        _COUNTS: counts,
    }


class _Call:
    """Request and answer of one call."""

    def __init__(self, content: bytes, cancelled: asyncio.Event) -> None:
        """cancelled: ends the answer once it is set."""
        self.status = 500
        self.headers: dict[str, str] = {}
        self.body = bytearray()
        self._content: bytes | None = content
        self._cancelled = cancelled

    async def receive(self) -> Message:
        if self._content is None:
            await self._cancelled.wait()
            return {"type": "http.disconnect"}
        content, self._content = self._content, None
        return {"type": "http.request", "body": content, "more_body": False}

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
            self.headers = {
                name.decode("latin-1").lower(): value.decode("latin-1")
                for name, value in message["headers"]
            }
        elif message["type"] == "http.response.body":
            await self._add(message.get("body", b""))

    async def _add(self, body: bytes) -> None:
        self.body += body


class _StreamedCall(_Call):
    """A call whose answer is read while it comes."""

    def __init__(self, content: bytes, cancelled: asyncio.Event) -> None:
        super().__init__(content, cancelled)
        self.begun = asyncio.Event()
        """Set once the status is known, or there will be none"""
        self._pieces: asyncio.Queue[bytes | None] = asyncio.Queue()
        """Pieces of the answer; None = it has ended"""

    async def send(self, message: Message) -> None:
        await super().send(message)
        self.begun.set()

    def end(self, _: "asyncio.Future[None]") -> None:
        """Note that no further piece comes."""
        self._pieces.put_nowait(None)
        self.begun.set()

    async def events(self, task: "asyncio.Future[None]") -> AsyncGenerator[bytes, None]:
        """Yield the pieces of the answer that `task` sends."""
        try:
            while (piece := await self._pieces.get()) is not None:
                yield piece
            await task
        finally:
            task.cancel()
            with suppress(asyncio.CancelledError):
                await task

    async def _add(self, body: bytes) -> None:
        if self.status == _OK:
            self._pieces.put_nowait(body)


def _refusal(scope: Scope, call: _Call) -> ServiceError:
    """Return the error of a call that was refused."""
    error = exchange_of(scope).error
    if error is None:
        return internal_error()
    if call.status == _TOO_LARGE:
        return invalid("body_json", error.message, reason="BODY_TOO_LARGE")
    return error
