"""Endpoints of kept responses: GET and DELETE /v1/responses/{id}, and what belongs to them."""

import hashlib
from typing import Any

import msgspec
from msgspec import Struct
from starlette.requests import Request
from starlette.responses import Response

from services.http_shim.http.body import json_response
from services.http_shim.http.exchange import exchange_of
from services.http_shim.stored.response_store import ResponseStore, StoredResponse
from tokenwire.errors import invalid

__all__ = ["DeletedResponse", "InputItemList", "StoredResponses"]

_MOST_ITEMS = 100


class DeletedResponse(Struct):
    """Answer of DELETE /v1/responses/{id}."""

    id: str
    object: str = "response"
    deleted: bool = True


class InputItemList(Struct):
    """Answer of GET /v1/responses/{id}/input_items."""

    data: list[dict[str, Any]]
    first_id: str | None
    last_id: str | None
    has_more: bool
    object: str = "list"


class StoredResponses:
    """The endpoints."""

    def __init__(self, store: ResponseStore) -> None:
        self._store = store

    async def get(self, request: Request) -> Response:
        """Return a response."""
        return Response(self._found(request).response, media_type="application/json")

    async def delete(self, request: Request) -> Response:
        """Drop a response."""
        identity = request.path_params["response_id"]
        self._store.delete(identity, exchange_of(request.scope).tenant)
        return json_response(DeletedResponse(identity))

    async def cancel(self, request: Request) -> Response:
        """Refuse: a response that is kept has ended."""
        self._found(request)
        raise invalid(
            "response_id",
            "Only a response in the background can be cancelled, and this one is not. To end a "
            "stream, close its connection.",
        )

    async def input_items(self, request: Request) -> Response:
        """List the items of a response's input: `limit`, `order` and `after` as in OpenAI's API."""
        stored = self._found(request)
        items = [
            {"id": _item_id(stored.id, index)} | item
            for index, item in enumerate(msgspec.json.decode(stored.input))
        ]
        query = request.query_params
        if (order := query.get("order", "desc")) not in ("asc", "desc"):
            raise invalid("order", "order must be asc or desc.")
        if order == "desc":
            items.reverse()
        if (after := query.get("after")) is not None:
            places = [index for index, item in enumerate(items) if item["id"] == after]
            if not places:
                raise invalid("after", "after is no id of an item of this response.")
            items = items[places[0] + 1 :]
        limit = _limit(query.get("limit", "20"))
        page = items[:limit]
        first, last = (page[0]["id"], page[-1]["id"]) if page else (None, None)
        return json_response(InputItemList(page, first, last, len(items) > limit))

    def _found(self, request: Request) -> StoredResponse:
        tenant = exchange_of(request.scope).tenant
        return self._store.get(request.path_params["response_id"], tenant)


def _item_id(response_id: str, index: int) -> str:
    digest = hashlib.blake2b(f"{response_id}:{index}".encode(), digest_size=16)
    return f"item_{digest.hexdigest()}"


def _limit(text: str) -> int:
    if not text.isascii() or not text.isdigit() or not 1 <= int(text[:4]) <= _MOST_ITEMS:
        raise invalid("limit", f"limit must be a whole number from 1 to {_MOST_ITEMS}.")
    return int(text[:4])
