"""Server-sent events of a streamed completion or chat."""

import time
from collections.abc import Callable, Sequence

from msgspec import UNSET, UnsetType

from services.http_shim.backends.output_collector import OutputCollector
from services.http_shim.endpoints.sent_tokens import SentTokens
from services.http_shim.errors import error_body, http_status
from services.http_shim.formats.request_bodies import StreamOptions
from services.http_shim.formats.responses import (
    ChoiceFormatter,
    Envelope,
    Usage,
    running_usage,
    usage_of,
)
from services.http_shim.http.exchange import Exchange
from tokenwire.pb.completion.v1 import completion_pb2

__all__ = ["EventStream"]

_MAX_DELTA_BYTES = 128 * 1024  # per call of `take`: a few milliseconds of work


class EventStream:
    """Converts the pending output of a request to the bytes of its events."""

    def __init__(
        self,
        collector: OutputCollector,
        formatter: ChoiceFormatter,
        options: StreamOptions | None,
        envelope: Envelope,
        exchange: Exchange,
        name_of: Callable[[str], str],
    ) -> None:
        """`name_of` converts the service's name of a field to the client's."""
        assert collector.accepted is not None
        self._running = collector
        self._prompts = collector.accepted.prompts
        self._formatter = formatter
        self._envelope = envelope
        self._exchange = exchange
        self._name_of = name_of
        self._sent = SentTokens(exchange)
        self._unfinished = len(self._prompts) * formatter.choices_per_prompt
        self._held_finish: completion_pb2.ChoiceFinished | None = None
        self._begun: set[int] = set()  # choices with at least one chunk
        self._usage_on_finish = options is None
        self._usage_at_end = options is not None and bool(options.include_usage)
        self._usage_always = options is not None and bool(options.continuous_usage_stats)
        exchange.prompt_tokens = sum(len(prompt.ids) for prompt in self._prompts)

    @property
    def max_choice_tokens(self) -> int:
        """Tokens sent of the choice with the most."""
        return self._sent.most

    def take(self) -> bytes:
        """Return the events of pending output, with the deltas of each choice merged.

        Output above a limit waits for the next call, so that other streams get a turn.
        """
        collector, now = self._running, time.monotonic()
        pending, ended = collector.take(_MAX_DELTA_BYTES)
        finished = self._hold_last_finish(ended)
        events = []
        for index, deltas in pending.items():
            opening = self._usage()
            self._sent.count(index, self._formatter.tokens_in(deltas), now)
            if index not in finished:
                events.append(self._event(index, deltas, None, opening, self._usage()))
        has_usage = self._usage_on_finish and collector.usage is not None and not self._unfinished
        carrier = next(reversed(finished), None) if has_usage else None
        for index, end in finished.items():
            opening = self._usage()
            self._sent.end(index, end.completion_tokens)
            usage = self._final_usage() if index == carrier else self._usage()
            events.append(self._event(index, pending.get(index, []), end, opening, usage))
        return b"".join(events)

    async def last(self) -> bytes:
        """Return the last events, after the end of the request."""
        return self.tail()

    def tail(self) -> bytes:
        """Return the last events, after the end of the request."""
        if (error := self._running.error) is not None:
            self._exchange.status = http_status(error.code)  # as if it had failed before the stream
            self._exchange.error = error
            if error.field:
                error.field = self._name_of(error.field)
            return b"data: %b\n\n" % error_body(error)
        if self._running.usage is None:
            return b""  # the client left
        usage = self._envelope.chunk(None, self._final_usage()) if self._usage_at_end else b""
        return usage + b"data: [DONE]\n\n"

    def _hold_last_finish(
        self, finished: dict[int, completion_pb2.ChoiceFinished]
    ) -> dict[int, completion_pb2.ChoiceFinished]:
        """Hold back the finish of the last choice until its chunk can carry the usage."""
        self._unfinished -= len(finished)
        if not self._usage_on_finish or self._unfinished:
            return finished
        if self._running.usage is None:
            if finished:
                self._held_finish = finished.popitem()[1]
        elif self._held_finish is not None:
            finished[self._held_finish.index] = self._held_finish
            self._held_finish = None
        return finished

    def _event(
        self,
        index: int,
        deltas: Sequence[completion_pb2.ChoiceDelta],
        end: completion_pb2.ChoiceFinished | None,
        opening: Usage | UnsetType | None,
        usage: Usage | UnsetType | None,
    ) -> bytes:
        """Return the chunks of a choice.

        The last chunk carries `usage`; before it, the first chunk of a message carries `opening`.
        """
        is_first = index not in self._begun
        prompt = self._prompts[index // self._formatter.choices_per_prompt] if is_first else None
        chunks = self._formatter.chunks(index, deltas, end, prompt)
        if not chunks:
            return b""
        self._begun.add(index)
        usages = [self._usage()] * (len(chunks) - 1) + [usage]
        if is_first and len(chunks) > 1:
            usages[0] = opening
        return b"".join(map(self._envelope.chunk, chunks, usages))

    def _usage(self) -> Usage | UnsetType | None:
        """Return the usage in a chunk before the last one; UNSET = no field."""
        if self._usage_always:
            return running_usage(self._exchange.prompt_tokens, self._exchange.completion_tokens)
        return None if self._usage_at_end else UNSET

    def _final_usage(self) -> Usage | None:
        usage = self._running.usage
        return None if usage is None else usage_of(usage)
