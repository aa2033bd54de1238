"""Queue of streams with output for one client, with heartbeats and stall detection."""

import asyncio
from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import Generic, TypeVar

from services.common.settings import StreamSettings

__all__ = ["SendQueue"]

S = TypeVar("S")


class SendQueue(Generic[S]):
    """Streams that have output that the client has not taken.

    Streams gather their output themselves, so that output merges while the client is slow.
    """

    def __init__(self, settings: StreamSettings) -> None:
        self._loop = asyncio.get_running_loop()
        self._heartbeat_seconds = settings.heartbeat_seconds
        self._stall_seconds = settings.stall_seconds
        self._marked: OrderedDict[S, None] = OrderedDict()
        self._wake = asyncio.Event()
        self._sending_since: float | None = None
        """Loop time since which the client has not taken a message; None while none is sent."""
        self._sent_at = self._loop.time()
        self._is_heartbeat_due = False
        self._timer: asyncio.TimerHandle | None = None

    def start(self, on_stall: Callable[[], None]) -> None:
        """Start the timer. `on_stall` is called once if a message waits for `stall_seconds`."""
        self._schedule(min(self._heartbeat_seconds, self._stall_seconds), on_stall)

    def mark(self, stream: S) -> None:
        """Add a stream that has output."""
        self._marked[stream] = None
        self._wake.set()

    def wake(self) -> None:
        """Let `wait` return even if no stream has output."""
        self._wake.set()

    async def wait(self) -> bool:
        """Wait for output after the previous message was sent. Return True for a heartbeat."""
        self._sent_at = self._loop.time()
        self._sending_since = None
        await self._wake.wait()
        self._wake.clear()
        self._sending_since = self._loop.time()
        is_due, self._is_heartbeat_due = self._is_heartbeat_due and not self._marked, False
        return is_due

    def sent(self) -> None:
        """Note that the client took one of several messages and gets the next."""
        self._sending_since = self._loop.time()

    def take(self) -> Iterator[S]:
        """Yield the marked streams in order; a stream that the caller does not reach stays."""
        for _ in range(len(self._marked)):
            yield self._marked.popitem(last=False)[0]

    def clear(self) -> None:
        """Remove all marks: the caller is about to write every stream."""
        self._marked.clear()

    @property
    def has_marks(self) -> bool:
        """True if any stream has output."""
        return bool(self._marked)

    def close(self) -> None:
        """Stop the timer."""
        if self._timer is not None:
            self._timer.cancel()

    def _schedule(self, seconds: float, on_stall: Callable[[], None]) -> None:
        self._timer = self._loop.call_later(seconds, self._tick, on_stall)

    def _tick(self, on_stall: Callable[[], None]) -> None:
        now = self._loop.time()
        heartbeat_in, stall_in = self._heartbeat_seconds, self._stall_seconds
        if self._sending_since is not None:
            stall_in += self._sending_since - now
            if stall_in <= 0:
                on_stall()
                return
        else:
            heartbeat_in += self._sent_at - now
            if heartbeat_in <= 0:
                self._is_heartbeat_due = True
                self._wake.set()
                heartbeat_in = self._heartbeat_seconds
        self._schedule(min(heartbeat_in, stall_in), on_stall)
