"""Requests whose grammar and images are prepared before the loop gets them."""

import asyncio
from collections.abc import Awaitable, Callable, Collection
from dataclasses import dataclass
from typing import TypeVar

import grpc

from services.common.sharing.shares import Shares
from tokenwire.errors import ServiceError

__all__ = ["Preparations", "deadline_exceeded", "queue_full"]

Prepared = TypeVar("Prepared")


@dataclass(slots=True, eq=False)
class _Preparation:
    """Preparation of one request."""

    request_id: str
    timeout: asyncio.Timeout
    error: ServiceError | None = None
    """Error to raise at the timeout; None = the deadline passed"""

    def fail(self, error: ServiceError) -> None:
        """End the wait with an error; an earlier error takes precedence."""
        self.error = self.error or error
        if not self.timeout.expired():  # an expired timeout is about to raise the error
            self.timeout.reschedule(asyncio.get_running_loop().time())


class Preparations:
    """Preparations of all requests."""

    def __init__(self, limit: int, on_change: Callable[[], None]) -> None:
        """limit: most preparations at once. on_change: called after each."""
        self._shares = Shares(limit, reserve=limit)
        self._on_change = on_change
        self._running: set[_Preparation] = set()

    def __len__(self) -> int:
        return len(self._running)

    async def run(
        self,
        prepare: Callable[[], Awaitable[Prepared]],
        request_id: str,
        timeout_seconds: float | None,
        tenant: str = "",
    ) -> Prepared:
        """Return the result of `prepare`. Raises ServiceError."""
        if not self._shares.has_room(tenant, 1):
            raise queue_full(
                f"{len(self)} requests already wait for grammars or images; try again."
            )
        preparation = _Preparation(request_id, asyncio.timeout(timeout_seconds))
        self._running.add(preparation)
        self._shares.add(tenant, 1)
        try:
            async with preparation.timeout:
                return await prepare()
        except TimeoutError:
            raise (preparation.error or deadline_exceeded()) from None
        finally:
            self._running.discard(preparation)
            self._shares.add(tenant, -1)
            self._on_change()

    def fail(self, error: ServiceError, request_ids: Collection[str] | None = None) -> int:
        """End the preparations of some requests, None = all. Returns their number."""
        preparations = [
            each for each in self._running if request_ids is None or each.request_id in request_ids
        ]
        for preparation in preparations:
            preparation.fail(error)
        return len(preparations)


def queue_full(message: str) -> ServiceError:
    """Return the error of a request that finds no room. The frontend sets its retry delay."""
    code = grpc.StatusCode.RESOURCE_EXHAUSTED
    return ServiceError(code, "QUEUE_FULL", message, retry_seconds=1)


def deadline_exceeded() -> ServiceError:
    """Return the error of a request past its deadline."""
    code = grpc.StatusCode.DEADLINE_EXCEEDED
    return ServiceError(code, "DEADLINE_EXCEEDED", "The deadline passed.")
