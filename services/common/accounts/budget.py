"""Budget of an API key: the tokens that it may use in a calendar month (UTC)."""

import grpc

from services.common.accounts.ledger import UsageLedger
from services.common.accounts.usage import next_month
from tokenwire.errors import ServiceError

__all__ = ["Budget"]


class Budget:
    """Tokens of a month, from which running requests hold what they may use."""

    __slots__ = ("_held", "_key", "_ledger", "limit")

    def __init__(self, key: str, ledger: UsageLedger) -> None:
        """key: id of the API key."""
        self.limit: int | None = None
        """Most tokens of a month; None = any number"""
        self._key = key
        self._ledger = ledger
        self._held = 0

    @property
    def used(self) -> int:
        """Tokens that the key has used in this month, as far as this process knows."""
        return self._ledger.month_tokens(self._key)

    async def hold(self, tokens: int) -> int:
        """Hold tokens of a request that starts, and return their number; `release` ends it.

        Raises RESOURCE_EXHAUSTED if the budget has fewer.
        """
        if self.limit is None:
            return 0
        await self._ledger.learn(self._key)
        left = self.limit - self.used - self._held
        if left <= 0 or tokens > left:
            raise _exhausted(self.limit, max(0, left), tokens)
        self._held += tokens
        return tokens

    def release(self, held: int) -> None:
        """Give back what `hold` returned."""
        self._held -= held

    def headers(self) -> dict[str, str]:
        """Return the headers of an answer: the budget, what is left of it, and its end."""
        if self.limit is None:
            return {}
        left = max(0, self.limit - self.used - self._held)
        return {
            "x-ratelimit-limit-month-tokens": str(self.limit),
            "x-ratelimit-remaining-month-tokens": str(left),
            "x-ratelimit-reset-month-tokens": next_month().strftime("%Y-%m-%dT%H:%M:%SZ"),
        }


def _exhausted(limit: int, left: int, tokens: int) -> ServiceError:
    """Return the error, which asks for no retry: the budget may begin anew weeks later."""
    reset = f"{next_month().date().isoformat()} (UTC)"
    budget = f"This key's budget of {limit:,} tokens a month"
    message = f"{budget} is used up; it begins anew on {reset}."
    if left:
        message = (
            f"{budget} has {left:,} left until {reset}, and this request may use {tokens:,}: "
            "lower its max_tokens or shorten its prompt."
        )
    return ServiceError(grpc.StatusCode.RESOURCE_EXHAUSTED, "INSUFFICIENT_QUOTA", message)
