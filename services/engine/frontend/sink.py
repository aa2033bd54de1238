"""Destination of one request's events."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Generic, TypeVar

from services.engine.frontend.event_queue import EventQueue
from services.engine.messages import Embedded, Token
from tokenwire.errors import ServiceError
from tokenwire.pb.engine.v1.engine_pb2 import (
    Accepted,
    Completed,
    GenerateResponse,
    PromptScores,
    SequenceFinished,
    SessionEvent,
)

__all__ = ["Sink"]

E = TypeVar("E", bound=GenerateResponse | SessionEvent)


class Sink(ABC, Generic[E]):
    """Sink that puts events into a queue. Its methods run on the event loop and must not block."""

    def __init__(self, events: EventQueue[E], add: Callable[..., E], handle: int = 0) -> None:
        """add: makes an event from one of its fields. handle: the request in the queue."""
        self.events = events
        self._add = add
        self._handle = handle

    def on_accepted(self, accepted: Accepted) -> None:
        self.events.put(self._add(accepted=accepted))

    def on_prompt_scores(self, scores: PromptScores) -> None:
        self.events.put(self._add(prompt_scores=scores))

    def on_embedded(self, embedded: Embedded) -> None:
        """Take the vector of a prompt. Only requests for vectors get any."""
        raise NotImplementedError

    def on_token(self, token: Token) -> None:
        self.events.put_token(self._handle, token, self._add)

    def on_finished(self, finished: SequenceFinished) -> None:
        self.events.put(self._add(finished=finished))

    def on_completed(self, completed: Completed) -> None:
        self.events.put(self._add(completed=completed))

    @abstractmethod
    def on_error(self, error: ServiceError) -> None: ...
