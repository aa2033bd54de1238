"""JSON bodies of requests and responses."""

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

import grpc
import msgspec
from msgspec import Struct
from starlette.datastructures import Headers
from starlette.responses import Response
from starlette.types import Receive, Scope

from services.common.contract import MAX_IMAGES_BYTES
from services.common.json_limits import check_json_limits
from services.common.sharing.fair_executor import FairExecutor
from services.common.sharing.shares import Shares
from services.common.sharing.tenant import current_tenant
from services.http_shim.dialects.bodies import decoded, nested_too_deeply
from services.http_shim.dialects.fields import JsonObject
from services.http_shim.dialects.reading import Read, Reading
from services.http_shim.errors import BodyTooLargeError, ClientGoneError
from tokenwire.errors import ServiceError

__all__ = ["BodyReader", "HeldBytes", "json_response"]

_SMALL = 64 * 1024  # bytes; a connection may buffer as many anyway, so they are not counted
_URL_BYTES = MAX_IMAGES_BYTES // 3 * 4  # of the images of a request, in base64
Parsed = TypeVar("Parsed")


class HeldBytes:
    """Bytes of one request in memory, counted with those of all requests.

    The first 64 KiB of each request do not count.
    """

    __slots__ = ("_counted", "_shares", "_tenant")

    def __init__(self, shares: Shares) -> None:
        self._shares = shares
        self._tenant = current_tenant.get()
        self._counted = 0

    def resize(self, size: int) -> None:
        """Set the number of bytes. Raises UNAVAILABLE if the tenant, or all, hold too many."""
        counted = max(0, size - _SMALL)
        more = counted - self._counted
        if more > 0 and not self._shares.has_room(self._tenant, more):
            raise _too_many()
        self._shares.add(self._tenant, more)
        self._counted = counted

    def release(self) -> None:
        """Hold no bytes any more."""
        self.resize(0)


class BodyReader:
    """Reads the bodies of all connections, and bounds their memory and their event loop time."""

    def __init__(self, max_bytes: int, max_held_bytes: int) -> None:
        """Limit a body without its images, and the bytes that all requests hold.

        A request holds its body until it is decoded, then its images until they are sent. A tenant
        gets its share of them.
        """
        self._max_bytes = max_bytes
        self._max_held = max_held_bytes
        self._shares = Shares(max_held_bytes, least=max_bytes)
        # one thread: more of them would take the interpreter from the event loop more often
        self._thread = FairExecutor(1, "bodies")

    @contextmanager
    def held(self) -> Iterator[HeldBytes]:
        """Return the count of one request, which ends with the context at the latest."""
        held = HeldBytes(self._shares)
        try:
            yield held
        finally:
            held.release()

    async def read(
        self, scope: Scope, receive: Receive, parse: Callable[[JsonObject], Parsed]
    ) -> Parsed:
        """Read a body and parse it; bodies over 64 KiB are decoded and parsed in a thread.

        Raises ServiceError for a body of another content type, with too many elements, or over
        the limit of held bytes. Raises BodyTooLargeError and ClientGoneError.
        """
        with self.held() as held:
            text = await self._receive(scope, receive, held, self._max_bytes)
            return await self._run(len(text), lambda: parse(_decoded(text)))

    async def read_with_images(
        self,
        scope: Scope,
        receive: Receive,
        held: HeldBytes,
        prepare: Callable[[JsonObject], Awaitable[Read]],
    ) -> Reading:
        """Read a body that may have images; `held` then counts these.

        prepare: waits for what the reading needs besides the body. The limit of a body does not
        count the URLs of its images. Raises as `read` does.
        """
        limit = min(self._max_bytes + _URL_BYTES, self._max_held)
        text = await self._receive(scope, receive, held, limit)
        size = len(text)
        fields = await self._run(size, lambda: _decoded(text))
        read = await prepare(fields)
        reading = await self._run(size, lambda: read(fields))
        if size - reading.exempt_length > self._max_bytes:
            raise BodyTooLargeError(self._max_bytes, has_images=True)
        held.resize(reading.held_bytes)
        return reading

    async def _receive(
        self, scope: Scope, receive: Receive, held: HeldBytes, limit: int
    ) -> bytearray:
        _require_json(scope, limit)
        body = bytearray()
        while True:
            message = await receive()
            if message["type"] == "http.disconnect":
                raise ClientGoneError
            body += message.get("body", b"")
            if len(body) > limit:
                raise BodyTooLargeError(limit)
            held.resize(len(body))
            if not message.get("more_body", False):
                return body

    async def _run(self, size: int, call: Callable[[], Parsed]) -> Parsed:
        """Return the result of a call, which a thread makes if the body has a large size.

        What is decoded on a short stack may be too deep to be encoded on a longer one.
        """
        try:
            if size <= _SMALL:
                return call()
            return await asyncio.get_running_loop().run_in_executor(self._thread, call)
        except RecursionError:
            raise nested_too_deeply() from None


def _decoded(body: bytearray) -> JsonObject:
    """Decode a body, and drop its text. Raises INVALID_ARGUMENT."""
    text = bytes(body)
    body.clear()  # a large body must not stay in memory twice
    if len(text) > _SMALL:
        check_json_limits(text)
    return decoded(text)


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
