"""Keeping of responses: they are stored at their end, and later ones continue them."""

import asyncio
import logging

import grpc
import msgspec

from services.http_shim.dialects.fields import JsonObject
from services.http_shim.dialects.responses.read import NO_ITEMS
from services.http_shim.dialects.responses.write import KeptResponse, fail_response
from services.http_shim.stored.database_guard import StoreUnavailableError
from services.http_shim.stored.response_store import ResponseStore, StoredResponse
from tokenwire.errors import ServiceError, invalid

__all__ = ["ResponseKeeper"]

_LOG = logging.getLogger("responses")
_PAUSES = (0.5, 1.0, 2.0, 4.0, 8.0, 15.0)
"""Seconds between two attempts to keep the end of a response in the background"""


class ResponseKeeper:
    """Keeps responses in a store, each for its owner.

    An owner is an API key, or a tenant on a server without keys.
    """

    def __init__(self, store: ResponseStore) -> None:
        self._store = store

    async def context(self, fields: JsonObject, owner: str) -> bytes:
        """Return the JSON array of the items that a body continues.

        Raises NOT_FOUND for a response that is not kept, INVALID_ARGUMENT for one that still runs.
        """
        previous = fields.get("previous_response_id")
        if not isinstance(previous, str):
            return NO_ITEMS  # the types refuse a wrong one
        try:
            stored = await self._store.thread.run(self._store.get, previous, owner)
        except ServiceError as error:
            error.field = "previous_response_id"
            raise
        if stored.is_running:
            message = f"The response {previous!r} is not complete; wait for its end."
            raise invalid("previous_response_id", message)
        return stored.context

    async def keep(self, kept: KeptResponse, owner: str) -> None:
        """Keep a response, which says whether it is kept."""
        try:
            kept.response.store = await self._put(kept, owner)
        except StoreUnavailableError:  # the answer itself is complete
            kept.response.store = False

    async def keep_running(self, kept: KeptResponse, owner: str) -> None:
        """Keep a response that begins to run in the background.

        Raises INVALID_ARGUMENT if it is too large, and UNAVAILABLE if the store fails.
        """
        if not await self._put(kept, owner, is_running=True):
            raise invalid(
                "background",
                "background needs a response that can be kept, and this one can't: its context "
                "is too large.",
            )

    async def keep_background(self, kept: KeptResponse, owner: str) -> None:
        """Keep the end of a response in the background, or its failure if it is too large."""
        if not await self._put_patiently(kept, owner):
            code, message = grpc.StatusCode.INTERNAL, "The response is too large to be kept."
            kept.response.output = []
            fail_response(kept.response, ServiceError(code, "NOT_KEPT", message))
            await self._put_patiently(kept, owner)

    async def _put_patiently(self, kept: KeptResponse, owner: str) -> bool:
        """Keep a response, which can be read only later; return false if it is too large.

        A store that can't be used may soon be usable again.
        """
        for pause in _PAUSES:
            try:
                return await self._put(kept, owner)
            except StoreUnavailableError:
                await asyncio.sleep(pause)
        identity = kept.response.id
        _LOG.error("the response %s in the background is lost: it could not be kept", identity)
        return True

    async def _put(self, kept: KeptResponse, owner: str, *, is_running: bool = False) -> bool:
        response = kept.response
        encoded = msgspec.json.encode(response)
        stored = StoredResponse(
            response.id, owner, encoded, kept.input, kept.conversation, is_running=is_running
        )
        return await self._store.thread.run(self._store.put, stored)
