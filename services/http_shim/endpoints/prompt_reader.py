"""Reading of requests with a prompt: the body, then the documents that it names."""

from collections.abc import Awaitable, Callable
from typing import TypeAlias

from starlette.types import Receive, Scope

from services.http_shim.dialects.fields import JsonObject
from services.http_shim.dialects.reading import Read, Reading
from services.http_shim.endpoints.documents import Documents
from services.http_shim.http.body import BodyReader, HeldBytes
from services.http_shim.http.exchange import Exchange, exchange_of
from services.http_shim.images.image_fetcher import ImageFetcher, fetch_remote

__all__ = ["Prepare", "PromptReader", "always"]

Prepare: TypeAlias = Callable[[JsonObject, Exchange], Awaitable[Read]]
"""Waits for what the reading of a body needs besides it"""


class PromptReader:
    """Reads the prompts of all endpoints that have some."""

    def __init__(
        self, bodies: BodyReader, documents: Documents, fetcher: ImageFetcher | None
    ) -> None:
        """fetcher: of images at URLs; None = they are refused."""
        self.bodies = bodies
        self._documents = documents
        self._fetcher = fetcher

    async def read(
        self, scope: Scope, receive: Receive, held: HeldBytes, prepare: Prepare
    ) -> Reading:
        """Return what a body and its documents say; note for the header what is ignored.

        held: counts the bytes of the body, then those of its images.
        """
        exchange = exchange_of(scope)
        reading = await self.bodies.read_with_images(
            scope, receive, held, lambda fields: prepare(fields, exchange)
        )
        exchange.ignored = reading.ignored
        size = reading.images.size
        await self._documents.read(reading.documents, exchange, held, size)
        return reading

    async def fetch_images(self, reading: Reading, held: HeldBytes) -> None:
        """Fetch the images that are URLs. Raises INVALID_ARGUMENT and UNAVAILABLE."""
        await fetch_remote(self._fetcher, reading.images, held.resize)


def always(read: Read) -> Prepare:
    """Return what prepares a reading that needs nothing besides the body."""

    async def prepare(_: JsonObject, __: Exchange) -> Read:
        return read

    return prepare
