"""Stream of an answer: the output of a request becomes the events of its dialect."""

import time
from collections.abc import Callable

from services.http_shim.backends.output_collector import OutputCollector
from services.http_shim.dialects.writer import EventWriter, generated_tokens
from services.http_shim.endpoints.sent_tokens import SentTokens
from services.http_shim.errors import http_status
from services.http_shim.http.exchange import Exchange

__all__ = ["EventStream"]

_MAX_DELTA_BYTES = 128 * 1024  # per call of `take`: a few milliseconds of work


class EventStream:
    """Converts the pending output of a request to the bytes of its events."""

    def __init__(
        self,
        output: OutputCollector,
        events: EventWriter,
        exchange: Exchange,
        name_of: Callable[[str], str],
    ) -> None:
        """name_of: returns the client's name of a field of the request."""
        assert output.accepted is not None
        self._output = output
        self._events = events
        self._exchange = exchange
        self._name_of = name_of
        self._sent = SentTokens(exchange)
        self._has_begun = False
        exchange.prompt_tokens = sum(len(prompt.ids) for prompt in output.accepted.prompts)

    @property
    def media_type(self) -> bytes:
        """Media type of the stream."""
        return self._events.media_type

    def ping(self) -> bytes:
        """Return what clients ignore."""
        return self._events.ping()

    @property
    def max_choice_tokens(self) -> int:
        """Tokens sent of the choice with the most."""
        return self._sent.most

    def take(self) -> bytes:
        """Return the events of pending output, with the deltas of each choice merged.

        Output above a limit waits for the next call, so that other streams get a turn.
        """
        events = [] if self._has_begun else [*self._events.begin()]
        self._has_begun = True
        pending, finished = self._output.take(_MAX_DELTA_BYTES)
        now, usage = time.monotonic(), self._output.usage
        for index in dict.fromkeys((*pending, *finished)):
            deltas, end = pending.get(index, []), finished.get(index)
            self._sent.count(index, generated_tokens(deltas), now)
            if end is not None:
                self._sent.end(index, end.completion_tokens)
            tokens = self._exchange.completion_tokens
            events.extend(self._events.output(index, deltas, end, tokens, usage))
        return b"".join(events)

    async def last(self) -> bytes:
        """Return the last events, after the end of the request."""
        error, usage = self._output.error, self._output.usage
        if error is not None:
            self._exchange.status = http_status(error.code)  # as if it had failed before the stream
            self._exchange.error = error
            if error.field:
                error.field = self._name_of(error.field)
            events = self._events.fail(error)
        elif usage is not None:
            events = self._events.complete(usage)
        else:
            return b""  # the client left
        return b"".join(events) + await self._events.end()
