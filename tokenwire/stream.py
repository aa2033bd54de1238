"""One request of a Session, as an async iterator of its deltas."""

import asyncio
from abc import abstractmethod
from collections import deque
from typing import Any, Generic, Self, TypeVar

from tokenwire.closing import Closing
from tokenwire.errors import ServiceError
from tokenwire.results import Usage
from tokenwire.session import Session

__all__ = ["Inbox", "RequestStream"]

Event = TypeVar("Event")
DeltaType = TypeVar("DeltaType")


class Inbox(Generic[Event]):
    """Listens to one request of a Session, and keeps its events until they are taken."""

    def __init__(self) -> None:
        self._events: deque[Event] = deque()
        self._error: ServiceError | None = None
        self._arrived = asyncio.Event()

    def on_event(self, event: Event) -> None:
        """Keep an event."""
        self._events.append(event)
        self._arrived.set()

    def on_error(self, error: ServiceError) -> None:
        """Keep the error, which comes after the events."""
        self._error = error
        self._arrived.set()

    async def take(self) -> Event:
        """The next event; raises ServiceError once the request has failed."""
        while not self._events:
            if self._error is not None:
                raise self._error
            self._arrived.clear()
            await self._arrived.wait()
        return self._events.popleft()


class RequestStream(Closing, Generic[Event, DeltaType]):
    """Iterates over the deltas of one request. Raises ServiceError when the request fails.

    Leaving `async with`, or `aclose`, cancels the request unless it has ended. Subclasses send the
    start command with `_handle`.
    """

    usage: Usage | None = None
    """Set once the iteration has ended"""

    def __init__(self, session: Session[Any, Event]) -> None:
        self._session = session
        self._inbox: Inbox[Event] = Inbox()
        self._handle = session.open(self._inbox)
        self._over = False

    @abstractmethod
    def _cancel_command(self) -> object:
        """The command that ends the request."""

    @abstractmethod
    def _read(self, event: Event) -> DeltaType | None:
        """The delta in an event, if any. Sets `usage` at the last event."""

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> DeltaType:
        while not self._over:
            try:
                event = await self._inbox.take()
            except ServiceError:
                self._over = True
                raise
            delta = self._read(event)
            self._over = self.usage is not None
            if delta is not None:
                return delta
        raise StopAsyncIteration

    async def aclose(self) -> None:
        """Cancel the request unless it has ended."""
        if not self._over:
            self._over = True
            self._session.forget(self._handle)
            self._session.send(self._cancel_command())
