"""JSON bodies: read up to a limit, written."""

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

_SMALL = 64 * 1024  # bytes; a connection may hold as many unread, so they are not counted
Made = TypeVar("Made")


class BodyReader:
    """Reads the bodies of all connections, and bounds what they take of memory and of the event
    loop's time."""

    def __init__(self, max_bytes: int, max_unfinished_bytes: int) -> None:
        """max_bytes: of a body. max_unfinished_bytes: of all that are on their way or waiting to be
        decoded, where each counts by what it has beyond 64 KiB."""
        self._max_bytes = max_bytes
        self._max_unfinished = max_unfinished_bytes
        self._unfinished = 0
        # one thread: several would take turns with the event loop more often
        self._thread = ThreadPoolExecutor(1, "bodies")

    async def read(self, scope: Scope, receive: Receive, make: Callable[[bytes], Made]) -> Made:
        """What `make` makes of the body: at once where it is small, else aside.

        Raises ServiceError for a body that is not said to be JSON, that holds too much, or for
        which there is no memory now; BodyTooLargeError and ClientGoneError.
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
                return make(bytes(body))
            loop = asyncio.get_running_loop()
            return await loop.run_in_executor(self._thread, _make_large, body, make)
        finally:
            self._unfinished -= counted


def _make_large(body: bytearray, make: Callable[[bytes], Made]) -> Made:
    text = bytes(body)
    check_json_limits(text)
    return make(text)


def _require_json(scope: Scope, limit: int) -> None:
    """Refuse what its head tells already.

    The content type must say JSON: other types are what browsers send across origins unasked.
    """
    headers = Headers(scope=scope)
    content_type = headers.get("content-type", "").partition(";")[0].strip().lower()
    if content_type != "application/json" and not content_type.endswith("+json"):
        raise ServiceError(
            grpc.StatusCode.INVALID_ARGUMENT,
            "UNSUPPORTED_CONTENT_TYPE",
            "The body must be JSON, sent with the header content-type: application/json.",
        )
    encoding = headers.get("content-encoding", "identity")
    if encoding.lower() != "identity":
        raise ServiceError(
            grpc.StatusCode.INVALID_ARGUMENT,
            "UNSUPPORTED_CONTENT_ENCODING",
            f"The body must be sent as it is, not in the content-encoding {encoding[:32]}.",
        )
    announced = headers.get("content-length", "")
    if announced.isdecimal() and int(announced) > limit:
        raise BodyTooLargeError(limit)


def _too_many() -> ServiceError:
    return ServiceError(
        grpc.StatusCode.UNAVAILABLE,
        "TOO_MANY_BODIES",
        "The server is reading as many large bodies as it can hold; try again.",
        retry_seconds=1,
    )


def json_response(value: Struct, status: int = 200) -> Response:
    """An answer in JSON."""
    return Response(msgspec.json.encode(value), status, media_type="application/json")
