"""Who may do what: keys are asked for, requests and tokens counted."""

import time
from collections.abc import Collection, Iterator
from contextlib import contextmanager

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from services.http_shim.accounts.account import (
    GenerationRequest,
    cap_output,
    estimated_tokens,
    sequence_count,
)
from services.http_shim.accounts.keyring import Keyring
from services.http_shim.backends.model_source import ModelSource, ServedModel
from services.http_shim.http.exchange import Exchange, exchange_of
from services.http_shim.http.failures import error_response
from tokenwire.errors import ServiceError

__all__ = ["AccessMiddleware", "assign_model", "authorized_model", "reserved_tokens"]


class AccessMiddleware:
    """Lets in who has a key, and tells them what they have left. Every POST is a request.

    The paths in `free` are for everybody.
    """

    def __init__(self, app: ASGIApp, keyring: Keyring, free: Collection[str]) -> None:
        self._app = app
        self._keyring = keyring
        self._free = free

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] in self._free:
            await self._app(scope, receive, send)
            return
        try:
            account = self._keyring.account(Headers(scope=scope).get("authorization"))
        except ServiceError as error:
            await error_response(scope, error)(scope, receive, send)
            return
        exchange_of(scope).account = account

        async def send_on(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message).update(account.headers(time.monotonic()))
            await send(message)

        try:
            if scope["method"] == "POST":
                account.count_request(time.monotonic())
        except ServiceError as error:
            await error_response(scope, error)(scope, receive, send_on)
            return
        await self._app(scope, receive, send_on)


async def authorized_model(
    exchange: Exchange, models: ModelSource, name: str | None
) -> ServedModel:
    """The model of a name, if whoever asks may use it. Raises ServiceError."""
    served = models.find(name)
    if exchange.account is not None and exchange.account.tier.models is not None:
        exchange.account.require_model(await models.id_of(served))
    return served


async def assign_model(
    exchange: Exchange,
    models: ModelSource,
    name: str | None,
    request: GenerationRequest,
) -> ServedModel:
    """The model that a request goes to, under its limits and the key's. Raises ServiceError."""
    served = await authorized_model(exchange, models, name)
    request.model = served.backend_name
    caps = [served.max_output_length]
    if exchange.account is not None:
        caps.append(exchange.account.tier.max_tokens)
    cap_output(request, caps)
    if served.context is not None:
        request.stopping.context_length = served.context
    return served


@contextmanager
def reserved_tokens(exchange: Exchange, *requests: GenerationRequest) -> Iterator[None]:
    """Around completions: reserves the tokens that they may use, and settles at the end.

    What was error_response costs nothing. Who leaves before anything is known of the usage pays what was
    reserved. Raises RESOURCE_EXHAUSTED.
    """
    account = exchange.account
    if account is None:
        yield
        return
    choices = sum(map(sequence_count, requests))
    reserved = account.begin(sum(map(estimated_tokens, requests)), time.monotonic(), choices)
    is_refused = False
    try:
        yield
    except ServiceError:
        is_refused = True
        raise
    finally:
        used = exchange.tokens_used
        used = used if used or is_refused else reserved
        account.end(reserved, used, time.monotonic(), choices)
