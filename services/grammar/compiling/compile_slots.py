"""Slots for compilations: limits on concurrency and on the time in the queue."""

import asyncio
from collections import deque
from dataclasses import dataclass

import grpc

from tokenwire.errors import ServiceError

__all__ = ["CompileSlots"]


@dataclass(frozen=True, slots=True)
class _Waiter:
    turn: asyncio.Future[None]
    arrival: float
    """`CompileSlots._spent` when the waiter arrived"""


class CompileSlots:
    """A first-in, first-out queue for `count` slots.

    The limit on waiting is measured in CPU seconds of other compilations, not in wall time: a busy
    machine must not refuse grammars that an idle one compiles.
    """

    def __init__(self, count: int, patience: float) -> None:
        """`patience`: CPU seconds per slot that others may take before a waiter is refused."""
        self._free = count
        self._patience = patience
        self._limit = count * patience
        self._spent = 0.0  # CPU seconds of all ended compilations
        self._waiting: deque[_Waiter] = deque()

    async def take(self) -> None:
        """Wait for a slot. Raises ServiceError, RESOURCE_EXHAUSTED, when others take too long."""
        if self._free:
            self._free -= 1
            return
        waiter = _Waiter(asyncio.get_running_loop().create_future(), self._spent)
        self._waiting.append(waiter)
        try:
            await waiter.turn
        except asyncio.CancelledError:
            if not waiter.turn.cancelled() and waiter.turn.exception() is None:
                self.give_back(0.0)  # the waiter got a slot in the same turn as its cancellation
            raise

    def give_back(self, seconds: float) -> None:
        """Release a slot after a compilation that took `seconds` of CPU time."""
        self._spent += seconds
        waiting = [waiter for waiter in self._waiting if not waiter.turn.done()]
        if waiting:
            waiting.pop(0).turn.set_result(None)
        else:
            self._free += 1
        self._waiting = deque(waiter for waiter in waiting if not self._refuses(waiter))

    def _refuses(self, waiter: _Waiter) -> bool:
        is_late = self._spent - waiter.arrival > self._limit
        if is_late:
            waiter.turn.set_exception(
                ServiceError(
                    grpc.StatusCode.RESOURCE_EXHAUSTED,
                    "TOO_MANY_COMPILES",
                    "Too many grammars are being compiled.",
                    retry_seconds=self._patience,
                )
            )
        return is_late
