"""Endpoints of kept responses: GET and DELETE /v1/responses/{id}, and what belongs to them."""

from collections.abc import AsyncGenerator, Sequence

import msgspec
from msgspec import Struct
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from services.http_shim.endpoints.background_responses import send_events, started_events
from services.http_shim.endpoints.paging import page_of
from services.http_shim.http.body import json_response
from services.http_shim.http.exchange import exchange_of
from services.http_shim.http.gate import Gate
from services.http_shim.jobs.jobs import context_of
from services.http_shim.jobs.jobs_client import JobsClient
from tokenwire.errors import ServiceError, invalid
from tokenwire.pb.jobs.v1 import jobs_pb2

__all__ = ["DeletedResponse", "InputItemList", "StoredResponses"]

_MOST_DIGITS = 18


class DeletedResponse(Struct):
    """Answer of DELETE /v1/responses/{id}."""

    id: str
    object: str = "response"
    deleted: bool = True


class InputItemList(Struct):
    """Answer of GET /v1/responses/{id}/input_items."""

    data: list[msgspec.Raw]
    first_id: str | None
    last_id: str | None
    has_more: bool
    object: str = "list"


class StoredResponses:
    """The endpoints."""

    def __init__(self, jobs: JobsClient, gate: Gate, stall_seconds: float) -> None:
        self._jobs = jobs
        self._gate = gate
        self._stall_seconds = stall_seconds

    async def get(self, request: Request) -> Response:
        """Return a response, or with `stream=true` its events after number `starting_after`."""
        query = request.query_params
        identity, context = _place(request)
        if query.get("stream", "false").lower() not in ("true", "1"):
            if "starting_after" in query:
                raise invalid("starting_after", "starting_after needs stream=true.")
            asked = jobs_pb2.GetResponseRequest(context=context, response_id=identity)
            return _json((await self._jobs.find(asked)).response_json)
        watched = jobs_pb2.WatchResponseRequest(context=context, response_id=identity)
        if (number := _number(query.get("starting_after", "-1"))) >= 0:
            watched.starting_after = number
        try:
            events = await started_events(self._jobs, watched)
        except ServiceError as error:
            if error.reason == "NO_EVENTS":
                raise invalid("stream", error.message) from None
            raise
        return _Stream(events, self._gate, self._stall_seconds)

    async def delete(self, request: Request) -> Response:
        """Drop a response; one that runs is cancelled."""
        identity, context = _place(request)
        asked = jobs_pb2.DeleteResponseRequest(context=context, response_id=identity)
        await self._jobs.delete_response(asked)
        return json_response(DeletedResponse(identity))

    async def cancel(self, request: Request) -> Response:
        """End a response in the background with the output that it has."""
        identity, context = _place(request)
        asked = jobs_pb2.CancelResponseRequest(context=context, response_id=identity)
        return _json(await self._jobs.cancel_response(asked))

    async def input_items(self, request: Request) -> Response:
        """List the items of a response's input: `limit`, `order` and `after` as in OpenAI's API."""
        identity, context = _place(request)
        page = page_of(request.query_params)
        answer = await self._jobs.input_items(
            jobs_pb2.ListInputItemsRequest(context=context, response_id=identity, page=page)
        )
        items = [msgspec.Raw(item.item_json) for item in answer.items]
        first, last = (answer.items[0].id, answer.items[-1].id) if items else (None, None)
        return json_response(InputItemList(items, first, last, answer.has_more))


class _Stream(Response):
    """Events of a response."""

    def __init__(
        self,
        events: AsyncGenerator[Sequence[jobs_pb2.ResponseEvent], None],
        gate: Gate,
        stall_seconds: float,
    ) -> None:
        super().__init__()
        self._gate = gate
        self._events = events
        self._stall_seconds = stall_seconds

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await send_events(receive, send, self._events, self._gate, self._stall_seconds)


def _place(request: Request) -> tuple[str, jobs_pb2.RequestContext]:
    """Return the id of the requested response, and on whose behalf it is asked for."""
    return request.path_params["response_id"], context_of(exchange_of(request.scope))


def _json(encoded: bytes) -> Response:
    return Response(encoded, media_type="application/json")


def _number(text: str) -> int:
    try:
        return max(int(text[:_MOST_DIGITS]), -1)
    except ValueError:
        message = "starting_after must be the number of an event."
        raise invalid("starting_after", message) from None
