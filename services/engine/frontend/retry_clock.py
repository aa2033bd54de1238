"""Times at which refused requests should come again, so that they then find a place."""

import time
from collections.abc import Callable

__all__ = ["RetryClock"]

_MEMORY = 32
"""Sequences over which the mean length is taken"""
_MARGIN = 1.25
"""Factor on the time of a sequence, since the engine may get slower meanwhile"""
_LEAST_SECONDS = 1.0
_MOST_SECONDS = 300.0
"""Longest delay, in seconds: clients that never come again delay the others no longer"""


class RetryClock:
    """Gives each refused request a turn after the queue, and after those refused before it.

    If all were told the same time, they would come together and most would be refused again. The
    clock reserves nothing: a client that stays away leaves its turn to others.
    """

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self._mean_tokens = 0.0
        """Tokens of a sequence; 0 before the first one has ended"""
        self._next_turn = 0.0
        """Time at which all who were refused have come again"""

    def on_finished(self, tokens: int) -> None:
        """Note the length of a sequence that has ended."""
        if not self._mean_tokens:
            self._mean_tokens = float(max(1, tokens))
        self._mean_tokens += (max(1, tokens) - self._mean_tokens) / _MEMORY

    def turn(self, sequences: int, waiting: int, tokens_per_second: float) -> float:
        """Return the seconds after which a request of so many sequences should come again.

        waiting: sequences in the queue. tokens_per_second: what the engine generates now.
        """
        now = self._now()
        if not (self._mean_tokens and tokens_per_second):
            return _LEAST_SECONDS  # nothing is known yet
        # from the end of a sequence to that of the next one
        seconds = _MARGIN * self._mean_tokens / tokens_per_second
        begin = max(self._next_turn, now + waiting * seconds)
        self._next_turn = min(begin + sequences * seconds, now + _MOST_SECONDS)
        return max(self._next_turn - now, _LEAST_SECONDS)
