"""Service that tenants got, by the virtual token counter of Sheng et al. (OSDI 2024).

The tenant that was served least is next. One that comes back is lifted to the least served of those
that are here: what it did not use while it was away gives it no claim.
"""

from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass

__all__ = ["GENERATED_WEIGHT", "Tenant", "Tenants"]

GENERATED_WEIGHT = 2
"""A generated token counts as so many prompt tokens, as in the paper"""
_MOST_REMEMBERED = 4096
"""Tenants without a sequence whose counters are kept; else a short leave would clear a debt"""


@dataclass(slots=True, eq=False)
class Tenant:
    """One tenant."""

    name: bytes
    served: float = 0.0
    """Weighted tokens"""
    waiting: int = 0
    """Sequences"""
    running: int = 0
    """Sequences"""


class Tenants:
    """Those that have sequences here, and for a while those that had some."""

    def __init__(self) -> None:
        self._present: dict[bytes, Tenant] = {}
        self._absent: OrderedDict[bytes, Tenant] = OrderedDict()

    def __iter__(self) -> Iterator[Tenant]:
        return iter(self._present.values())

    def __len__(self) -> int:
        return len(self._present)

    def waiting_of(self, name: bytes) -> int:
        """Sequences of a tenant that wait."""
        tenant = self._present.get(name)
        return tenant.waiting if tenant is not None else 0

    def enter(self, name: bytes) -> Tenant:
        """The tenant, which is about to get a sequence."""
        tenant = self._present.get(name)
        if tenant is None:
            tenant = self._absent.pop(name, None) or Tenant(name)
            if self._present:
                tenant.served = max(tenant.served, min(each.served for each in self))
            self._present[name] = tenant
        return tenant

    def leave(self, tenant: Tenant) -> None:
        """Take a tenant that has no sequence any more out of the comparison."""
        if tenant.waiting or tenant.running:
            return
        del self._present[tenant.name]
        self._absent[tenant.name] = tenant
        if len(self._absent) > _MOST_REMEMBERED:
            self._absent.popitem(last=False)
