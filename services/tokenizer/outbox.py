"""What waits to be sent to one client: which completions have something, and since when."""

import asyncio
from collections.abc import Callable
from typing import Protocol

__all__ = ["HEARTBEAT_SECONDS", "STALL_SECONDS", "Outbox", "Source"]

HEARTBEAT_SECONDS = 10.0
STALL_SECONDS = 30.0


class Source(Protocol):
    """Something that has output for the client; compared by identity."""


class Outbox:
    """Collects the sources that have output until the client takes it.

    Sources gather their output themselves, so that what a slow client has not taken merges.
    """

    def __init__(self, on_stall: Callable[[], None]) -> None:
        """`on_stall` is called once when the client has taken nothing for STALL_SECONDS."""
        self._loop = asyncio.get_running_loop()
        self._on_stall = on_stall
        self._marked: dict[Source, None] = {}
        self._wake = asyncio.Event()
        self._sending_since: float | None = None
        self._sent_at = self._loop.time()
        self._heartbeat = False
        self._timer = self._loop.call_later(HEARTBEAT_SECONDS, self._tick)

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

    def take(self) -> list[Source]:
        """The sources that have output, in the order in which they were marked."""
        marked = list(self._marked)
        self._marked.clear()
        return marked

    def close(self) -> None:
        """Nothing more is sent."""
        self._timer.cancel()

    def _tick(self) -> None:
        now = self._loop.time()
        if self._sending_since is not None and now - self._sending_since >= STALL_SECONDS:
            self._on_stall()
            return
        silent = now - self._sent_at
        if self._sending_since is None and silent >= HEARTBEAT_SECONDS:
            self._heartbeat = True
            self._wake.set()
            silent = 0.0
        self._timer = self._loop.call_later(max(0.1, HEARTBEAT_SECONDS - silent), self._tick)
