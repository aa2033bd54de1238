"""JSON bodies of requests and responses."""

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import Protocol, TypeVar

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
from services.http_shim.errors import BodyTooLargeError, ClientGoneError
from services.http_shim.images.request_images import RequestImages
from tokenwire.errors import ServiceError

__all__ = ["BodyReader", "HeldBytes", "ParsedImages", "json_response"]

_SMALL = 64 * 1024  # bytes; a connection may buffer as many anyway, so they are not counted
_URL_BYTES = MAX_IMAGES_BYTES // 3 * 4  # of the images of a request, in base64
Parsed = TypeVar("Parsed")


class WithImages(Protocol):
    """A parsed body whose images are apart from it."""

    @property
    def images(self) -> RequestImages:
        """The images."""


ParsedImages = TypeVar("ParsedImages", bound=WithImages)


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
        self, scope: Scope, receive: Receive, parse: Callable[[bytes], Parsed]
    ) -> Parsed:
        """Read a body and parse it; bodies over 64 KiB are parsed in a thread.

        Raises ServiceError for a body of another content type, with too many elements, or over
        the limit of held bytes. Raises BodyTooLargeError and ClientGoneError.
        """
        with self.held() as held:
            return await self._read(scope, receive, parse, held, self._max_bytes)

    async def read_with_images(
        self,
        scope: Scope,
        receive: Receive,
        parse: Callable[[bytes], ParsedImages],
        held: HeldBytes,
        before: Callable[[bytes], Awaitable[None]] | None = None,
    ) -> ParsedImages:
        """Read and parse a body that may have images; `held` then counts these.

        before: waits for what `parse` needs besides the body. The limit of a body does not count
        the URLs of its images. Raises as `read` does.
        """

        def parse_within_limit(body: bytes) -> ParsedImages:
            parsed = parse(body)
            if len(body) - parsed.images.url_length > self._max_bytes:
                raise BodyTooLargeError(self._max_bytes, has_images=True)
            return parsed

        limit = min(self._max_bytes + _URL_BYTES, self._max_held)
        parsed = await self._read(scope, receive, parse_within_limit, held, limit, before)
        held.resize(parsed.images.size)
        return parsed

    async def _read(
        self,
        scope: Scope,
        receive: Receive,
        parse: Callable[[bytes], Parsed],
        held: HeldBytes,
        limit: int,
        before: Callable[[bytes], Awaitable[None]] | None = None,
    ) -> Parsed:
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
                break
        if before is not None:
            await before(bytes(body))
        if len(body) <= _SMALL:
            return parse(bytes(body))
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._thread, _parse_large, body, parse)


def _parse_large(body: bytearray, parse: Callable[[bytes], Parsed]) -> Parsed:
    text = bytes(body)
    body.clear()  # a large body must not stay in memory twice
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
