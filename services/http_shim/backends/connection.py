"""Connection to a model: its backend, and the number of requests that use it."""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager

from services.http_shim.backends.backend import Backend, BackendSettings
from tokenwire.errors import ServiceError
from tokenwire.pb.completion.v1 import models_pb2
from tokenwire.pb.models.v1 import model_manager_pb2

__all__ = ["Connection"]

_STATUS_SECONDS = 2.0  # above the time in which a tokenizer service gives up on its engine


class Connection:
    """A model whose services run all the time."""

    on_demand = False
    """True if requests load the model"""

    def __init__(
        self, target: str, settings: BackendSettings, backend: Backend | None = None
    ) -> None:
        """backend: None = one of the target."""
        self._backend = Backend(target, settings) if backend is None else backend
        self._users = 0
        self._idle = asyncio.Event()
        self._idle.set()

    @property
    def state(self) -> model_manager_pb2.Model | None:
        """State of a model on demand, as its manager said last; None = it is not known."""
        return None

    @property
    def waits_for_load(self) -> bool:
        """True if a request must wait until the model is loaded."""
        return False

    def load_progress(self) -> str:
        """Return what the load does, such as "loading 43 %"."""
        return ""

    @contextmanager
    def lease(self, keep_alive: float | None = None) -> Iterator[Backend]:
        """Count a request as a user; `retire` waits for its end.

        keep_alive: seconds that a model on demand stays in memory after the request; None = the
        default.
        """
        self._users += 1
        self._idle.clear()
        try:
            yield self._backend
        finally:
            self._users -= 1
            if not self._users:
                self._idle.set()

    async def models(self) -> list[models_pb2.Model]:
        """Return the models that the service serves. Raises ServiceError."""
        with self.lease() as backend:
            return await backend.models()

    async def status(self) -> models_pb2.ModelStatus | None:
        """Return the status of the service's model; None if it does not answer in time."""
        try:
            async with asyncio.timeout(_STATUS_SECONDS):
                return await self._status()
        except (ServiceError, TimeoutError):
            return None

    async def _status(self) -> models_pb2.ModelStatus | None:
        with self.lease() as backend:
            return await backend.status()

    async def is_ready(self) -> bool:
        """Return whether the backend accepts completions, or can be loaded."""
        return await self._backend.is_ready()

    async def retire(self) -> None:
        """Close the backend when no request uses it, or when cancelled. No new one may come."""
        try:
            await self._idle.wait()
        finally:
            await self.close()

    async def close(self) -> None:
        """Close the backend, and abort its requests."""
        await self._backend.close()
