"""Time slices for long loops on an event loop."""

import asyncio

__all__ = ["TimeSlice"]

_SLICE_SECONDS = 0.002


class TimeSlice:
    """Time slice of 2 ms for a loop whose length a peer chooses. Then other tasks run.

    Create one at the start of each such loop, on the event loop.
    """

    __slots__ = ("_end", "_loop")

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._end = self._loop.time() + _SLICE_SECONDS

    @property
    def is_over(self) -> bool:
        """True once the slice has ended. Then call `await renew()`."""
        return self._loop.time() >= self._end

    async def renew(self) -> None:
        """Let every other ready task run once, then start a new slice."""
        await asyncio.sleep(0)
        self._end = self._loop.time() + _SLICE_SECONDS
