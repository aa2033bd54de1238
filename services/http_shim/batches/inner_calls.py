"""Requests of batches: calls of the application without a connection."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from services.common.accounts.account import Account
from services.common.accounts.metering import count_request
from services.common.priority import PRIORITY_LIMIT
from services.common.sharing.tenant import current_tenant
from services.http_shim.http.exchange import exchange_of
from services.http_shim.http.failures import error_response
from tokenwire import batch_run
from tokenwire.batch_run import Reply
from tokenwire.errors import ServiceError

__all__ = ["Creator", "CreatorMiddleware", "InnerCalls"]

_CREATOR = "tokenwire.creator"


@dataclass(frozen=True, slots=True)
class Creator:
    """The maker of a batch."""

    account: Callable[[], Account | None]
    """Returns the account, None on a server without keys. Raises ServiceError if it is gone"""
    tenant: str


class CreatorMiddleware:
    """Gives a batch's request the account and tenant of its creator, and the lowest priority."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        exchange, creator = exchange_of(scope), scope[_CREATOR]
        exchange.tenant, exchange.priority = creator.tenant, -PRIORITY_LIMIT
        try:
            exchange.account = creator.account()
            if exchange.account is not None:
                await count_request(exchange.account)
            current_tenant.set(exchange.owner)
        except ServiceError as error:
            await error_response(scope, error)(scope, receive, send)
        else:
            await self._app(scope, receive, send)


@dataclass(frozen=True, slots=True)
class InnerCalls:
    """Calls of an application for one batch."""

    app: ASGIApp
    creator: Creator

    @asynccontextmanager
    async def connect(self) -> AsyncIterator[batch_run.Send]:
        yield self._post

    async def _post(self, path: str, content: bytes) -> Reply:
        scope: dict[str, Any] = {
            "type": "http",
            "asgi": {"version": "3.0"},
            "http_version": "1.1",
            "method": "POST",
            "scheme": "http",
            "path": path,
            "raw_path": path.encode(),
            "query_string": b"",
            "root_path": "",
            "headers": [(b"content-type", b"application/json")],
            "client": None,
            "server": None,
            _CREATOR: self.creator,
        }
        call = _Call(content)
        await self.app(scope, call.receive, call.send)
        return Reply(call.status, call.headers, bytes(call.body))


class _Call:
    """Request and answer of one call."""

    def __init__(self, content: bytes) -> None:
        self.status = 500
        self.headers: dict[str, str] = {}
        self.body = bytearray()
        self._content: bytes | None = content

    async def receive(self) -> Message:
        if self._content is None:
            await asyncio.Event().wait()  # the client of a batch never leaves
        content, self._content = self._content, None
        return {"type": "http.request", "body": content or b"", "more_body": False}

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
            self.headers = {
                name.decode("latin-1").lower(): value.decode("latin-1")
                for name, value in message["headers"]
            }
        elif message["type"] == "http.response.body":
            self.body += message.get("body", b"")
