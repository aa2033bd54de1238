"""Access control: API keys, models of a tier, rate limits.

Each request counts against the requests per minute, whatever its method. Answers that cost no
tokens, such as files and kept responses, count by their size as well.
"""

import time
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from urllib.parse import urlsplit

import grpc
from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from services.common.accounts.account import (
    TextRequest,
    cap_output,
    estimated_tokens,
    sequence_count,
)
from services.common.accounts.identity import admin_key_required
from services.common.accounts.keyring import Keyring
from services.common.accounts.metering import Charge, begin, charge_requests, count_request
from services.http_shim.backends.model_source import ModelSource, ServedModel
from services.http_shim.http.exchange import Exchange, exchange_of
from services.http_shim.http.failures import error_response
from tokenwire.errors import ServiceError
from tokenwire.pb.completion.v1 import completion_pb2

_REQUEST_BYTES = 1 << 20
"""Bytes of an answer to a GET that count as one more request"""
__all__ = [
    "AccessMiddleware",
    "assign_model",
    "authorized_model",
    "charging",
    "is_admin",
    "require_admin",
    "reserve",
]


class AccessMiddleware:
    """Authenticates and counts requests, and adds the rate-limit headers.

    The paths in `public` need no key.
    """

    def __init__(self, app: ASGIApp, keyring: Keyring, public: Collection[str]) -> None:
        self._app = app
        self._keyring = keyring
        self._public = public

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["path"] in self._public:
            await self._app(scope, receive, send)
            return
        try:
            account = self._keyring.account(_shown_key(Headers(scope=scope)))
        except ServiceError as error:
            await error_response(scope, error)(scope, receive, send)
            return
        exchange_of(scope).account = account

        sent = 0

        async def send_on(message: Message) -> None:
            nonlocal sent
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message).update(account.headers(time.monotonic()))
            sent += len(message.get("body", b""))
            await send(message)

        try:
            await count_request(account)
        except ServiceError as error:
            await error_response(scope, error)(scope, receive, send_on)
            return
        try:
            await self._app(scope, receive, send_on)
        finally:
            if scope["method"] == "GET" and (more := sent // _REQUEST_BYTES):
                charge_requests(account, more)


def _shown_key(headers: Headers) -> str | None:
    """Return the authorization; Anthropic's clients send the key alone, in a header of its own."""
    key = headers.get("x-api-key")
    return headers.get("authorization", None if key is None else f"Bearer {key}")


def is_admin(scope: Scope) -> bool:
    """Return whether `require_admin` lets the client pass."""
    try:
        require_admin(scope, "")
    except ServiceError:
        return False
    return True


def require_admin(scope: Scope, action: str) -> None:
    """Raise PERMISSION_DENIED unless the client may operate the server.

    action: what the client asks for, as the subject of a sentence.

    With keys, only an admin key may. Without keys, the server is on loopback or has --open, and
    whoever reaches it may, except for the pages of other origins: a browser sends their requests
    without asking its user.
    """
    account = exchange_of(scope).account
    if account is not None:
        if not account.is_admin:
            raise admin_key_required(action)
        return
    headers = Headers(scope=scope)
    origin = headers.get("origin")
    if origin is not None and urlsplit(origin).netloc != headers.get("host"):
        raise ServiceError(
            grpc.StatusCode.PERMISSION_DENIED,
            "OTHER_ORIGIN",
            f"{action} is refused to pages of other origins on a server without keys.",
        )


async def authorized_model(
    exchange: Exchange, models: ModelSource, name: str | None
) -> ServedModel:
    """Return the model of that name. Raises ServiceError if the key may not use it."""
    served = await models.find(name)
    if exchange.account is not None and exchange.account.tier.models is not None:
        exchange.account.require_model(await models.id_of(served))
    return served


async def assign_model(
    exchange: Exchange,
    models: ModelSource,
    name: str | None,
    request: completion_pb2.GenerateRequest,
) -> ServedModel:
    """Return the model for a request, which is lowered to its limits. Raises ServiceError."""
    served = await authorized_model(exchange, models, name)
    request.model = served.backend_name
    operation = "chat" if request.HasField("conversation") else "text_completion"
    model = name or served.backend_name
    exchange.span.set({"gen_ai.operation.name": operation, "gen_ai.request.model": model})
    caps = [served.max_output_length]
    if exchange.account is not None:
        caps.append(exchange.account.tier.max_tokens)
    cap_output(request, caps)
    if served.context is not None:
        request.stopping.context_length = served.context
    return served


async def reserve(exchange: Exchange, *requests: TextRequest) -> Charge | None:
    """Reserve the tokens that the requests may use; `charging` ends it. Raises RESOURCE_EXHAUSTED.

    Returns None on a server without keys.
    """
    if exchange.account is None:
        return None
    choices = sum(map(sequence_count, requests))
    return await begin(exchange.account, sum(map(estimated_tokens, requests)), choices)


@contextmanager
def charging(exchange: Exchange, charge: Charge | None) -> Iterator[None]:
    """Count the usage at the end, and charge it to the key.

    A refused request costs nothing. A client that leaves before the usage is known pays the
    reservation.
    """
    is_refused = False
    try:
        yield
    except ServiceError as error:
        is_refused, exchange.error = True, error
        raise
    finally:
        if exchange.ledger is not None:
            for usage in exchange.usages:
                exchange.ledger.record(exchange.account, usage)
        if charge is not None:
            used = exchange.tokens_used
            charge.end(used if used or is_refused else charge.reserved)
