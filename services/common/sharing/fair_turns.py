"""Turns at a bounded resource, in an order that is fair over tenants."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from services.common.sharing.fair_queue import FairQueue

__all__ = ["FairTurns"]


class FairTurns:
    """Up to `count` turns at once. Tenants get them in the order of `FairQueue`."""

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
        """Queue for a turn; return the future to give to `wait`. An exception set in it refuses."""
        turn = asyncio.get_running_loop().create_future()
        self._waiting.put(tenant, turn, cost)
        if self._free:
            self._free -= 1
            self.give_back()
        return turn

    async def wait(self, turn: asyncio.Future[None]) -> None:
        """Wait until a turn begins. A caller that is cancelled gives its turn up."""
        try:
            await turn
        except asyncio.CancelledError:
            if not turn.cancelled() and turn.exception() is None:
                self.give_back()  # the turn began at the moment of the cancellation
            raise

    def give_back(self) -> None:
        """End a turn; the next waiter takes it."""
        while self._waiting:
            turn = self._waiting.take()
            if not turn.done():  # else it was cancelled, or refused
                turn.set_result(None)
                return
        self._free += 1
