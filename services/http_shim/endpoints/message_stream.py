"""Server-sent events of a streamed message, as in Anthropic's Messages API."""

import time
from collections.abc import Callable

from services.http_shim.backends.output_collector import OutputCollector
from services.http_shim.endpoints.sent_tokens import SentTokens
from services.http_shim.errors import http_status
from services.http_shim.formats.anthropic.message_responses import (
    BlockEvents,
    MessageUsage,
    event,
    message_error,
    message_usage,
    stop_of,
    whole_message,
)
from services.http_shim.http.exchange import Exchange
from tokenwire.pb.completion.v1 import completion_pb2

__all__ = ["MessageStream"]

_MAX_DELTA_BYTES = 128 * 1024  # per call of `take`: a few milliseconds of work


class MessageStream:
    """Converts the pending output of a chat to the bytes of its events."""

    def __init__(
        self,
        collector: OutputCollector[completion_pb2.ChatDelta],
        identity: str,
        accepted: completion_pb2.CompleteAccepted,
        exchange: Exchange,
        name_of: Callable[[str], str],
    ) -> None:
        """`name_of` gives the client's name of a field."""
        self._collector = collector
        self._exchange = exchange
        self._name_of = name_of
        self._sent = SentTokens(exchange)
        self._blocks = BlockEvents()
        exchange.prompt_tokens = sum(len(prompt.ids) for prompt in accepted.prompts)
        usage = MessageUsage(exchange.prompt_tokens, 0)
        empty = whole_message(identity, accepted.model, [], None, usage)
        self._start = event("message_start", message=empty)
        """The first event, until it is sent"""
        self._finished: completion_pb2.ChoiceFinished | None = None

    @property
    def max_choice_tokens(self) -> int:
        return self._sent.most

    def take(self) -> bytes:
        pending, ended = self._collector.take(_MAX_DELTA_BYTES)
        now, deltas = time.monotonic(), pending.get(0, [])
        events, self._start = [self._start], b""
        self._sent.count(0, sum(len(delta.token_ids) for delta in deltas), now)
        for delta in deltas:
            events.extend(self._blocks.of(delta))
        if (finished := ended.get(0)) is not None:
            self._sent.end(0, finished.completion_tokens)
            self._finished = finished
            events.extend(self._blocks.close())
        return b"".join(events)

    def tail(self) -> bytes:
        exchange, error = self._exchange, self._collector.error
        if error is not None:
            exchange.status = http_status(error.code)  # as if it had failed before the stream
            exchange.note_failure(error.reason, error.message)
            error.field = self._name_of(error.field) if error.field else ""
            return b"event: error\ndata: %b\n\n" % message_error(error, exchange.request_id)
        usage, finished = self._collector.usage, self._finished
        if usage is None or finished is None:
            return b""  # the client left
        reason, sequence = stop_of(finished, has_calls=self._blocks.has_calls)
        delta = {"stop_reason": reason, "stop_sequence": sequence}
        last = event("message_delta", delta=delta, usage=message_usage(usage))
        return last + event("message_stop")
