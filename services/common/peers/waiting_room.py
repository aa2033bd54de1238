"""Waiting room: a bounded number of requests that wait until a service serves."""

from collections.abc import Iterator
from contextlib import contextmanager

import grpc

from services.common.sharing.shares import Shares
from services.common.sharing.tenant import current_tenant
from tokenwire.errors import ServiceError

__all__ = ["WaitingRoom"]


class WaitingRoom:
    """A bounded number of places, which the tenants share."""

    def __init__(self, most: int, awaited: str) -> None:
        """awaited: name of the awaited service for messages, such as "the engine"."""
        self._places = Shares(most, reserve=most)
        self._awaited = awaited

    @contextmanager
    def place(self) -> Iterator[None]:
        """Hold a place for the current tenant. Raises RESOURCE_EXHAUSTED if there is none."""
        tenant = current_tenant.get()
        if not self._places.has_room(tenant, 1):
            message = f"{self._places.held} requests already wait for {self._awaited}; try again."
            code = grpc.StatusCode.RESOURCE_EXHAUSTED
            raise ServiceError(code, "QUEUE_FULL", message, retry_seconds=1)
        self._places.add(tenant, 1)
        try:
            yield
        finally:
            self._places.add(tenant, -1)
