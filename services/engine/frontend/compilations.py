"""Requests that wait for their grammar, before the loop gets them."""

import asyncio
from collections.abc import Callable, Collection
from dataclasses import dataclass

import grpc

from services.engine.frontend.matchers import Matchers
from tokenwire.errors import ServiceError
from tokenwire.pb.types.v1.types_pb2 import GrammarSpec

__all__ = ["Compilations", "deadline_exceeded", "queue_full"]


@dataclass(slots=True, eq=False)
class _Compilation:
    """The compilation of one request's grammar."""

    request_id: str
    timeout: asyncio.Timeout
    error: ServiceError | None = None
    """Error to raise at the timeout; None = the deadline passed"""

    def fail(self, error: ServiceError) -> None:
        """End the compilation with an error; an earlier error takes precedence."""
        self.error = self.error or error
        if not self.timeout.expired():  # an expired timeout is about to raise the error
            self.timeout.reschedule(asyncio.get_running_loop().time())


class Compilations:
    """Compilations of all requests."""

    def __init__(self, limit: int, on_change: Callable[[], None]) -> None:
        """Allow `limit` compilations at once, and call `on_change` after each."""
        self._limit = limit
        self._on_change = on_change
        self._running: set[_Compilation] = set()

    def __len__(self) -> int:
        return len(self._running)

    async def compile(
        self,
        matchers: Matchers,
        grammar: GrammarSpec,
        request_id: str,
        timeout_seconds: float | None,
    ) -> str:
        """Return the grammar's id. Raises ServiceError."""
        if len(self) >= self._limit:
            raise queue_full(f"{len(self)} requests already wait for their grammars; try again.")
        compilation = _Compilation(request_id, asyncio.timeout(timeout_seconds))
        self._running.add(compilation)
        try:
            async with compilation.timeout:
                return await matchers.compile(grammar)
        except TimeoutError:
            raise (compilation.error or deadline_exceeded()) from None
        finally:
            self._running.discard(compilation)
            self._on_change()

    def fail(self, error: ServiceError, request_ids: Collection[str] | None = None) -> int:
        """End the compilations of these requests, None = all. Returns their number."""
        compilations = [
            each for each in self._running if request_ids is None or each.request_id in request_ids
        ]
        for compilation in compilations:
            compilation.fail(error)
        return len(compilations)


def queue_full(message: str) -> ServiceError:
    """Return the error of a request that finds no room."""
    code = grpc.StatusCode.RESOURCE_EXHAUSTED
    return ServiceError(code, "QUEUE_FULL", message, retry_seconds=1)


def deadline_exceeded() -> ServiceError:
    """Return the error of a request past its deadline."""
    code = grpc.StatusCode.DEADLINE_EXCEEDED
    return ServiceError(code, "DEADLINE_EXCEEDED", "The deadline passed.")
