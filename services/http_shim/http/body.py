"""JSON bodies of requests and responses."""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import grpc
import msgspec
from msgspec import Struct
from starlette.datastructures import Headers
from starlette.responses import Response
from starlette.types import Receive, Scope

from services.http_shim.errors import BodyTooLargeError, ClientGoneError
from services.http_shim.http.json_limits import check_json_limits
from tokenwire.errors import ServiceError

__all__ = ["BodyReader", "json_response"]

_SMALL = 64 * 1024  # bytes; a connection may buffer as many anyway, so they are not counted
Parsed = TypeVar("Parsed")


class BodyReader:
    """Reads the bodies of all connections, and bounds their memory and their event loop time."""

    def __init__(self, max_bytes: int, max_unfinished_bytes: int) -> None:
        """Limit a body, and all bodies that are not yet decoded.

        The first 64 KiB of each body do not count towards `max_unfinished_bytes`.
        """
        self._max_bytes = max_bytes
        self._max_unfinished = max_unfinished_bytes
        self._unfinished = 0
        # one thread: more of them would take the interpreter from the event loop more often
        self._thread = ThreadPoolExecutor(1, "bodies")

    async def read(
        self, scope: Scope, receive: Receive, parse: Callable[[bytes], Parsed]
    ) -> Parsed:
        """Read a body and parse it; bodies over 64 KiB are parsed in a thread.

        Raises ServiceError for a body of another content type, with too many elements, or over
        the limit of unfinished bodies. Raises BodyTooLargeError and ClientGoneError.
        """
        _require_json(scope, self._max_bytes)
        body = bytearray()
        counted = 0
        try:
            while True:
                message = await receive()
                if message["type"] == "http.disconnect":
                    raise ClientGoneError
                body += message.get("body", b"")
                if len(body) > self._max_bytes:
                    raise BodyTooLargeError(self._max_bytes)
                more = max(0, len(body) - _SMALL) - counted
                if self._unfinished + more > self._max_unfinished:
                    raise _too_many()
                self._unfinished += more
                counted += more
                if not message.get("more_body", False):
                    break
            if len(body) <= _SMALL:
                return parse(bytes(body))
            loop = asyncio.get_running_loop()
            return await loop.run_in_executor(self._thread, _parse_large, body, parse)
        finally:
            self._unfinished -= counted


def _parse_large(body: bytearray, parse: Callable[[bytes], Parsed]) -> Parsed:
    text = bytes(body)
    check_json_limits(text)
    return parse(text)


def _require_json(scope: Scope, limit: int) -> None:
    """Refuse a body by its headers.

    The content type must be JSON: browsers send other types across origins without a preflight.
    """
    headers = Headers(scope=scope)
    content_type = headers.get("content-type", "").partition(";")[0].strip().lower()
    if content_type != "application/json" and not content_type.endswith("+json"):
        raise ServiceError(
            grpc.StatusCode.INVALID_ARGUMENT,
            "UNSUPPORTED_CONTENT_TYPE",
            "The body must be JSON with the header content-type: application/json.",
        )
    encoding = headers.get("content-encoding", "identity")
    if encoding.lower() != "identity":
        raise ServiceError(
            grpc.StatusCode.INVALID_ARGUMENT,
            "UNSUPPORTED_CONTENT_ENCODING",
            f"The body must not have a content-encoding, got {encoding[:32]}.",
        )
    announced = headers.get("content-length", "")
    if announced.isdecimal() and int(announced) > limit:
        raise BodyTooLargeError(limit)


def _too_many() -> ServiceError:
    return ServiceError(
        grpc.StatusCode.UNAVAILABLE,
        "TOO_MANY_BODIES",
        "The server holds as many large bodies as it can; try again.",
        retry_seconds=1,
    )


def json_response(value: Struct) -> Response:
    """Return a JSON response."""
    return Response(msgspec.json.encode(value), media_type="application/json")
