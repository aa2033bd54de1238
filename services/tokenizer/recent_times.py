"""Recent times: a bounded window of measurements, and its percentiles."""

import math
from collections import deque

__all__ = ["RecentTimes", "percentile"]


class RecentTimes:
    """The measurements of the last `window_seconds`, at most the last `most`."""

    def __init__(self, window_seconds: float, most: int) -> None:
        self.window_seconds = window_seconds
        self._times: deque[tuple[float, float]] = deque(maxlen=most)

    def add(self, now: float, seconds: float) -> None:
        """Add a measurement; `now` is the time of the monotonic clock."""
        self._times.append((now, seconds))

    def sorted(self, now: float) -> list[float]:
        """Return the measurements of the window that ends at `now`, in seconds, ascending."""
        while self._times and self._times[0][0] < now - self.window_seconds:
            self._times.popleft()
        return sorted(seconds for _, seconds in self._times)


def percentile(ascending: list[float], share: float) -> float:
    """Return the least value that at least `share` of the values do not exceed; 0 without any."""
    if not ascending:
        return 0.0
    return ascending[max(0, math.ceil(share * len(ascending)) - 1)]
