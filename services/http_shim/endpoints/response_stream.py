"""Server-sent events of a streamed response, as in OpenAI's Responses API."""

import time
from collections.abc import Callable

from services.http_shim.backends.output_collector import OutputCollector
from services.http_shim.endpoints.sent_tokens import SentTokens
from services.http_shim.errors import http_status
from services.http_shim.formats.openai_responses.response_objects import (
    ItemEvents,
    ResponseObject,
    end_response,
    fail_response,
)
from services.http_shim.http.exchange import Exchange
from tokenwire.pb.completion.v1 import completion_pb2
from tokenwire.pb.types.v1 import types_pb2

__all__ = ["ResponseStream"]

_MAX_DELTA_BYTES = 128 * 1024  # per call of `take`: a few milliseconds of work


class ResponseStream:
    """Converts the pending output of a chat to the bytes of its events."""

    def __init__(
        self,
        collector: OutputCollector[completion_pb2.ChatDelta],
        response: ResponseObject,
        exchange: Exchange,
        keep: Callable[[ResponseObject], None],
        *,
        has_logprobs: bool,
    ) -> None:
        """`keep` stores the final response."""
        assert collector.accepted is not None
        self._collector = collector
        self._response = response
        self._exchange = exchange
        self._keep = keep
        self._sent = SentTokens(exchange)
        self._items = ItemEvents(has_logprobs=has_logprobs)
        exchange.prompt_tokens = sum(len(prompt.ids) for prompt in collector.accepted.prompts)
        self._start = [
            self._items.event("response.created", response=response),
            self._items.event("response.in_progress", response=response),
        ]
        """The first events, until they are sent"""
        self._finished: completion_pb2.ChoiceFinished | None = None

    @property
    def max_choice_tokens(self) -> int:
        return self._sent.most

    def take(self) -> bytes:
        pending, ended = self._collector.take(_MAX_DELTA_BYTES)
        now, deltas = time.monotonic(), pending.get(0, [])
        events, self._start = self._start, []
        self._sent.count(0, sum(len(delta.token_ids) for delta in deltas), now)
        for delta in deltas:
            events.extend(self._items.of(delta))
        if (finished := ended.get(0)) is not None:
            self._sent.end(0, finished.completion_tokens)
            self._finished = finished
            is_cut = finished.reason == types_pb2.FINISH_REASON_LENGTH
            events.extend(self._items.close(is_cut=is_cut))
        return b"".join(events)

    def tail(self) -> bytes:
        exchange, error, response = self._exchange, self._collector.error, self._response
        if error is not None:
            exchange.status = http_status(error.code)  # as if it had failed before the stream
            exchange.note_failure(error.reason, error.message)
            fail_response(response, self._items.items, error)
        elif (usage := self._collector.usage) is not None and self._finished is not None:
            end_response(response, self._items.items, self._finished, usage, int(time.time()))
        else:
            return b""  # the client left
        self._keep(response)
        return self._items.event(f"response.{response.status}", response=response)
