"""Times at which refused requests should be sent again, so that they find a place."""

import time
from collections.abc import Callable

__all__ = ["RetryClock"]

_MEMORY = 32
"""Number of sequences over which the mean length is taken"""
_MARGIN = 1.25
"""Factor on the time of a sequence, because the engine may get slower"""
_LEAST_SECONDS = 1.0
_MOST_SECONDS = 300.0
"""Longest delay in seconds, which bounds the effect of clients that do not come again"""


class RetryClock:
    """Clock of turns: a refused request gets one after the queue and all requests refused before.

    With equal delays, the clients would come at the same time, and most would be refused again.
    The clock reserves nothing: if a client does not come again, others use its turn.
    """

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self._mean_tokens = 0.0
        """Mean number of tokens of a sequence; 0 before the first sequence has ended"""
        self._next_turn = 0.0
        """Time of the last turn that was given"""

    def on_finished(self, tokens: int) -> None:
        """Record the length of a sequence that has ended."""
        if not self._mean_tokens:
            self._mean_tokens = float(max(1, tokens))
        self._mean_tokens += (max(1, tokens) - self._mean_tokens) / _MEMORY

    def turn(self, sequences: int, waiting: int, tokens_per_second: float) -> float:
        """Return the seconds after which a request of `sequences` sequences should come again.

        waiting: sequences in the queue. tokens_per_second: present rate of generation.
        """
        now = self._now()
        if not (self._mean_tokens and tokens_per_second):
            return _LEAST_SECONDS  # nothing is known yet
        # from the end of a sequence to that of the next one
        seconds = _MARGIN * self._mean_tokens / tokens_per_second
        begin = max(self._next_turn, now + waiting * seconds)
        self._next_turn = min(begin + sequences * seconds, now + _MOST_SECONDS)
        return max(self._next_turn - now, _LEAST_SECONDS)
