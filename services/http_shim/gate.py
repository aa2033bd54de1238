"""Who may still come in once the process was told to stop."""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager

import grpc

from tokenwire.errors import ServiceError

__all__ = ["Gate"]


class Gate:
    """Counts the completions that run; closed, it lets no new one in."""

    def __init__(self) -> None:
        self._inside = 0
        self._empty = asyncio.Event()
        self._empty.set()
        self.closed = False

    @contextmanager
    def entered(self) -> Iterator[None]:
        """Around one completion; UNAVAILABLE when closed."""
        if self.closed:
            raise ServiceError(
                grpc.StatusCode.UNAVAILABLE, "STOPPING", "The server is stopping.", retry_seconds=1
            )
        self._inside += 1
        self._empty.clear()
        try:
            yield
        finally:
            self._inside -= 1
            if not self._inside:
                self._empty.set()

    async def close(self, grace: float) -> bool:
        """Let nobody in, and wait up to `grace` seconds; whether all have left."""
        self.closed = True
        try:
            await asyncio.wait_for(self._empty.wait(), grace)
        except TimeoutError:
            return False
        return True
