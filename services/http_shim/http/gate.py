"""Who may still come in once the process was told to stop, and what becomes of those inside."""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import grpc

from services.http_shim.backends.output_collector import OutputCollector
from tokenwire.errors import ServiceError

__all__ = ["Gate"]


class Gate:
    """Knows the completions that run; closed, it lets no new one in."""

    def __init__(self) -> None:
        self._inside: set[OutputCollector[Any]] = set()
        self._empty = asyncio.Event()
        self._empty.set()
        self.closed = False

    @contextmanager
    def entered(self, *collector: OutputCollector[Any]) -> Iterator[None]:
        """Around what runs for one request; UNAVAILABLE when closed."""
        if self.closed:
            raise _stopping("The server is stopping.")
        self._inside.update(collector)
        self._empty.clear()
        try:
            yield
        finally:
            self._inside.difference_update(collector)
            if not self._inside:
                self._empty.set()

    async def close(self, grace: float, *, admits: bool = False) -> bool:
        """Let nobody in, and wait up to `grace` seconds; whether all have left. Those that have not
        fail, which their clients are told.

        admits: let in who is on the way; nobody else can come, because nothing is accepted.
        """
        self.closed = not admits
        try:
            await asyncio.wait_for(self._empty.wait(), grace)
        except TimeoutError:
            for collector in self._inside:
                collector.on_error(_stopping("The server stopped before the answer was complete."))
            return False
        return True


def _stopping(message: str) -> ServiceError:
    return ServiceError(grpc.StatusCode.UNAVAILABLE, "STOPPING", message, retry_seconds=1)
