"""Who says how a request is scheduled: its place among others, and whose prefix cache it finds.

The headers x-priority and x-tenant would let any caller overtake the others, or find out by
`cached_tokens` what another tenant has asked. So the operator says whether they are heeded.
"""

import re

import grpc
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from services.http_shim.http.exchange import Exchange, exchange_of
from services.http_shim.http.failures import error_response
from tokenwire.errors import ServiceError, invalid

__all__ = ["SchedulingMiddleware", "priority_of"]

_PRIORITY, _TENANT = "x-priority", "x-tenant"
_INTEGER = re.compile(r"[+-]?[0-9]{1,10}")
_MOST = 2**31


def priority_of(exchange: Exchange, asked: int | None) -> int:
    """The priority in the services' order, higher first, for one in vLLM's, lower first.

    Raises PERMISSION_DENIED where the client may not choose, and would go before others.
    """
    if asked is None:
        return exchange.priority
    if exchange.may_schedule:
        return -asked
    if asked < 0:
        raise ServiceError(
            grpc.StatusCode.PERMISSION_DENIED,
            "PRIORITY_NOT_ALLOWED",
            f"priority must be at least 0 on this server, got {asked}: a request can only let "
            "others go first.",
            field="priority",
        )
    return max(exchange.priority - asked, -_MOST)


class SchedulingMiddleware:
    """Behind the keys. Where the headers are not heeded, the key and its tier decide."""

    def __init__(self, app: ASGIApp, *, trusts_headers: bool) -> None:
        self._app = app
        self._trusts_headers = trusts_headers

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        exchange, headers = exchange_of(scope), Headers(scope=scope)
        _follow_key(exchange)
        exchange.may_schedule = self._trusts_headers
        if self._trusts_headers:
            try:
                _follow_headers(exchange, headers)
            except ServiceError as error:
                await error_response(scope, error)(scope, receive, send)
                return
        else:
            exchange.ignored_headers = [name for name in (_PRIORITY, _TENANT) if name in headers]
        await self._app(scope, receive, send)


def _follow_key(exchange: Exchange) -> None:
    if exchange.account is not None:
        exchange.tenant = exchange.account.id
        exchange.priority = exchange.account.tier.priority


def _follow_headers(exchange: Exchange, headers: Headers) -> None:
    """Raises INVALID_ARGUMENT for a priority that is none."""
    exchange.tenant = headers.get(_TENANT) or exchange.tenant
    text = headers.get(_PRIORITY)
    if text is None:
        return
    if not _INTEGER.fullmatch(text) or not -_MOST <= int(text) < _MOST:
        raise invalid(
            _PRIORITY,
            f"{_PRIORITY} must be an integer from -2147483648 to 2147483647, got {text!r}.",
        )
    exchange.priority = int(text)
