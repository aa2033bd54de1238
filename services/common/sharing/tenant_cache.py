"""Cache of bounded size that one tenant can't fill with its own values."""

from collections import OrderedDict
from collections.abc import Hashable
from dataclasses import dataclass
from typing import Generic, TypeVar

from services.common.sharing.shares import Shares

__all__ = ["TenantCache"]

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")


@dataclass(frozen=True, slots=True)
class _Entry(Generic[V]):
    """A cached value."""

    value: V
    tenant: str
    size: int


class TenantCache(Generic[K, V]):
    """Values by key. A full cache evicts the least recently used value of the largest tenant."""

    def __init__(self, most_bytes: int, most_values: int | None = None) -> None:
        self._most_values = most_values
        self._most_bytes = most_bytes
        self._shares = Shares(most_bytes)
        self._entries: OrderedDict[K, _Entry[V]] = OrderedDict()
        """Entries by key, the least recently used first"""

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, key: K) -> bool:
        return key in self._entries

    @property
    def size(self) -> int:
        """Bytes of all values."""
        return self._shares.held

    @property
    def oldest(self) -> tuple[K, V] | None:
        """The least recently used value; None in an empty cache."""
        for key, entry in self._entries.items():
            return key, entry.value
        return None

    def get(self, key: K) -> V | None:
        """Return a value and count this as a use; None if it is not cached."""
        if key not in self._entries:
            return None
        self._entries.move_to_end(key)
        return self._entries[key].value

    def put(self, tenant: str, key: K, value: V, size: int) -> list[V]:
        """Add or replace a value; return those that it displaces.

        A value that is larger than the cache displaces all others.
        """
        self.drop(key)
        self._shares.add(tenant, size)
        displaced = []
        while self._entries and self._is_full:
            displaced.append(self._evict())
        self._entries[key] = _Entry(value, tenant, size)
        return displaced

    def drop(self, key: K) -> V | None:
        """Drop a value and return it; None if it is not cached."""
        if (entry := self._entries.pop(key, None)) is None:
            return None
        self._shares.add(entry.tenant, -entry.size)
        return entry.value

    @property
    def _is_full(self) -> bool:
        """True if the cache has no room for a value that `_shares` counts already."""
        has_most = self._most_values is not None and len(self) >= self._most_values
        return has_most or self.size > self._most_bytes

    def _evict(self) -> V:
        tenants = {entry.tenant for entry in self._entries.values()}
        largest = max(tenants, key=self._shares.of)
        entries = self._entries.items()
        key = next(key for key, entry in entries if entry.tenant == largest)
        entry = self._entries.pop(key)
        self._shares.add(largest, -entry.size)
        return entry.value
