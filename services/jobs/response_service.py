"""The gRPC servicer of ResponseService."""

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import suppress
from typing import Any

import grpc
import msgspec
from msgspec import Struct

from services.jobs.creator import admit
from services.jobs.pages import page_of
from services.jobs.responses.events import events_of
from services.jobs.responses.input_items import page_of_items
from services.jobs.responses.responses import Responses
from services.jobs.store.response_store import StoredResponse
from tokenwire.errors import invalid
from tokenwire.pb.jobs.v1 import jobs_pb2
from tokenwire.pb.jobs.v1.jobs_pb2_grpc import ResponseServiceServicer

__all__ = ["ResponseServicer", "stored_response"]

_STORED: Mapping[str, Any] = {
    "response_json": dict[str, msgspec.Raw],
    "input_json": list[dict[str, msgspec.Raw]],
    "context_json": list[dict[str, msgspec.Raw]],
}
"""Types of the JSON texts of a stored response"""

_MOST_BODY = 32 << 20
_MOST_SENT = 64 << 10
"""Bytes of the events of a message, so that other streams get a turn"""
Context = grpc.aio.ServicerContext[Any, Any]


class _Body(Struct):
    """The part of a body that says whether it is to run in the background."""

    background: bool | None = None


class ResponseServicer(ResponseServiceServicer):
    """The responses of all owners."""

    def __init__(self, responses: Responses, heartbeat_seconds: float) -> None:
        """heartbeat_seconds: longest silence of a stream of events."""
        self._responses = responses
        self._heartbeat_seconds = heartbeat_seconds

    async def PutResponse(
        self, request: jobs_pb2.PutResponseRequest, context: Context
    ) -> jobs_pb2.PutResponseResponse:
        owner = (await admit(request.context)).owner
        await asyncio.to_thread(_check_stored, request.response)
        kept = await self._responses.keep(stored_response(request.response, owner))
        return jobs_pb2.PutResponseResponse(kept=kept)

    async def GetResponse(
        self, request: jobs_pb2.GetResponseRequest, context: Context
    ) -> jobs_pb2.GetResponseResponse:
        owner = (await admit(request.context)).owner
        stored = await self._responses.get(request.response_id, owner)
        return jobs_pb2.GetResponseResponse(
            response_json=stored.response,
            is_running=stored.is_running,
            context_json=stored.context if request.with_context else b"",
        )

    async def DeleteResponse(
        self, request: jobs_pb2.DeleteResponseRequest, context: Context
    ) -> jobs_pb2.DeleteResponseResponse:
        owner = (await admit(request.context)).owner
        await self._responses.delete(request.response_id, owner)
        return jobs_pb2.DeleteResponseResponse()

    async def ListInputItems(
        self, request: jobs_pb2.ListInputItemsRequest, context: Context
    ) -> jobs_pb2.ListInputItemsResponse:
        owner = (await admit(request.context)).owner
        stored = await self._responses.get(request.response_id, owner)
        items, has_more = page_of_items(stored, page_of(request.page))
        messages = [
            jobs_pb2.InputItem(id=str(item["id"]), item_json=msgspec.json.encode(item))
            for item in items
        ]
        return jobs_pb2.ListInputItemsResponse(items=messages, has_more=has_more)

    async def StartResponse(
        self, request: jobs_pb2.StartResponseRequest, context: Context
    ) -> jobs_pb2.StartResponseResponse:
        creator = await admit(request.context)
        _check_body(request.body_json)
        keeps = request.keep_events
        started = await self._responses.start(request.body_json, creator, keep_events=keeps)
        return jobs_pb2.StartResponseResponse(
            response_id=started.id,
            response_json=started.json,
            model=started.model,
            ignored=started.ignored,
        )

    async def WatchResponse(
        self, request: jobs_pb2.WatchResponseRequest, context: Context
    ) -> AsyncIterator[jobs_pb2.WatchResponseResponse]:
        owner = (await admit(request.context)).owner
        log = await self._responses.events(request.response_id, owner)
        number = request.starting_after + 1 if request.HasField("starting_after") else 0
        if number > log.next:
            raise invalid("starting_after", f"There is no event {number - 1} yet.")
        log.read(number, 0)
        yield jobs_pb2.WatchResponseResponse()
        while not (log.has_ended and number >= log.next):
            with suppress(TimeoutError):
                async with asyncio.timeout(self._heartbeat_seconds):
                    await log.grown(number)
            answer = jobs_pb2.WatchResponseResponse()
            for encoded in log.read(number, _MOST_SENT):
                for event in events_of(encoded):
                    answer.events.add(number=number, type=event.type, event_json=event.json)
                number += 1
            yield answer

    async def CancelResponse(
        self, request: jobs_pb2.CancelResponseRequest, context: Context
    ) -> jobs_pb2.CancelResponseResponse:
        owner = (await admit(request.context)).owner
        ended = await self._responses.cancel(request.response_id, owner)
        return jobs_pb2.CancelResponseResponse(response_json=ended)


def stored_response(response: jobs_pb2.StoredResponse, owner: str) -> StoredResponse:
    """Return an owner's response as the store has it."""
    return StoredResponse(
        response.id,
        owner,
        response.response_json,
        response.input_json,
        response.context_json,
        is_running=response.is_running,
    )


def _check_stored(response: jobs_pb2.StoredResponse) -> None:
    """Raise INVALID_ARGUMENT for JSON of another form than a response and its items have."""
    for name, kind in _STORED.items():
        try:
            msgspec.json.decode(getattr(response, name), type=kind)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise invalid(f"response.{name}", f"response.{name}: {error}.") from None


def _check_body(body: bytes) -> None:
    """Raise INVALID_ARGUMENT for a body that can't run in the background."""
    if len(body) > _MOST_BODY:
        message = "body_json is too large for a response that can be kept."
        raise invalid("background", message)
    try:
        is_background = msgspec.json.decode(body, type=_Body).background
    except (msgspec.DecodeError, ValueError, RecursionError):
        raise invalid("body_json", "body_json must be a JSON object.") from None
    if not is_background:
        raise invalid("background", 'body_json must have "background": true.')
