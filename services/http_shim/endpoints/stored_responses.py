"""Endpoints of kept responses: GET and DELETE /v1/responses/{id}, and what belongs to them."""

import hashlib
from typing import Any

import msgspec
from msgspec import Struct
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from services.http_shim.endpoints.background_responses import BackgroundResponses, send_log
from services.http_shim.endpoints.paging import page_of
from services.http_shim.http.body import json_response
from services.http_shim.http.exchange import exchange_of
from services.http_shim.stored.event_log import EventLog
from services.http_shim.stored.response_store import ResponseStore, StoredResponse
from tokenwire.errors import invalid

__all__ = ["DeletedResponse", "InputItemList", "StoredResponses"]

_MOST_DIGITS = 18


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

    def __init__(self, store: ResponseStore, background: BackgroundResponses) -> None:
        self._store = store
        self._background = background

    async def get(self, request: Request) -> Response:
        """Return a response, or with `stream=true` its events after number `starting_after`."""
        query = request.query_params
        if query.get("stream", "false").lower() not in ("true", "1"):
            if "starting_after" in query:
                raise invalid("starting_after", "starting_after needs stream=true.")
            return Response(await self._json(request), media_type="application/json")
        await self._json(request)
        identity, owner = _place(request)
        log = self._background.logs.find(identity, owner)
        if log is None:
            raise invalid(
                "stream",
                "The events of this response are not kept: only those of a response with "
                "background and stream are, for a time.",
            )
        first = _number(query.get("starting_after", "-1")) + 1
        if first > log.next:
            raise invalid("starting_after", f"There is no event {first - 1} yet.")
        log.read(first, 0)
        return _Stream(log, first, self._background.stall_seconds)

    async def delete(self, request: Request) -> Response:
        """Drop a response; one that runs is cancelled."""
        identity, owner = _place(request)
        if (running := self._background.find(identity, owner)) is not None:
            running.cancel()
            await running.ended.wait()
        await self._store.thread.run(self._store.delete, identity, owner)
        self._background.logs.delete(identity)
        return json_response(DeletedResponse(identity))

    async def cancel(self, request: Request) -> Response:
        """End a response in the background with the output that it has."""
        if (running := self._background.find(*_place(request))) is not None:
            running.cancel()
            await running.ended.wait()
            return json_response(running.response)
        found = (await self._found(request)).response
        if not msgspec.json.decode(found)["background"]:
            raise invalid(
                "response_id",
                "Only a response in the background can be cancelled, and this one is not. To end "
                "a stream, close its connection.",
            )
        return Response(found, media_type="application/json")

    async def input_items(self, request: Request) -> Response:
        """List the items of a response's input: `limit`, `order` and `after` as in OpenAI's API."""
        stored = await self._found(request)
        items = [
            {"id": _item_id(stored.id, index)} | item
            for index, item in enumerate(msgspec.json.decode(stored.input))
        ]
        asked = page_of(request.query_params)
        if not asked.is_ascending:
            items.reverse()
        if asked.after is not None:
            places = [index for index, item in enumerate(items) if item["id"] == asked.after]
            if not places:
                raise invalid("after", "after is no id of an item of this response.")
            items = items[places[0] + 1 :]
        page = items[: asked.limit]
        first, last = (page[0]["id"], page[-1]["id"]) if page else (None, None)
        return json_response(InputItemList(page, first, last, len(items) > asked.limit))

    async def _found(self, request: Request) -> StoredResponse:
        return await self._store.thread.run(self._store.get, *_place(request))

    async def _json(self, request: Request) -> bytes:
        """Return a response as it is now. Raises NOT_FOUND."""
        if (running := self._background.find(*_place(request))) is not None:
            return msgspec.json.encode(running.response)
        return (await self._found(request)).response


class _Stream(Response):
    """Events of a response from a number on."""

    def __init__(self, log: EventLog, number: int, stall_seconds: float) -> None:
        super().__init__()
        self._log = log
        self._number = number
        self._stall_seconds = stall_seconds

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await send_log(receive, send, self._log, self._number, self._stall_seconds)


def _place(request: Request) -> tuple[str, str]:
    """Return the id of the requested response, and the owner that asks."""
    return request.path_params["response_id"], exchange_of(request.scope).owner


def _number(text: str) -> int:
    try:
        return max(int(text[:_MOST_DIGITS]), -1)
    except ValueError:
        message = "starting_after must be the number of an event."
        raise invalid("starting_after", message) from None


def _item_id(response_id: str, index: int) -> str:
    digest = hashlib.blake2b(f"{response_id}:{index}".encode(), digest_size=16)
    return f"item_{digest.hexdigest()}"
