"""Turns at a bounded resource, in an order that is fair over tenants."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from services.common.sharing.fair_queue import FairQueue

__all__ = ["FairTurns"]


class FairTurns:
    """At most `count` turns at once, which tenants get in the order of `FairQueue`."""

    def __init__(self, count: int) -> None:
        self._free = count
        self._waiting: FairQueue[asyncio.Future[None]] = FairQueue()

    @asynccontextmanager
    async def turn(self, tenant: str, cost: float = 1.0) -> AsyncIterator[None]:
        """Wait for a turn, and give it back at the end of the context.

        cost: amount of the resource that the turn uses, in a unit that all callers share.
        """
        await self.wait(self.request(tenant, cost))
        try:
            yield
        finally:
            self.give_back()

    def request(self, tenant: str, cost: float = 1.0) -> asyncio.Future[None]:
        """Return the wait for a turn, for `wait`. An exception that is set there refuses it."""
        turn = asyncio.get_running_loop().create_future()
        self._waiting.put(tenant, turn, cost)
        if self._free:
            self._free -= 1
            self.give_back()
        return turn

    async def wait(self, turn: asyncio.Future[None]) -> None:
        """Wait until a turn begins. A caller that is cancelled gives it up."""
        try:
            await turn
        except asyncio.CancelledError:
            if not turn.cancelled() and turn.exception() is None:
                self.give_back()  # the turn began as its caller was cancelled
            raise

    def give_back(self) -> None:
        """End a turn; the next waiter takes it."""
        while self._waiting:
            turn = self._waiting.take()
            if not turn.done():  # else it was cancelled, or refused
                turn.set_result(None)
                return
        self._free += 1
