"""Thread of a store: its database makes no event loop wait."""

import asyncio
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import ParamSpec, TypeVar

from services.jobs.store.database_guard import StoreUnavailableError

__all__ = ["StoreThread"]

_MOST_WAITING = 1024
_MOST_SECONDS = 3.0
"""Time for which a call may wait for its turn: one that waits longer meets a database that is
locked, or a disk that is too slow"""
P = ParamSpec("P")
T = TypeVar("T")


class StoreThread:
    """Calls the methods of one store, one at a time."""

    def __init__(self, part: str) -> None:
        """part: name of the store in errors and in the names of threads."""
        self._part = part
        self._executor = ThreadPoolExecutor(1, part)
        self._waiting = 0

    async def run(self, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Return the result of a call. Raises UNAVAILABLE if it is not its turn soon."""
        if self._waiting >= _MOST_WAITING:
            raise StoreUnavailableError(self._part)
        called = time.monotonic()

        def in_turn() -> T:
            if time.monotonic() - called > _MOST_SECONDS:
                raise StoreUnavailableError(self._part)
            return work(*args, **kwargs)

        self._waiting += 1
        try:
            return await asyncio.get_running_loop().run_in_executor(self._executor, in_turn)
        finally:
            self._waiting -= 1

    def close(self) -> None:
        """Drop the calls that wait."""
        self._executor.shutdown(wait=True, cancel_futures=True)
