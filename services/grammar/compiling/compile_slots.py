"""Slots for compilations: limits on concurrency and on the time in the queue."""

import asyncio

import grpc

from services.common.sharing.fair_turns import FairTurns
from services.common.sharing.tenant import current_tenant
from tokenwire.errors import ServiceError

__all__ = ["CompileSlots", "too_many_compiles"]


class CompileSlots:
    """A queue for `count` slots, in an order that is fair over tenants.

    The limit on waiting is measured in CPU seconds of other compilations, not in wall time: a busy
    machine must not refuse grammars that an idle one compiles.
    """

    def __init__(self, count: int, patience: float) -> None:
        """patience: CPU seconds per slot that others may take before a waiter is refused."""
        self._turns = FairTurns(count)
        self._patience = patience
        self._limit = count * patience
        self._spent = 0.0  # CPU seconds of all ended compilations
        self._arrivals: dict[asyncio.Future[None], float] = {}
        """Value of `_spent` at the arrival of each waiter"""

    async def take(self, cost: float = 1.0) -> None:
        """Wait for a slot. Raises ServiceError, RESOURCE_EXHAUSTED, when others take too long.

        cost: approximate time of the compilation, in a unit that all callers share.
        """
        turn = self._turns.request(current_tenant.get(), cost)
        self._arrivals[turn] = self._spent
        try:
            await self._turns.wait(turn)
        finally:
            del self._arrivals[turn]

    def give_back(self, seconds: float) -> None:
        """Release a slot after a compilation that took `seconds` of CPU time."""
        self._spent += seconds
        self._turns.give_back()
        for turn, arrival in self._arrivals.items():
            if not turn.done() and self._spent - arrival > self._limit:
                turn.set_exception(too_many_compiles(self._patience))


def too_many_compiles(retry_seconds: float) -> ServiceError:
    """Return the error of a grammar that gets no slot in time."""
    return ServiceError(
        grpc.StatusCode.RESOURCE_EXHAUSTED,
        "TOO_MANY_COMPILES",
        "Too many grammars are being compiled.",
        retry_seconds=retry_seconds,
    )
