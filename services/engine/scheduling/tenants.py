"""Fair service of tenants by the virtual token counter of Sheng et al. (OSDI 2024).

The tenant with the least service is next. The service of a tenant that returns is raised to the
least service of the present tenants: an absent tenant saves up no claim.
"""

from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass

__all__ = ["GENERATED_WEIGHT", "Tenant", "Tenants"]

GENERATED_WEIGHT = 2
"""Service of a generated token in prompt tokens, as in the paper"""
_MAX_ABSENT = 4096
"""Number of absent tenants whose counters are kept, so that a short absence clears no debt"""


@dataclass(slots=True, eq=False)
class Tenant:
    """A tenant's counters."""

    name: bytes
    served: float = 0.0
    """Service received, in weighted tokens"""
    waiting: int = 0
    """Number of waiting sequences"""
    running: int = 0
    """Number of running sequences"""


class Tenants:
    """Tenants that have sequences, and the counters of recent ones."""

    def __init__(self) -> None:
        self._present: dict[bytes, Tenant] = {}
        self._absent: OrderedDict[bytes, Tenant] = OrderedDict()

    def __iter__(self) -> Iterator[Tenant]:
        return iter(self._present.values())

    def __len__(self) -> int:
        return len(self._present)

    def waiting_of(self, name: bytes) -> int:
        tenant = self._present.get(name)
        return tenant.waiting if tenant is not None else 0

    def enter(self, name: bytes) -> Tenant:
        """Return the tenant of a new sequence, present from now on."""
        tenant = self._present.get(name)
        if tenant is None:
            tenant = self._absent.pop(name, None) or Tenant(name)
            if self._present:
                tenant.served = max(tenant.served, min(each.served for each in self))
            self._present[name] = tenant
        return tenant

    def leave(self, tenant: Tenant) -> None:
        """Make a tenant absent if it has no sequence."""
        if tenant.waiting or tenant.running:
            return
        del self._present[tenant.name]
        self._absent[tenant.name] = tenant
        if len(self._absent) > _MAX_ABSENT:
            self._absent.popitem(last=False)
