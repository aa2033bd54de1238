"""Server-sent events of a streamed response, as in OpenAI's Responses API."""

import time
from collections.abc import Callable, Iterable

from services.http_shim.backends.output_collector import OutputCollector
from services.http_shim.endpoints.chat_stream import ChatStream
from services.http_shim.formats.openai_responses.response_objects import (
    ItemEvents,
    ResponseObject,
    end_response,
    fail_response,
    is_cut,
)
from services.http_shim.http.exchange import Exchange
from tokenwire.errors import ServiceError
from tokenwire.pb.completion.v1 import completion_pb2
from tokenwire.pb.types.v1 import types_pb2

__all__ = ["ResponseStream"]


class ResponseStream(ChatStream):
    """Events of a response, its items and their parts."""

    def __init__(
        self,
        collector: OutputCollector[completion_pb2.ChatDelta],
        response: ResponseObject,
        accepted: completion_pb2.CompleteAccepted,
        exchange: Exchange,
        keep: Callable[[ResponseObject], None],
        *,
        has_logprobs: bool,
    ) -> None:
        """`keep` stores the final response."""
        super().__init__(collector, accepted, exchange)
        self._response = response
        self._keep = keep
        self._items = ItemEvents(has_logprobs=has_logprobs)

    def _started(self) -> Iterable[bytes]:
        for kind in ("response.created", "response.in_progress"):
            yield self._items.event(kind, response=self._response)

    def _output(self, delta: completion_pb2.ChatDelta) -> Iterable[bytes]:
        return self._items.of(delta)

    def _closed(self, finished: completion_pb2.ChoiceFinished) -> Iterable[bytes]:
        return self._items.close(is_cut=is_cut(finished))

    def _completed(
        self, finished: completion_pb2.ChoiceFinished, usage: types_pb2.Usage
    ) -> Iterable[bytes]:
        end_response(self._response, self._items.items, finished, usage, int(time.time()))
        return [self._end()]

    def _failed(self, error: ServiceError) -> Iterable[bytes]:
        yield from self._items.close(is_cut=True)
        fail_response(self._response, self._items.items, error)
        yield self._end()

    def _end(self) -> bytes:
        self._keep(self._response)
        return self._items.event(f"response.{self._response.status}", response=self._response)
