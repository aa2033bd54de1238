"""Errors in OpenAI's JSON form."""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import grpc
import msgspec
from msgspec import Struct
from starlette.responses import Response

from tokenwire.errors import ServiceError

__all__ = [
    "INTERNAL",
    "BodyTooLargeError",
    "ClientGoneError",
    "ErrorBody",
    "ErrorForm",
    "FileTooLargeError",
    "client_field_names",
    "error_body",
    "http_status",
    "internal_error",
    "other_error",
    "public_message",
    "refusal",
    "to_response",
]

_STATUS = {
    grpc.StatusCode.INVALID_ARGUMENT: 400,
    grpc.StatusCode.FAILED_PRECONDITION: 400,
    grpc.StatusCode.OUT_OF_RANGE: 400,
    grpc.StatusCode.ALREADY_EXISTS: 400,
    grpc.StatusCode.UNAUTHENTICATED: 401,
    grpc.StatusCode.PERMISSION_DENIED: 403,
    grpc.StatusCode.NOT_FOUND: 404,
    grpc.StatusCode.ABORTED: 409,
    grpc.StatusCode.RESOURCE_EXHAUSTED: 429,
    grpc.StatusCode.CANCELLED: 499,
    grpc.StatusCode.UNIMPLEMENTED: 501,
    grpc.StatusCode.UNAVAILABLE: 503,
    grpc.StatusCode.DEADLINE_EXCEEDED: 504,
}
_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    429: "rate_limit_error",
    499: "server_error",  # an operator aborted the request
    501: "not_implemented_error",
}

_LOST = frozenset({"UNREACHABLE", "SESSION_LOST", "ENGINE_LOST"})
_NO_QUOTA = "INSUFFICIENT_QUOTA"
_UNREACHABLE = "The model can't be reached now; try again."
INTERNAL = "The server failed; its log has the details."
_UNTYPED = "The model's services failed to answer; the server's log may have the details."


class ClientGoneError(Exception):
    """The client closed its connection, so nobody reads an answer."""


class BodyTooLargeError(Exception):
    """The request body exceeds the limit, in bytes."""

    def __init__(self, limit: int, *, has_images: bool = False) -> None:
        what = "The body without its images" if has_images else "The body"
        super().__init__(f"{what} is larger than {limit} bytes.")


class FileTooLargeError(BodyTooLargeError):
    """An uploaded file exceeds the limit of one file."""

    def __init__(self, message: str) -> None:
        """message: a sentence that names the limit."""
        Exception.__init__(self, message)


class ErrorDetails(Struct):
    """The failure. `param` names the field at fault, `code` the reason."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorBody(Struct):
    """The JSON body of every error."""

    error: ErrorDetails


@dataclass(frozen=True, slots=True)
class ErrorForm:
    """The form of a dialect's errors, where it is not OpenAI's, for the request with an id."""

    of_service: Callable[[ServiceError, str], bytes]
    """Returns the JSON body of the error of a service"""
    of_status: Callable[[int, str, str], bytes]
    """Returns the JSON body of another failure, of its HTTP status and message"""


@contextmanager
def client_field_names(name_of: Callable[[str], str]) -> Iterator[None]:
    """Rename the field of a ServiceError: `name_of` converts the service's name to the client's."""
    try:
        yield
    except ServiceError as error:
        if error.field:
            error.field = name_of(error.field)
        raise


def http_status(code: grpc.StatusCode) -> int:
    """Return the HTTP status of a gRPC status; 500 for any without a counterpart."""
    return _STATUS.get(code, 500)


def error_body(error: ServiceError) -> bytes:
    """Return the JSON body; `error.field` must be the client's name of the field."""
    code = None if _is_untyped(error) else error.reason.lower()
    return _encode(http_status(error.code), public_message(error), error.field or None, code)


def public_message(error: ServiceError) -> str:
    """Return what a client is told: gRPC's own messages have inner addresses."""
    if _is_untyped(error):
        return _UNTYPED
    return _UNREACHABLE if error.reason in _LOST else error.message


def _is_untyped(error: ServiceError) -> bool:
    return error.reason in ("", "UNKNOWN")  # the message is gRPC's own


def to_response(error: ServiceError) -> Response:
    """Return the response, with Retry-After if a retry makes sense."""
    status = http_status(error.code)
    headers = {"www-authenticate": "Bearer"} if status == 401 else {}
    if error.reason == _NO_QUOTA:
        headers["x-should-retry"] = "false"  # SDKs would retry a 429
    elif status in (429, 503):
        headers["retry-after"] = str(max(1, math.ceil(error.retry_seconds or 1)))
    return _respond(status, error_body(error), headers)


def internal_error() -> Response:
    """Return the response for an unexpected exception."""
    return other_error(500, INTERNAL, "internal")


def refusal(status: int, message: str, code: str) -> bytes:
    """Return the JSON body for a request that reached no route."""
    return _encode(status, message, None, code)


def other_error(
    status: int, message: str, code: str, headers: dict[str, str] | None = None
) -> Response:
    """Return the response for a failure that no service reported."""
    return _respond(status, refusal(status, message, code), headers)


def _encode(status: int, message: str, param: str | None, code: str | None) -> bytes:
    kind = code if code == _NO_QUOTA.lower() else _TYPES.get(status)
    kind = kind or ("server_error" if status >= 500 else "invalid_request_error")
    return msgspec.json.encode(ErrorBody(ErrorDetails(message, kind, param, code)))


def _respond(status: int, body: bytes, headers: dict[str, str] | None = None) -> Response:
    return Response(body, status, headers, media_type="application/json")
