"""Output of a request that arrived and is not yet sent to the client."""

import asyncio
from typing import TypeAlias

from services.http_shim.backends.received_output import ReceivedOutput
from services.http_shim.errors import ClientGoneError
from tokenwire.errors import ServiceError
from tokenwire.pb.completion.v1 import completion_pb2
from tokenwire.pb.types.v1 import types_pb2

__all__ = ["OutputCollector"]

Deltas: TypeAlias = dict[int, list[completion_pb2.ChoiceDelta]]
"""Deltas by choice, in order"""


class OutputCollector:
    """Collects the events of one request, synchronously, for the task that answers it.

    Deltas of a choice gather in `pending` until the task takes them, and are merged then.
    `changed` is set by every event, `ended` by the last one: completion, failure, or `abandon`.
    """

    __slots__ = (
        "accepted",
        "changed",
        "ended",
        "error",
        "finished",
        "gone",
        "pending",
        "prompt_logprobs",
        "received",
        "usage",
    )

    def __init__(self) -> None:
        self.changed = asyncio.Event()
        self.ended = asyncio.Event()
        self.accepted: completion_pb2.Accepted | None = None
        self.pending: Deltas = {}
        self.finished: dict[int, completion_pb2.ChoiceFinished] = {}
        self.prompt_logprobs: dict[int, list[completion_pb2.PromptLogprobs]] = {}
        self.usage: types_pb2.Usage | None = None
        self.received = ReceivedOutput()
        """All output, also what was taken"""
        self.error: ServiceError | None = None
        self.gone = False

    def on_event(self, event: completion_pb2.SessionEvent) -> None:
        """Collect an event of the Session."""
        response = event.response
        match response.WhichOneof("event"):
            case "delta":
                delta = response.delta
                if delta.index in self.received.ended:
                    return
                ids = self.received.ids[delta.index]  # an echo alone is noted, too
                if not delta.is_prompt:
                    ids.extend(delta.token_ids)
                self.pending.setdefault(delta.index, []).append(delta)
            case "finished":
                finished = response.finished
                if finished.index in self.received.ended:
                    return
                self.received.ended[finished.index] = finished.completion_tokens
                self.finished[finished.index] = finished
            case "prompt_logprobs":
                run = response.prompt_logprobs
                self.received.scored[run.prompt] += len(run.tokens.ids)
                self.prompt_logprobs.setdefault(run.prompt, []).append(run)
            case "accepted":
                if self.accepted is not None:  # a lost request was resumed
                    return
                self.accepted = response.accepted
            case "completed":
                self.usage = response.completed.usage
                self.ended.set()
            case _:
                return
        self.changed.set()

    def on_error(self, error: ServiceError) -> None:
        """End the request with an error."""
        self.error = error
        self.ended.set()
        self.changed.set()

    async def admitted(self) -> completion_pb2.Accepted:
        """Wait until the request is admitted.

        Raises ServiceError if it is refused, ClientGoneError if the client leaves first.
        """
        while self.accepted is None and not self.ended.is_set():
            await self.changed.wait()
            self.changed.clear()
        self.changed.set()  # events that arrived with the admission are still pending
        self._raise_failure()
        assert self.accepted is not None
        return self.accepted

    async def completed(self) -> types_pb2.Usage:
        """Wait for the end and return the usage. Raises ServiceError and ClientGoneError."""
        await self.ended.wait()
        self._raise_failure()
        assert self.usage is not None
        return self.usage

    async def last_usage(self) -> types_pb2.Usage | None:
        """Wait for the end of an aborted request; return its usage, None if it failed."""
        while self.is_open():
            self.changed.clear()
            await self.changed.wait()
        return self.usage

    def take(
        self, max_bytes: int
    ) -> tuple[
        dict[int, list[completion_pb2.ChoiceDelta]], dict[int, completion_pb2.ChoiceFinished]
    ]:
        """Remove and return the pending deltas by choice, and the ends of their choices.

        The first choices that together reach `max_bytes` are taken; the others stay pending.
        """
        taken: Deltas = {}
        size = 0
        while self.pending and size < max_bytes:
            index = next(iter(self.pending))
            taken[index] = deltas = self.pending.pop(index)
            size += sum(delta.ByteSize() for delta in deltas)
        ended = [index for index in self.finished if index not in self.pending]
        return taken, {index: self.finished.pop(index) for index in ended}

    def is_open(self) -> bool:
        """Return whether the tokenizer service still works on the request."""
        return self.usage is None and self.error is None

    def abandon(self) -> None:
        """End the request because its client left."""
        self.gone = True
        self.ended.set()
        self.changed.set()

    def _raise_failure(self) -> None:
        if self.error is not None:
            raise self.error
        if self.gone:
            raise ClientGoneError
