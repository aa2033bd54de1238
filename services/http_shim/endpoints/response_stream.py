"""Server-sent events of a streamed response, as in OpenAI's Responses API."""

import time
from collections.abc import Awaitable, Callable, Iterable

from services.http_shim.backends.output_collector import OutputCollector
from services.http_shim.endpoints.chat_stream import ChatStream
from services.http_shim.formats.openai_responses.response_objects import (
    ItemEvents,
    ResponseObject,
    begin_output,
    cancel_response,
    end_response,
    fail_response,
    has_ended,
    is_cut,
)
from services.http_shim.http.exchange import Exchange
from tokenwire.errors import ServiceError
from tokenwire.pb.completion.v1 import completion_pb2
from tokenwire.pb.types.v1 import types_pb2

__all__ = ["CANCELLED", "ResponseStream"]

CANCELLED = "RESPONSE_CANCELLED"
"""Reason of the error that ends a cancelled response"""


class ResponseStream(ChatStream):
    """Events of a response, its items and their parts."""

    def __init__(
        self,
        collector: OutputCollector,
        response: ResponseObject,
        accepted: completion_pb2.Accepted,
        exchange: Exchange,
        keep: Callable[[ResponseObject], Awaitable[None]],
        items: ItemEvents,
    ) -> None:
        """`keep` stores the final response."""
        super().__init__(collector, accepted, exchange)
        self.response = response
        self._keep = keep
        self._items = items

    def _started(self) -> Iterable[bytes]:
        for kind in ("created", self.response.status):
            yield self._event(kind)

    def _output(self, delta: completion_pb2.ChoiceDelta) -> Iterable[bytes]:
        if begin_output(self.response):
            yield self._event("in_progress")
        yield from self._items.of(delta)

    def _closed(self, finished: completion_pb2.ChoiceFinished) -> Iterable[bytes]:
        return self._items.close(is_cut=is_cut(finished))

    def _completed(
        self, finished: completion_pb2.ChoiceFinished, usage: types_pb2.Usage
    ) -> Iterable[bytes]:
        end_response(self.response, self._items.items, finished, usage, int(time.time()))
        return ()

    def _failed(self, error: ServiceError) -> Iterable[bytes]:
        yield from self._items.close(is_cut=True)
        if error.reason == CANCELLED:
            cancel_response(self.response, self._items.items)
        else:
            fail_response(self.response, self._items.items, error)

    async def last(self) -> bytes:
        """Store the response; return the last events, which tell whether it is kept."""
        body = self.tail()
        if not has_ended(self.response):
            return body  # the client left
        await self._keep(self.response)
        return body + self._event(self.response.status)

    def _event(self, kind: str) -> bytes:
        return self._items.event(f"response.{kind}", response=self.response)
