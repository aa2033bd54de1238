"""JSON bodies: read up to a limit, written."""

import grpc
import msgspec
from msgspec import Struct
from starlette.datastructures import Headers
from starlette.responses import Response
from starlette.types import Receive, Scope

from services.http_shim.errors import BodyTooLargeError, ClientGoneError
from tokenwire.errors import ServiceError

__all__ = ["json_response", "read_json_body"]


async def read_json_body(scope: Scope, receive: Receive, limit: int) -> bytes:
    """The body, at most `limit` bytes; nothing beyond is kept.

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
    body = bytearray()
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientGoneError
        body += message.get("body", b"")
        if len(body) > limit:
            raise BodyTooLargeError(limit)
        if not message.get("more_body", False):
            return bytes(body)


def json_response(value: Struct, status: int = 200) -> Response:
    """An answer in JSON."""
    return Response(msgspec.json.encode(value), status, media_type="application/json")
