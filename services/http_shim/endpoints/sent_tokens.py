"""Tokens of a stream that were sent: counted, and their times measured."""

from services.http_shim.http.exchange import Exchange
from services.http_shim.metrics import FIRST_TOKEN_SECONDS, INTER_TOKEN_SECONDS

__all__ = ["SentTokens"]


class SentTokens:
    """Counts the tokens of each choice, and observes the times between them."""

    def __init__(self, exchange: Exchange) -> None:
        self._exchange = exchange
        self._first_token_seconds = FIRST_TOKEN_SECONDS.labels(exchange.model)
        self._inter_token_seconds = INTER_TOKEN_SECONDS.labels(exchange.model)
        self._sent: dict[int, int] = {}
        self._times: dict[int, float] = {}
        """Time of the last token, by choice"""
        self.most = 0
        """Tokens of the choice with the most"""

    def count(self, index: int, new: int, now: float) -> None:
        """Count new tokens of a choice at a time of the monotonic clock, in seconds."""
        if not new:
            return
        before = self._times.get(index)
        if before is not None:
            self._inter_token_seconds.observe((now - before) / new)
        elif not self._times:
            self._first_token_seconds.observe(now - self._exchange.began)
        self._times[index] = now
        self._exchange.completion_tokens += new
        total = self._sent[index] = self._sent.get(index, 0) + new
        if total > self.most:
            self.most = total

    def end(self, index: int, total: int) -> None:
        """Count the tokens of an ended choice that no delta had, such as its end."""
        self._exchange.completion_tokens += total - self._sent.get(index, 0)
        self._sent[index] = total
