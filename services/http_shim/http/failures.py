"""Failed requests: the response, and the fields of the log line."""

import logging
from typing import Any

import grpc
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Match
from starlette.types import ASGIApp, Receive, Scope, Send

from services.common.errors import out_of_resources
from services.http_shim.errors import (
    INTERNAL,
    BodyTooLargeError,
    ClientGoneError,
    internal_error,
    other_error,
    to_response,
)
from services.http_shim.http.exchange import exchange_of
from tokenwire.errors import ServiceError

__all__ = ["FailureMiddleware", "error_response", "exception_handlers"]

_LOG = logging.getLogger("http")


def error_response(scope: Scope, error: ServiceError) -> Response:
    """Return the response for a request that the API or a service refuses."""
    exchange = exchange_of(scope)
    exchange.error = error
    response = to_response(error)
    if (form := exchange.error_form) is not None:
        response = _with_body(response, form.of_service(error, exchange.request_id))
    return response


class FailureMiddleware:
    """Answers unexpected exceptions, inside the middleware that adds headers to all answers."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await self._app(scope, receive, send)
        except ClientGoneError:
            raise
        except Exception as error:
            _LOG.exception("unexpected failure")
            exchange_of(scope).span.fail("INTERNAL")
            if exchange_of(scope).status:
                raise  # the response has started: only a broken connection shows the failure
            if (lack := out_of_resources(error)) is not None:
                await error_response(scope, lack)(scope, receive, send)
                return
            await _shaped(scope, internal_error(), INTERNAL)(scope, receive, send)


def exception_handlers() -> dict[Any, Any]:
    """Return Starlette's exception handlers."""
    return {
        ServiceError: _on_service_error,
        HTTPException: _on_http,
        BodyTooLargeError: _on_too_large,
    }


async def _on_service_error(request: Request, error: ServiceError) -> Response:
    return error_response(request.scope, error)


async def _on_too_large(request: Request, error: BodyTooLargeError) -> Response:
    return _other(request, 413, str(error), "body_too_large")


async def _on_http(request: Request, error: HTTPException) -> Response:
    """Answer an unknown path, or a method that the path does not have."""
    path = request.scope["path"]
    if error.status_code == 405:
        message, code = f"{path} does not support {request.method}.", "method_not_allowed"
        return _other(request, 405, message, code, {"allow": ", ".join(_methods_of(request))})
    return _other(request, error.status_code, f"The path {path} does not exist.", "not_found")


def _methods_of(request: Request) -> list[str]:
    """Return the methods of a path; each is a route of its own, and Starlette names only one's."""
    matching = (
        route.methods or set()
        for route in request.app.routes
        if route.matches(request.scope)[0] is not Match.NONE
    )
    return sorted(set().union(*matching))


def _other(
    request: Request, status: int, message: str, code: str, headers: dict[str, str] | None = None
) -> Response:
    error = ServiceError(grpc.StatusCode.NOT_FOUND, code.upper(), message)  # may quote the path
    exchange_of(request.scope).error = error
    return _shaped(request.scope, other_error(status, error.message, code, headers), error.message)


def _shaped(scope: Scope, response: Response, message: str) -> Response:
    """Return the response for a failure in the form of its path."""
    exchange = exchange_of(scope)
    if (form := exchange.error_form) is None:
        return response
    body = form.of_status(response.status_code, message, exchange.request_id)
    return _with_body(response, body)


def _with_body(response: Response, body: bytes) -> Response:
    kept = ("retry-after", "www-authenticate", "allow", "x-should-retry")
    headers = {name: value for name, value in response.headers.items() if name in kept}
    return Response(body, response.status_code, headers, media_type="application/json")
