"""Queue whose order is fair over tenants."""

from collections import deque
from typing import Generic, TypeVar

__all__ = ["FairQueue"]

T = TypeVar("T")


class FairQueue(Generic[T]):
    """Items of tenants. The next one is the oldest of the tenant with the least service.

    As in the engine's scheduler (Sheng et al., OSDI 2024), the service of a tenant that returns is
    raised to that of the others: an absent tenant saves up no claim.
    """

    def __init__(self) -> None:
        self._served: dict[str, float] = {}
        """Service that each tenant has received, in the callers' unit"""
        self._least = 0.0
        """Least service of all waiting tenants at the last `take`"""
        self._waiting: dict[str, deque[tuple[T, float]]] = {}
        """Items of each tenant with their costs, oldest first"""

    def __bool__(self) -> bool:
        return bool(self._waiting)

    def put(self, tenant: str, item: T, cost: float = 1.0) -> None:
        """Queue an item. cost: the service that it takes."""
        if tenant not in self._waiting:
            self._waiting[tenant] = deque()
            self._served[tenant] = max(self._served.get(tenant, 0.0), self._least)
        self._waiting[tenant].append((item, cost))

    def take(self) -> T:
        """Remove the next item and return it. There must be one."""
        tenant = min(self._waiting, key=self._served.__getitem__)
        waiting = self._waiting[tenant]
        item, cost = waiting.popleft()
        self._least = self._served[tenant]
        self._served[tenant] += cost
        if not waiting:
            del self._waiting[tenant]
            if not self._waiting:  # `put` raises tenants with less service to `_least`
                served = self._served.items()
                self._served = {name: units for name, units in served if units > self._least}
        return item

    def charge(self, tenant: str, more: float) -> None:
        """Add to a tenant's service the amount that an item took beyond its cost."""
        if tenant in self._served:
            self._served[tenant] += more
