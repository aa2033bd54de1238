"""Server-sent events of a streamed chat with one choice, in the form of one API."""

import time
from abc import ABC, abstractmethod
from collections.abc import Iterable

from services.http_shim.backends.output_collector import OutputCollector
from services.http_shim.endpoints.sent_tokens import SentTokens
from services.http_shim.errors import http_status
from services.http_shim.http.exchange import Exchange
from tokenwire.errors import ServiceError
from tokenwire.pb.completion.v1 import completion_pb2
from tokenwire.pb.types.v1 import types_pb2

__all__ = ["ChatStream"]

_MAX_DELTA_BYTES = 128 * 1024  # per call of `take`: a few milliseconds of work


class ChatStream(ABC):
    """Converts the pending output of a chat to the bytes of its events."""

    def __init__(
        self,
        collector: OutputCollector,
        accepted: completion_pb2.Accepted,
        exchange: Exchange,
    ) -> None:
        self._collector = collector
        self._exchange = exchange
        self._sent = SentTokens(exchange)
        self._finished: completion_pb2.ChoiceFinished | None = None
        self._has_started = False
        exchange.prompt_tokens = sum(len(prompt.ids) for prompt in accepted.prompts)

    @abstractmethod
    def _started(self) -> Iterable[bytes]:
        """Return the events before the output."""

    @abstractmethod
    def _output(self, delta: completion_pb2.ChoiceDelta) -> Iterable[bytes]:
        """Return the events of a delta."""

    @abstractmethod
    def _closed(self, finished: completion_pb2.ChoiceFinished) -> Iterable[bytes]:
        """Return the events after the last delta."""

    @abstractmethod
    def _completed(
        self, finished: completion_pb2.ChoiceFinished, usage: types_pb2.Usage
    ) -> Iterable[bytes]:
        """Return the last events."""

    @abstractmethod
    def _failed(self, error: ServiceError) -> Iterable[bytes]:
        """Return the last events of a request that failed."""

    @property
    def max_choice_tokens(self) -> int:
        return self._sent.most

    def take(self) -> bytes:
        pending, ended = self._collector.take(_MAX_DELTA_BYTES)
        now, deltas = time.monotonic(), pending.get(0, [])
        events = [] if self._has_started else [*self._started()]
        self._has_started = True
        self._sent.count(0, sum(len(delta.token_ids) for delta in deltas), now)
        for delta in deltas:
            events.extend(self._output(delta))
        if (finished := ended.get(0)) is not None:
            self._sent.end(0, finished.completion_tokens)
            self._finished = finished
            events.extend(self._closed(finished))
        return b"".join(events)

    async def last(self) -> bytes:
        """Return the last events, after the end of the request."""
        return self.tail()

    def tail(self) -> bytes:
        error, usage = self._collector.error, self._collector.usage
        if error is not None:
            self._exchange.status = http_status(error.code)  # as if it had failed before the stream
            self._exchange.error = error
            return b"".join(self._failed(error))
        if usage is None or self._finished is None:
            return b""  # the client left
        return b"".join(self._completed(self._finished, usage))
