"""Long loops on the event loop: how they let others have their turn."""

import asyncio

__all__ = ["Turns"]

_TURN_SECONDS = 0.002


class Turns:
    """A loop whose length a peer chooses: it pauses whenever a turn has lasted 2 ms.

    Make one at the beginning of each such loop, on the event loop.
    """

    __slots__ = ("_end", "_loop")

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._end = self._loop.time() + _TURN_SECONDS

    @property
    def is_over(self) -> bool:
        """Whether others should have their turn now: `await others()`."""
        return self._loop.time() >= self._end

    async def others(self) -> None:
        """Returns when everything else that was ready has run once."""
        await asyncio.sleep(0)
        self._end = self._loop.time() + _TURN_SECONDS
