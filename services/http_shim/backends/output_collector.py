"""A completion or a chat under way: what has arrived and was not taken yet."""

import asyncio
from typing import Generic, cast

from services.http_shim.errors import ClientGoneError
from services.http_shim.formats.responses import Delta
from tokenwire.errors import ServiceError
from tokenwire.pb.completion.v1 import completion_pb2
from tokenwire.pb.types.v1 import types_pb2

__all__ = ["OutputCollector"]


class OutputCollector(Generic[Delta]):
    """Listens to one of them. Its events arrive synchronously; a task takes them when it can.

    Deltas of a choice gather in `pending` while nobody takes them, and go out as one. `changed` is
    set with every event, `ended` with the last one: completed, failed, or `abandon`.
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
        "usage",
    )

    def __init__(self) -> None:
        self.changed = asyncio.Event()
        self.ended = asyncio.Event()
        self.accepted: completion_pb2.CompleteAccepted | None = None
        self.pending: dict[int, list[Delta]] = {}
        self.finished: dict[int, completion_pb2.ChoiceFinished] = {}
        self.prompt_logprobs: dict[int, list[completion_pb2.PromptLogprobs]] = {}
        self.usage: types_pb2.Usage | None = None
        self.error: ServiceError | None = None
        self.gone = False

    def on_event(self, event: completion_pb2.SessionEvent) -> None:
        """An event of the Session."""
        response = event.chat if event.HasField("chat") else event.complete
        match response.WhichOneof("event"):
            case "delta":
                delta = cast(Delta, response.delta)
                self.pending.setdefault(delta.index, []).append(delta)
            case "finished":
                finished = response.finished
                self.finished[finished.index] = finished
            case "prompt_logprobs":
                run = response.prompt_logprobs
                self.prompt_logprobs.setdefault(run.prompt, []).append(run)
            case "accepted":
                self.accepted = response.accepted
            case "completed":
                self.usage = response.completed.usage
                self.ended.set()
            case _:
                return
        self.changed.set()

    def on_error(self, error: ServiceError) -> None:
        """The last event instead."""
        self.error = error
        self.ended.set()
        self.changed.set()

    async def admitted(self) -> completion_pb2.CompleteAccepted:
        """Waits until the request is admitted.

        Raises ServiceError where it is refused, ClientGoneError where the client leaves first.
        """
        while self.accepted is None and not self.ended.is_set():
            await self.changed.wait()
            self.changed.clear()
        self.changed.set()  # what came along with it is still pending
        self._raise_failure()
        assert self.accepted is not None
        return self.accepted

    async def completed(self) -> types_pb2.Usage:
        """Waits for the end. Raises as `admitted` does, and for failures on the way."""
        await self.ended.wait()
        self._raise_failure()
        assert self.usage is not None
        return self.usage

    def take(
        self, most_bytes: int
    ) -> tuple[dict[int, list[Delta]], dict[int, completion_pb2.ChoiceFinished]]:
        """The deltas that have arrived, and the ends of their choices: of all choices, or of the
        first that have so many bytes. `pending` holds what is left."""
        taken: dict[int, list[Delta]] = {}
        size = 0
        while self.pending and size < most_bytes:
            index = next(iter(self.pending))
            taken[index] = deltas = self.pending.pop(index)
            size += sum(delta.ByteSize() for delta in deltas)
        ended = [index for index in self.finished if index not in self.pending]
        return taken, {index: self.finished.pop(index) for index in ended}

    def is_open(self) -> bool:
        """Whether the tokenizer service still works on it."""
        return self.usage is None and self.error is None

    def abandon(self) -> None:
        """The client is gone: nothing more is awaited."""
        self.gone = True
        self.ended.set()
        self.changed.set()

    def _raise_failure(self) -> None:
        if self.error is not None:
            raise self.error
        if self.gone:
            raise ClientGoneError
