"""Scheduling of requests: priority and tenant.

x-priority lets a caller overtake the others. x-tenant lets it find out, by `cached_tokens`, what
another tenant asked. The operator therefore decides whether these headers count.
"""

import grpc
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from services.common.priority import PRIORITY_KEY, PRIORITY_LIMIT, TENANT_KEY, parse_priority
from services.common.sharing.tenant import current_tenant
from services.http_shim.http.exchange import Exchange, exchange_of
from services.http_shim.http.failures import error_response
from tokenwire.errors import ServiceError

__all__ = ["SchedulingMiddleware", "priority_of"]


def priority_of(exchange: Exchange, asked: int | None) -> int:
    """Convert a priority of vLLM's order, lower first, to the services' order, higher first.

    Raises PERMISSION_DENIED for a raised priority if the client may not choose.
    """
    if asked is None:
        return exchange.priority
    if exchange.may_schedule:
        return -asked
    if asked < 0:
        raise ServiceError(
            grpc.StatusCode.PERMISSION_DENIED,
            "PRIORITY_NOT_ALLOWED",
            f"priority must be at least 0 on this server, got {asked}: a client may only lower "
            "the priority of its requests.",
            field="priority",
        )
    return max(exchange.priority - asked, -PRIORITY_LIMIT)


class SchedulingMiddleware:
    """Sets priority and tenant from trusted headers, else from the key and its tier."""

    def __init__(self, app: ASGIApp, *, trusts_headers: bool) -> None:
        self._app = app
        self._trusts_headers = trusts_headers

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
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
            exchange.ignored_headers = [
                name for name in (PRIORITY_KEY, TENANT_KEY) if name in headers
            ]
        current_tenant.set(exchange.owner)
        await self._app(scope, receive, send)


def _follow_key(exchange: Exchange) -> None:
    if exchange.account is not None:
        exchange.tenant = exchange.account.id
        exchange.priority = exchange.account.tier.priority


def _follow_headers(exchange: Exchange, headers: Headers) -> None:
    """Apply x-priority and x-tenant. Raises INVALID_ARGUMENT for an invalid priority."""
    exchange.tenant = headers.get(TENANT_KEY) or exchange.tenant
    if (text := headers.get(PRIORITY_KEY)) is not None:
        exchange.priority = parse_priority(text)
