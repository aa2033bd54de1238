"""A count of an engine's work, of which this process knows its own part exactly."""

__all__ = ["SharedCount"]


class SharedCount:
    """What an engine reports now and then, corrected by what this process has added and ended.

    A report contains work of this process that may have ended meanwhile. So the part of others is
    what it has above the most that this process had there since the report before.
    """

    def __init__(self) -> None:
        self._own = 0
        self._most = 0
        """Most of `_own` since the last report"""
        self._others = 0

    @property
    def total(self) -> int:
        """The count now, as far as this process knows."""
        return self._others + self._own

    def add(self, count: int) -> None:
        """Add work of this process; a negative count ends some."""
        self._own += count
        self._most = max(self._most, self._own)

    def report(self, total: int) -> None:
        """Take a report of the engine."""
        self._others = max(0, total - self._most)
        self._most = self._own
