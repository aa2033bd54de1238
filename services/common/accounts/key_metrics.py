"""Metrics with the name of the API key as a label, of a bounded number of names."""

from typing import TYPE_CHECKING

from prometheus_client import Counter

from services.common.accounts.usage import RequestUsage

if TYPE_CHECKING:
    from services.common.accounts.account import Account

__all__ = ["KeyMetrics"]

_REQUESTS = Counter(
    "tokenwire_key_requests",
    "Ended requests by the name of their API key (--metrics-by-key).",
    ["key", "outcome"],
)
_TOKENS = Counter(
    "tokenwire_key_tokens",
    "Tokens by the name of their API key (--metrics-by-key) and kind: input, cached, output.",
    ["key", "kind"],
)
_OTHER = "other"


class KeyMetrics:
    """Requests and tokens by the name of their key; a key without a name counts by its id."""

    def __init__(self, most_names: int) -> None:
        """most_names: the names after so many others count as "other"; 0 = nothing is counted."""
        self._most_names = most_names
        self._names: set[str] = set()

    def count(self, account: "Account | None", usage: RequestUsage) -> None:
        """Count a request that has ended."""
        if not self._most_names:
            return
        name = self._label(account)
        _REQUESTS.labels(name, "error" if usage.is_error else "ok").inc()
        _TOKENS.labels(name, "input").inc(usage.input_tokens)
        _TOKENS.labels(name, "cached").inc(usage.cached_tokens)
        _TOKENS.labels(name, "output").inc(usage.output_tokens)

    def _label(self, account: "Account | None") -> str:
        if account is None:
            return ""
        name = account.name or account.id
        if name not in self._names:
            if len(self._names) >= self._most_names:
                return _OTHER
            self._names.add(name)
        return name
