"""Admission of requests, and their drain when the process stops."""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

import grpc

from tokenwire.errors import ServiceError

__all__ = ["Gate"]


class Running(Protocol):
    """Something that a request waits for, such as its output."""

    def on_error(self, error: ServiceError) -> None:
        """End it with an error."""


class Gate:
    """Tracks the requests in progress; a closed gate refuses new ones."""

    def __init__(self) -> None:
        self._active: set[Running] = set()
        self._idle = asyncio.Event()
        self._idle.set()
        self.closed = False

    @contextmanager
    def admit(self, *running: Running) -> Iterator[None]:
        """Track what one request waits for. Raises UNAVAILABLE if the gate is closed."""
        if self.closed:
            raise _stopping("The server is stopping.")
        self._active.update(running)
        self._idle.clear()
        try:
            yield
        finally:
            self._active.difference_update(running)
            if not self._active:
                self._idle.set()

    async def close(self, grace: float, *, admits: bool = False) -> bool:
        """Close the gate, wait up to `grace` seconds, and return whether all requests ended.

        Requests that still run then fail with UNAVAILABLE.

        admits: admit requests on open connections; the server accepts no new connections.
        """
        self.closed = not admits
        try:
            await asyncio.wait_for(self._idle.wait(), grace)
        except TimeoutError:
            for each in self._active:
                each.on_error(_stopping("The server stopped before the answer was complete."))
            return False
        return True


def _stopping(message: str) -> ServiceError:
    return ServiceError(grpc.StatusCode.UNAVAILABLE, "STOPPING", message, retry_seconds=1)
