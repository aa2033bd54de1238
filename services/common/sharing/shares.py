"""Shares of the tenants in a bounded resource, such as bytes or places."""

from collections import Counter

__all__ = ["Shares"]


class Shares:
    """Amounts that tenants hold of one total.

    A tenant may hold at most as much as stays free afterwards, so that a newcomer always finds
    room (dynamic thresholds: Choudhury and Hahne, 1998). The empty tenant, that of a server without
    keys, may hold the whole total.
    """

    def __init__(self, total: int, *, reserve: int = 0, least: int = 1) -> None:
        """reserve: amount that counts as free in addition; with reserve = total, a tenant that is
        alone may hold the whole total instead of half.

        least: amount that each tenant may hold if it is free, whatever the tenant's share.
        """
        self._total = total
        self._reserve = reserve
        self._least = least
        self._of: Counter[str] = Counter()
        self.held = 0
        """Amount of all tenants together"""

    def of(self, tenant: str) -> int:
        """Return the amount that a tenant holds."""
        return self._of[tenant]

    def has_room(self, tenant: str, more: int) -> bool:
        """Return whether a tenant may hold that much more."""
        if not tenant:
            return self.held + more <= self._total
        left = self._total + self._reserve - self.held - more
        return left >= 0 and self._of[tenant] + more <= max(min(left, self._total), self._least)

    def add(self, tenant: str, more: int) -> None:
        """Add to the amount that a tenant holds; a negative amount is given back."""
        self.held += more
        self._of[tenant] += more
        if not self._of[tenant]:
            del self._of[tenant]
