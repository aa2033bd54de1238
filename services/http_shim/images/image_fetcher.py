"""Fetching of images from the URLs that clients give.

Otherwise a client could reach what only this server can reach. The connection goes to exactly the
addresses that were checked, because a second DNS lookup could give others. The error is the same
for every host that can't be reached, so that a client can't explore a network.
"""

import asyncio
import logging
import socket
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from functools import partial
from typing import TypeAlias
from weakref import WeakValueDictionary

import grpc
import httpcore

from services.common.contract import MAX_IMAGE_BYTES
from services.common.sharing.fair_turns import FairTurns
from services.common.sharing.tenant import current_tenant
from services.http_shim.images.addresses import is_public
from services.http_shim.images.remote_urls import (
    AllowedSources,
    RemoteUrl,
    RemoteUrlError,
    parse_remote_url,
)
from services.http_shim.images.request_images import RemoteImage, RequestImages
from tokenwire.errors import ServiceError, invalid

__all__ = ["FetchLimits", "ImageFetcher", "Resolve", "fetch_remote"]

_LOG = logging.getLogger("images")
_RESOLVERS = 8  # threads; each name server that does not answer blocks one
_MAX_ADDRESSES = 4  # of a host, that are tried
_REDIRECTS = frozenset({301, 302, 303, 307, 308})
_HEADERS = [
    (b"Accept", b"image/*"),
    (b"Accept-Encoding", b"identity"),
    (b"Connection", b"close"),
    (b"User-Agent", b"tokenwire"),
]

Resolve: TypeAlias = Callable[[str, int], Awaitable[Sequence[str]]]
"""Returns the addresses of a host for connections to a port. Raises OSError."""


@dataclass(frozen=True, slots=True)
class FetchLimits:
    """Limits on fetching."""

    seconds: float = 10.0
    """Longest time of an image with its redirects; half of it for each connection"""
    redirects: int = 3
    image_bytes: int = MAX_IMAGE_BYTES
    concurrent: int = 32
    """Images that are fetched at once, of all requests"""


_LIMITS = FetchLimits()


class _FetchError(Exception):
    """An image that can't be fetched. The message continues the sentence "The image's URL …"."""


class ImageFetcher:
    """Fetches the images of all requests."""

    def __init__(
        self,
        sources: AllowedSources,
        limits: FetchLimits = _LIMITS,
        *,
        resolve: Resolve | None = None,
        is_allowed: Callable[[str], bool] = is_public,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        """Fetch from `sources`, at addresses that `is_allowed` accepts.

        resolve: name resolution; None = the system's.
        tls: trusted certificates; None = the system's.
        """
        self._sources = sources
        self._limits = limits
        self._network = _CheckedNetwork(resolve or _SystemResolver(), is_allowed)
        self._tls = tls or ssl.create_default_context()
        self._places = FairTurns(limits.concurrent)
        self._own_places: WeakValueDictionary[str, asyncio.Semaphore] = WeakValueDictionary()
        """Places of each tenant while it fetches: half of all, so that others find some, too"""

    async def fetch(self, image: RemoteImage, count: Callable[[int], None]) -> bytes:
        """Return the bytes of an image; `count` is called with the size of each piece.

        Raises INVALID_ARGUMENT with the image's field, and UNAVAILABLE if others take all places
        for long. Raises what `count` raises.
        """
        async with self._place():
            try:
                async with asyncio.timeout(self._limits.seconds):
                    return await self._follow(image.url, count)
            except TimeoutError:
                why = f"did not answer within {self._limits.seconds:g} s"
            except (RemoteUrlError, _FetchError) as error:
                why = str(error)
        raise invalid(image.param, f"The URL in {image.param} {why}.")

    @asynccontextmanager
    async def _place(self) -> AsyncIterator[None]:
        """Wait for a place, and hold it during the context. Raises UNAVAILABLE after a while."""
        tenant, most = current_tenant.get(), self._limits.concurrent
        own = self._own_places.setdefault(
            tenant, asyncio.Semaphore(max(1, most // 2) if tenant else most)
        )
        async with AsyncExitStack() as places:
            try:
                async with asyncio.timeout(self._limits.seconds):
                    await places.enter_async_context(own)
                    await places.enter_async_context(self._places.turn(tenant))
            except TimeoutError:
                raise _busy() from None
            yield

    async def _follow(self, text: str, count: Callable[[int], None]) -> bytes:
        """Fetch a URL, and those that it redirects to; each is checked anew."""
        url = parse_remote_url(text)
        self._sources.require(url)
        for _ in range(self._limits.redirects + 1):
            answer = await self._get(url, count)
            if isinstance(answer, bytes):
                return answer
            try:
                url = url.join(answer.location)
                self._sources.require(url)
            except RemoteUrlError as error:
                raise _FetchError(f"redirects to a URL that {error}") from None
        raise _FetchError(f"redirects more than {self._limits.redirects} times")

    async def _get(self, url: RemoteUrl, count: Callable[[int], None]) -> "bytes | _Redirect":
        headers = [(b"Host", url.host_header.encode()), *_HEADERS]
        target = httpcore.URL(scheme=url.scheme, host=url.host, port=url.port, target=url.target)
        timeouts = {"timeout": {"connect": self._limits.seconds / 2}}
        try:
            # a connection for each request: the next one must check the addresses again
            async with (
                httpcore.AsyncConnectionPool(
                    self._tls, network_backend=self._network
                ) as connections,
                connections.stream("GET", target, headers=headers, extensions=timeouts) as response,
            ):
                return await self._read(response, count)
        except (httpcore.ConnectError, httpcore.ConnectTimeout) as error:
            _LOG.info("an image's host can't be reached: %s", error, extra={"host": url.host})
            raise _FetchError("has a host that can't be reached at public addresses") from None
        except (httpcore.NetworkError, httpcore.ProtocolError, OSError) as error:
            _LOG.info("an image's host answered wrongly: %s", error, extra={"host": url.host})
            raise _FetchError("has a host that sent no complete HTTP answer") from None

    async def _read(
        self, response: httpcore.Response, count: Callable[[int], None]
    ) -> "bytes | _Redirect":
        headers = {name.lower(): value.decode("latin-1") for name, value in response.headers}
        if response.status in _REDIRECTS and b"location" in headers:
            return _Redirect(headers[b"location"])
        if response.status != 200:
            raise _FetchError(f"was answered with status {response.status}")
        if headers.get(b"content-encoding", "identity").lower() != "identity":
            raise _FetchError("was answered with a content-encoding, which it must not have")
        length = headers.get(b"content-length", "")
        if length.isdecimal() and int(length) > self._limits.image_bytes:
            raise self._too_large()
        data = bytearray()
        async for piece in response.aiter_stream():
            if len(data) + len(piece) > self._limits.image_bytes:
                raise self._too_large()
            count(len(piece))
            data += piece
        if not data:
            raise _FetchError("was answered with an empty body")
        return bytes(data)

    def _too_large(self) -> _FetchError:
        limit = self._limits.image_bytes
        return _FetchError(f"has an image of more than {limit:,} bytes, the limit of an image")


async def fetch_remote(
    fetcher: ImageFetcher | None, images: RequestImages, hold: Callable[[int], None]
) -> None:
    """Fetch the images of a request that are URLs; without a fetcher, refuse them.

    hold: called with the bytes of all images of the request when they grow.
    Raises INVALID_ARGUMENT with the field of an image, UNAVAILABLE, and what `hold` raises.
    """
    remote = images.remote()
    if not remote:
        return
    if fetcher is None:
        param = remote[0][1].param
        raise invalid(
            param,
            f"{param} is the URL of another server, which this server does not fetch: send the "
            "image as a data URL, or start the server with --fetch-images.",
        )

    async def fetch(index: int, image: RemoteImage) -> None:
        def count(size: int) -> None:
            images.grow(size, image.param)
            hold(images.size)

        images.replace(index, await fetcher.fetch(image, count))

    tasks = [asyncio.ensure_future(fetch(index, image)) for index, image in remote]
    try:
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()


@dataclass(frozen=True, slots=True)
class _Redirect:
    location: str


class _CheckedNetwork(httpcore.AsyncNetworkBackend):
    """Connects to hosts all of whose addresses are allowed."""

    def __init__(self, resolve: Resolve, is_allowed: Callable[[str], bool]) -> None:
        self._resolve = resolve
        self._is_allowed = is_allowed
        self._network = httpcore.AnyIOBackend()

    async def connect_tcp(
        self,
        host: str,
        port: int,
        timeout: float | None = None,
        local_address: str | None = None,
        socket_options: Iterable[httpcore.SOCKET_OPTION] | None = None,
    ) -> httpcore.AsyncNetworkStream:
        """Connect to one of the host's addresses. Raises ConnectError and ConnectTimeout."""
        try:
            async with asyncio.timeout(timeout):
                addresses = await self._resolve(host, port)
                return await self._connect(addresses, port, timeout)
        except TimeoutError:
            raise httpcore.ConnectTimeout("the time is over") from None
        except (OSError, UnicodeError) as error:
            raise httpcore.ConnectError(f"the name can't be resolved: {error}") from None

    async def _connect(
        self, addresses: Sequence[str], port: int, timeout: float | None
    ) -> httpcore.AsyncNetworkStream:
        for address in addresses:
            if not self._is_allowed(address):
                raise httpcore.ConnectError(f"{address} is not a public address")
        tried = addresses[:_MAX_ADDRESSES]
        share = None if timeout is None else timeout / max(1, len(tried))
        failure: Exception = httpcore.ConnectError("the host has no address")
        for address in tried:
            try:
                return await self._network.connect_tcp(address, port, share)
            except (httpcore.ConnectError, httpcore.ConnectTimeout) as error:
                failure = error
        raise failure


class _SystemResolver:
    """Name resolution by the system, in its own threads: slow name servers block no others."""

    def __init__(self) -> None:
        self._threads = ThreadPoolExecutor(_RESOLVERS, "resolver")

    async def __call__(self, host: str, port: int) -> Sequence[str]:
        look_up = partial(socket.getaddrinfo, host, port, type=socket.SOCK_STREAM)
        loop = asyncio.get_running_loop()
        found = await loop.run_in_executor(self._threads, look_up)
        return [str(place[0]) for _, _, _, _, place in found]


def _busy() -> ServiceError:
    return ServiceError(
        grpc.StatusCode.UNAVAILABLE,
        "TOO_MANY_FETCHES",
        "The server fetches as many images as it can; try again.",
        retry_seconds=1,
    )
