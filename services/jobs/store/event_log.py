"""Kept server-sent events of responses, which clients read from any place on."""

import asyncio

import grpc

from services.common.sharing.shares import Shares
from tokenwire.errors import ServiceError

__all__ = ["EventLog", "EventLogs"]

_OVERHEAD = 64  # bytes of memory per event besides its text
_END = b"\n\n"


class EventLog:
    """Events of one response, numbered from 0."""

    def __init__(self, logs: "EventLogs", owner: str) -> None:
        self.owner = owner
        """Owner: the API key, or the tenant on a server without keys"""
        self.has_ended = False
        self.is_kept = True
        self.size = 0
        """Bytes in memory"""
        self._logs = logs
        self._events: list[bytes] = []
        self._first = 0
        """Number of the first kept event"""
        self._grown = asyncio.Event()

    @property
    def next(self) -> int:
        """Number of the next event."""
        return self._first + len(self._events)

    def add(self, events: bytes) -> None:
        """Append events."""
        new = [event + _END for event in events.split(_END) if event]
        self._events += new
        self._grow(sum(map(len, new)) + _OVERHEAD * len(new))
        self._wake()

    def end(self) -> None:
        """Note that no further events come."""
        self.has_ended = True
        self._wake()

    def read(self, number: int, max_bytes: int) -> list[bytes]:
        """Return kept events from a number on.

        Events that together exceed `max_bytes` wait for the next call. Raises OUT_OF_RANGE if the
        first is kept no longer.
        """
        if number < self._first:
            message = f"Events before {self._first} of this response are kept no longer."
            code, reason = grpc.StatusCode.OUT_OF_RANGE, "EVENTS_DROPPED"
            raise ServiceError(code, reason, message, field="starting_after")
        taken: list[bytes] = []
        size = 0
        for index in range(number - self._first, len(self._events)):
            if size >= max_bytes:
                break
            taken.append(self._events[index])
            size += len(taken[-1])
        return taken

    async def grown(self, number: int) -> None:
        """Wait until the event of a number is there, or none comes any more."""
        while self.next <= number and not self.has_ended:
            await self._grown.wait()

    def drop_oldest(self) -> None:
        """Drop the first half of the events."""
        dropped = self._events[: (len(self._events) + 1) // 2]
        del self._events[: len(dropped)]
        self._first += len(dropped)
        self._grow(-sum(map(len, dropped)) - _OVERHEAD * len(dropped))

    def _grow(self, more: int) -> None:
        self.size += more
        self._logs.grow(self, more)

    def _wake(self) -> None:
        self._grown.set()
        self._grown = asyncio.Event()


class EventLogs:
    """Events of all responses. Those of the owner that has most give way."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._shares = Shares(max_bytes)
        self._logs: dict[str, EventLog] = {}

    def open(self, identity: str, owner: str) -> EventLog:
        """Keep the events of a new response."""
        log = self._logs[identity] = EventLog(self, owner)
        return log

    def find(self, identity: str, owner: str) -> EventLog | None:
        """Return the events of an owner's response; None if none are kept."""
        log = self._logs.get(identity)
        return None if log is None or log.owner != owner else log

    def delete(self, identity: str) -> None:
        """Drop the events of a response."""
        log = self._logs.pop(identity, None)
        if log is not None:
            log.is_kept = False
            self._shares.add(log.owner, -log.size)

    def grow(self, log: EventLog, more: int) -> None:
        """Count bytes of a log. When all have too many, the owner that has most loses events.

        Its ended logs go first, then the oldest events of its largest log.
        """
        if not log.is_kept:
            return
        self._shares.add(log.owner, more)
        while more > 0 and self._shares.held > self._max_bytes:
            owner = max((each.owner for each in self._logs.values()), key=self._shares.of)
            logs = {name: each for name, each in self._logs.items() if each.owner == owner}
            ended = next((name for name, each in logs.items() if each.has_ended), None)
            if ended is not None:
                self.delete(ended)
                continue
            largest = max(logs.values(), key=lambda each: each.size)
            if not largest.size:
                return
            largest.drop_oldest()
