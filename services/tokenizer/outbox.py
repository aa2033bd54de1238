"""What waits to be sent to one client: which completions have something, and since when."""

import asyncio
from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import Protocol

from services.common.settings import StreamSettings

__all__ = ["Outbox", "Source"]


class Source(Protocol):
    """Something that has output for the client; compared by identity."""


class Outbox:
    """Collects the sources that have output until the client takes it.

    Sources gather their output themselves, so that what a slow client has not taken merges.
    """

    def __init__(self, settings: StreamSettings, on_stall: Callable[[], None]) -> None:
        """`on_stall` is called once when the client has taken nothing for `stall_seconds`."""
        self._loop = asyncio.get_running_loop()
        self._heartbeat_seconds = settings.heartbeat_seconds
        self._stall_seconds = settings.stall_seconds
        self._on_stall = on_stall
        self._marked: OrderedDict[Source, None] = OrderedDict()
        self._wake = asyncio.Event()
        self._sending_since: float | None = None
        self._sent_at = self._loop.time()
        self._heartbeat = False
        first = min(self._heartbeat_seconds, self._stall_seconds)
        self._timer = self._loop.call_later(first, self._tick)

    def mark(self, source: Source) -> None:
        """The source has output."""
        self._marked[source] = None
        self._wake.set()

    def wake(self) -> None:
        """Let `wait` return though no source may have output."""
        self._wake.set()

    async def wait(self) -> bool:
        """Returns when there is output to `take`, or with True when a heartbeat is due. Tells that
        what was taken before has been sent."""
        self._sent_at = self._loop.time()
        self._sending_since = None
        await self._wake.wait()
        self._wake.clear()
        self._sending_since = self._loop.time()
        due, self._heartbeat = self._heartbeat and not self._marked, False
        return due

    def sent(self) -> None:
        """The client took one of several messages, and is given the next."""
        self._sending_since = self._loop.time()

    def take(self) -> Iterator[Source]:
        """The sources that have output, in the order in which they were marked. Those that the
        caller leaves stay marked."""
        for _ in range(len(self._marked)):
            yield self._marked.popitem(last=False)[0]

    def clear(self) -> None:
        """Whoever has output is about to be written anyway."""
        self._marked.clear()

    @property
    def pending(self) -> bool:
        """Whether any source has output."""
        return bool(self._marked)

    def close(self) -> None:
        """Nothing more is sent."""
        self._timer.cancel()

    def _tick(self) -> None:
        now = self._loop.time()
        heartbeat_in, stall_in = self._heartbeat_seconds, self._stall_seconds
        if self._sending_since is not None:
            stall_in += self._sending_since - now
            if stall_in <= 0:
                self._on_stall()
                return
        else:
            heartbeat_in += self._sent_at - now
            if heartbeat_in <= 0:
                self._heartbeat = True
                self._wake.set()
                heartbeat_in = self._heartbeat_seconds
        self._timer = self._loop.call_later(min(heartbeat_in, stall_in), self._tick)
