"""Requests of a Session as async iterators of their deltas."""

import asyncio
from abc import ABC, abstractmethod
from collections import defaultdict, deque
from typing import Any, Generic, Self, TypeVar, cast

from tokenwire.errors import ServiceError
from tokenwire.pb.completion.v1 import completion_pb2
from tokenwire.pb.engine.v1 import engine_pb2
from tokenwire.pb.types.v1 import types_pb2
from tokenwire.results import Answer, Choice, Delta, FinishReason, Scores, TokenDelta, Usage
from tokenwire.session import CompletionSession, EngineSession, Session

__all__ = ["AnswerStream", "AsyncResource", "GenerationStream", "RequestStream"]

Event = TypeVar("Event")
DeltaType = TypeVar("DeltaType")


class AsyncResource(ABC):
    """Base class of resources that `async with` closes."""

    @abstractmethod
    async def aclose(self) -> None:
        """Close the resource; a second call has no effect."""

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *failure: object) -> None:
        await self.aclose()


class _Inbox(Generic[Event]):
    """Listener of one request that queues its events until they are taken."""

    def __init__(self) -> None:
        self._events: deque[Event] = deque()
        self._error: ServiceError | None = None
        self._arrived = asyncio.Event()

    def on_event(self, event: Event) -> None:
        """Queue an event."""
        self._events.append(event)
        self._arrived.set()

    def on_error(self, error: ServiceError) -> None:
        """Record the error, which `take` raises after the queued events."""
        self._error = error
        self._arrived.set()

    async def take(self) -> Event:
        """Return the next event; raise ServiceError once a failed request has no events left."""
        while not self._events:
            if self._error is not None:
                raise self._error
            self._arrived.clear()
            await self._arrived.wait()
        return self._events.popleft()


class RequestStream(AsyncResource, Generic[Event, DeltaType]):
    """Async iterator over the deltas of one request. Raises ServiceError when the request fails.

    Leaving `async with`, or `aclose`, cancels the request unless it has ended. Subclasses send the
    start command with `_handle`.
    """

    usage: Usage | None = None
    """Usage of the request; None until the iteration has ended"""

    def __init__(self, session: Session[Any, Event]) -> None:
        self._session = session
        self._inbox: _Inbox[Event] = _Inbox()
        self._handle = session.open(self._inbox)
        self._ended = False

    @abstractmethod
    def _cancel_command(self) -> object:
        """Return the command that cancels the request."""

    @abstractmethod
    def _read(self, event: Event) -> DeltaType | None:
        """Return the delta in an event, None if it has none. The last event sets `usage`."""

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> DeltaType:
        while not self._ended:
            try:
                event = await self._inbox.take()
            except ServiceError:
                self._ended = True
                raise
            delta = self._read(event)
            self._ended = self.usage is not None
            if delta is not None:
                return delta
        raise StopAsyncIteration

    async def aclose(self) -> None:
        """Cancel the request unless it has ended."""
        if not self._ended:
            self._ended = True
            self._session.detach(self._handle)
            self._session.send(self._cancel_command())


class AnswerStream(RequestStream[completion_pb2.SessionEvent, Delta]):
    """Deltas of a request at text level."""

    accepted: completion_pb2.Accepted | None = None
    """The admitted request's settings; set before the first delta"""
    prompt_scores: dict[int, list[Scores]]
    """Scores of prompt tokens by prompt index, from token 1 on; only with prompt_logprobs"""

    def __init__(self, session: CompletionSession, start: completion_pb2.SessionStart) -> None:
        super().__init__(session)
        self.prompt_scores = defaultdict(list)
        session.send(completion_pb2.SessionCommand(handle=self._handle, start=start))

    def _cancel_command(self) -> object:
        cancel = completion_pb2.SessionCancel()
        return completion_pb2.SessionCommand(handle=self._handle, cancel=cancel)

    def _read(self, event: completion_pb2.SessionEvent) -> Delta | None:
        response = event.response
        match response.WhichOneof("event"):
            case "delta":
                return Delta.read(response.delta)
            case "finished":
                finished = response.finished
                return Delta(
                    index=finished.index,
                    position=finished.completion_tokens,
                    finish_reason=FinishReason.read(finished.reason),
                    stop=_stop_match(finished.match),
                )
            case "prompt_logprobs":
                scores = Scores.read_texts(response.prompt_logprobs)
                if scores is not None:
                    self.prompt_scores[response.prompt_logprobs.prompt].append(scores)
            case "accepted":
                self.accepted = response.accepted
            case "completed":
                self.usage = Usage.read(response.completed.usage)
        return None

    async def answer(self) -> Answer:
        """Iterate to the end; return the whole answer."""
        deltas: dict[int, list[Delta]] = defaultdict(list)
        async with self:
            async for delta in self:
                deltas[delta.index].append(delta)
        accepted, usage = self.ended
        return Answer(
            accepted.model,
            accepted.system_fingerprint,
            accepted.seed,
            tuple(Choice.join(deltas[index]) for index in sorted(deltas)),
            usage,
            tuple(accepted.ignored),
            tuple(Scores.join(self.prompt_scores[i]) for i in range(len(accepted.prompts))),
        )

    @property
    def ended(self) -> tuple[completion_pb2.Accepted, Usage]:
        """The admitted request's settings and its usage, once the iteration has ended."""
        assert self.accepted is not None
        assert self.usage is not None
        return self.accepted, self.usage


class GenerationStream(RequestStream[engine_pb2.SessionEvent, TokenDelta]):
    """Deltas of a request at token level."""

    accepted: engine_pb2.Accepted | None = None
    """The admitted request's settings; set before the first delta"""

    def __init__(self, session: EngineSession, start: engine_pb2.SessionStart) -> None:
        super().__init__(session)
        self.prompts = len(start.request.prompts)
        session.send(engine_pb2.SessionCommand(handle=self._handle, start=start))

    def _cancel_command(self) -> object:
        cancel = engine_pb2.SessionCancel()
        return engine_pb2.SessionCommand(handle=self._handle, cancel=cancel)

    def _read(self, event: engine_pb2.SessionEvent) -> TokenDelta | None:
        match event.WhichOneof("event"):
            case "delta":
                return TokenDelta.read(event.delta)
            case "prompt_scores":
                return TokenDelta.read_prompt(event.prompt_scores)
            case "finished":
                stop = _stop_match(event.finished.match)
                return TokenDelta(
                    sequence=event.finished.sequence,
                    position=event.finished.completion_tokens,
                    finish_reason=FinishReason.read(event.finished.reason),
                    stop=stop if isinstance(stop, int) else None,
                )
            case "accepted":
                self.accepted = event.accepted
            case "completed":
                self.usage = Usage.read(event.completed.usage)
        return None


def _stop_match(match: types_pb2.StopMatch) -> str | int | None:
    name = match.WhichOneof("match")
    return None if name is None else cast(str | int, getattr(match, name))
