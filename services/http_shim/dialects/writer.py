"""Writing of answers: what each dialect makes of the output of a request."""

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from typing import ClassVar

from services.http_shim.backends.output_collector import OutputCollector
from tokenwire.errors import ServiceError
from tokenwire.pb.completion.v1 import completion_pb2
from tokenwire.pb.types.v1 import types_pb2

__all__ = ["EVENT_STREAM", "PING", "EventWriter", "Writer", "generated_tokens"]

EVENT_STREAM = b"text/event-stream; charset=utf-8"
"""Media type of server-sent events"""
PING = b": ping\n\n"
"""A comment among server-sent events, which clients ignore"""


class EventWriter(ABC):
    """Writer of the events of one answer: server-sent events, unless it says otherwise."""

    media_type: ClassVar[bytes] = EVENT_STREAM

    def begin(self) -> Iterable[bytes]:
        """Return the events before the output."""
        return ()

    @abstractmethod
    def output(
        self,
        index: int,
        deltas: Sequence[completion_pb2.ChoiceDelta],
        finished: completion_pb2.ChoiceFinished | None,
        tokens: int,
        usage: types_pb2.Usage | None,
    ) -> Iterable[bytes]:
        """Return the events of a choice's deltas, and of its end if it ended.

        tokens: generated tokens of all choices so far, with these. usage: of the whole answer, if
        it is complete.
        """

    @abstractmethod
    def complete(self, usage: types_pb2.Usage) -> Iterable[bytes]:
        """Return the events after the output of all choices."""

    @abstractmethod
    def fail(self, error: ServiceError) -> Iterable[bytes]:
        """Return the events of a failure, whose field has the client's name."""

    def ping(self) -> bytes:
        """Return what clients ignore, for a stream that has long been silent."""
        return PING

    def progress(self, text: str) -> bytes:
        """Return what clients ignore and people may read: what the load of the model does."""
        return f": {text}\n\n".encode()

    async def end(self) -> bytes:
        """Return the events after completion or failure."""
        return b""


class Writer(ABC):
    """Writer of the answer to one request."""

    @abstractmethod
    def events(self, accepted: completion_pb2.Accepted, request_id: str) -> EventWriter:
        """Return the writer of a streamed answer."""

    @abstractmethod
    def whole(self, output: OutputCollector) -> bytes:
        """Return the JSON of a complete answer."""

    async def answer(self, output: OutputCollector, *, is_large: bool) -> bytes:
        """Return the JSON of a complete answer; a large one is put together in a thread."""
        if is_large:
            return await asyncio.to_thread(self.whole, output)
        return self.whole(output)


def generated_tokens(deltas: Sequence[completion_pb2.ChoiceDelta]) -> int:
    """Return the number of generated tokens; an echo of the prompt has none."""
    count = 0
    for delta in deltas:
        if not delta.is_prompt:
            count += len(delta.token_ids)
    return count
