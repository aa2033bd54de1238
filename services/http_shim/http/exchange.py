"""HTTP exchange: request id, response headers, log line and metrics of every request."""

import logging
import time
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import cast
from urllib.parse import quote

from starlette.datastructures import Headers, MutableHeaders
from starlette.routing import Match, Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from services.common import tracing
from services.common.accounts.account import Account
from services.common.accounts.ledger import UsageLedger
from services.common.accounts.usage import RequestUsage
from services.common.failures import failure
from services.common.interceptor import sane_request_id, sane_traceparent
from services.common.logging import request_id, traceparent
from services.common.span import Span
from services.http_shim.errors import ClientGoneError, ErrorForm
from services.http_shim.metrics import IN_FLIGHT, NO_ROUTE, REQUEST_SECONDS, REQUESTS, TOKENS
from tokenwire.errors import ServiceError

__all__ = ["Exchange", "ExchangeMiddleware", "exchange_of"]

_LOG = logging.getLogger("http")
_PATHS_SHOWN = 32  # ignored paths in the header, whose size clients limit
_PATH_SHOWN = 128  # characters of each path
_PROBES = frozenset({"/health", "/ready", "/metrics", "/status.json"})
_CLIENT_GONE = 499


@dataclass(slots=True)
class Exchange:
    """One request and its response."""

    request_id: str
    began: float
    """Arrival, in seconds of the monotonic clock"""
    span: Span = field(default_factory=partial(Span, ""))
    status: int = 0
    """HTTP status; 0 until the response starts"""
    ignored: list[str] = field(default_factory=list)
    """Paths of fields that were ignored"""
    model: str = ""
    """Model that takes the request, by the name in its answer; "" = none, or several"""
    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0
    """Tokens of the prompt that were in a prefix cache"""
    shares: list[RequestUsage] = field(default_factory=list)
    """Usage of each model of a request to several; empty = the counts above are of one model"""
    account: Account | None = None
    """Account of the API key; None on a server without keys"""
    ledger: UsageLedger | None = None
    """Counts the usage of the request; None = nothing does"""
    error: ServiceError | None = None
    """The failure that the client sees; None = no failure"""
    tenant: str = ""
    """Tenant whose prefix cache the request uses"""
    priority: int = 0
    """Scheduling priority, higher first"""
    may_schedule: bool = False
    """True if the client may choose tenant and priority"""
    ignored_headers: list[str] = field(default_factory=list)
    error_form: ErrorForm | None = None
    """Form of the errors of its dialect; None = OpenAI's"""

    @property
    def owner(self) -> str:
        """Owner of the files, batches and responses that the request makes or reads.

        It is the API key, whatever tenant the headers name; on a server without keys the tenant.
        """
        return self.tenant if self.account is None else self.account.id

    @property
    def usages(self) -> list[RequestUsage]:
        """Usage of each model that took the request, or of none if it failed before."""
        if self.shares:
            return self.shares
        usage = RequestUsage(
            self.model,
            self.prompt_tokens,
            self.completion_tokens,
            self.cached_tokens,
            is_error=self.error is not None,
        )
        return [usage]

    @property
    def tokens_used(self) -> int:
        """Tokens of prompt and output so far, which are billed."""
        return self.prompt_tokens + self.completion_tokens


def exchange_of(scope: Scope) -> Exchange:
    """Return the exchange of a scope."""
    return cast(Exchange, scope["exchange"])


class ExchangeMiddleware:
    """Outermost middleware. Logs and metrics label a request with its endpoint's first path."""

    def __init__(
        self,
        app: ASGIApp,
        routes: Sequence[Route],
        error_forms: Mapping[str, ErrorForm],
        ledger: UsageLedger,
    ) -> None:
        """error_forms: of dialects, by the path below which they are spoken."""
        self._app = app
        self._ledger = ledger
        self._routes = routes
        self._error_forms = error_forms
        self._paths = {route.endpoint: route.path for route in reversed(routes)}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = Headers(scope=scope)
        is_probe = scope["path"] in _PROBES
        identity = sane_request_id(headers.get("x-request-id"))
        parent = sane_traceparent(headers.get("traceparent"))
        span = Span(parent) if is_probe else tracing.start(scope["method"], parent, identity)
        exchange = scope["exchange"] = Exchange(identity, time.monotonic(), span)
        exchange.ledger = self._ledger
        exchange.error_form = self._error_form(scope["path"])
        request_id.set(identity)
        traceparent.set(span.traceparent)

        async def send_on(message: Message) -> None:
            if message["type"] == "http.response.start":
                exchange.status = message["status"]
                _add_headers(message, exchange)
            await send(message)

        with nullcontext() if is_probe else IN_FLIGHT.track_inprogress():
            try:
                await self._app(scope, receive, send_on)
            except ClientGoneError:
                exchange.status = _CLIENT_GONE
            finally:
                self._record(scope, exchange)

    def _error_form(self, path: str) -> ErrorForm | None:
        for prefix, form in self._error_forms.items():
            if path == prefix or path.startswith(f"{prefix}/"):
                return form
        return None

    def _record(self, scope: Scope, exchange: Exchange) -> None:
        route = self._route(scope)
        seconds = time.monotonic() - exchange.began
        REQUESTS.labels(route, exchange.status, exchange.model).inc()
        REQUEST_SECONDS.labels(route, exchange.model).observe(seconds)
        TOKENS.labels("prompt", exchange.model).inc(exchange.prompt_tokens)
        TOKENS.labels("completion", exchange.model).inc(exchange.completion_tokens)
        fields: dict[str, object] = {
            "method": scope["method"],
            "route": route,
            "status": exchange.status,
            "milliseconds": round(seconds * 1e3, 2),
        }
        if exchange.prompt_tokens or exchange.completion_tokens:
            fields["prompt_tokens"] = exchange.prompt_tokens
            fields["completion_tokens"] = exchange.completion_tokens
        if exchange.error is not None:
            fields |= failure(_LOG, exchange.error)
        if exchange.account is not None:
            fields["key"] = exchange.account.id
        _end_span(exchange, scope["method"], route)
        level = logging.DEBUG if route in _PROBES else logging.INFO
        if _LOG.isEnabledFor(logging.DEBUG):
            fields["path"] = scope["path"]  # the client's text
        _LOG.log(level, "%s %s", scope["method"], route, extra=fields)

    def _route(self, scope: Scope) -> str:
        """Return the requested route, also for a request that a middleware refused."""
        if "endpoint" in scope:
            return self._paths[scope["endpoint"]]
        matching = (route for route in self._routes if route.matches(scope)[0] is not Match.NONE)
        route = next(matching, None)
        return NO_ROUTE if route is None else self._paths[route.endpoint]


def _end_span(exchange: Exchange, method: str, route: str) -> None:
    span = exchange.span
    if span.is_recording:
        span.rename(f"{method} {route}")
        span.set(
            {
                "http.request.method": method,
                "http.route": route,
                "http.response.status_code": exchange.status,
            }
        )
        if exchange.tokens_used:
            span.set(
                {
                    "gen_ai.usage.input_tokens": exchange.prompt_tokens,
                    "gen_ai.usage.output_tokens": exchange.completion_tokens,
                }
            )
        if exchange.error is not None:
            span.fail(**failure(_LOG, exchange.error))
    span.end()


def _add_headers(message: Message, exchange: Exchange) -> None:
    headers = MutableHeaders(scope=message)
    headers["x-request-id"] = exchange.request_id
    if ignored := [*exchange.ignored_headers, *exchange.ignored]:
        paths = [
            quote(path, safe="[]", errors="replace")[:_PATH_SHOWN]
            for path in ignored[:_PATHS_SHOWN]
        ]
        headers["x-tokenwire-ignored"] = ", ".join(paths)
