"""Slots for compilations, which bound how many run at once and how long a queue may get."""

import asyncio
from collections import deque
from dataclasses import dataclass

import grpc

from tokenwire.errors import ServiceError

__all__ = ["CompileSlots"]


@dataclass(frozen=True, slots=True)
class _Waiter:
    turn: asyncio.Future[None]
    spent: float
    """CPU seconds that all compilations had taken when it came"""


class CompileSlots:
    """A queue for `count` slots, first come, first served.

    The patience of a waiter is counted in CPU seconds of the compilations that end before it has a
    slot. In wall time, a busy machine would refuse grammars that an idle one compiles.
    """

    def __init__(self, count: int, patience: float) -> None:
        """patience: CPU seconds of each slot."""
        self._free = count
        self._patience = patience
        self._most = count * patience
        self._spent = 0.0
        self._waiting: deque[_Waiter] = deque()

    async def take(self) -> None:
        """Wait for a slot. Raises ServiceError: RESOURCE_EXHAUSTED when others take too long."""
        if self._free:
            self._free -= 1
            return
        waiter = _Waiter(asyncio.get_running_loop().create_future(), self._spent)
        self._waiting.append(waiter)
        try:
            await waiter.turn
        except asyncio.CancelledError:
            if not waiter.turn.cancelled() and waiter.turn.exception() is None:
                self.give_back(0.0)  # the slot came together with the cancellation
            raise

    def give_back(self, seconds: float) -> None:
        """Hand a slot on, after a compilation that took so many CPU seconds."""
        self._spent += seconds
        waiting = [waiter for waiter in self._waiting if not waiter.turn.done()]
        if waiting:
            waiting.pop(0).turn.set_result(None)
        else:
            self._free += 1
        self._waiting = deque(waiter for waiter in waiting if not self._refuses(waiter))

    def _refuses(self, waiter: _Waiter) -> bool:
        is_late = self._spent - waiter.spent > self._most
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
