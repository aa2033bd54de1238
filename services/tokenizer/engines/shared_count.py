"""Count of an engine's work: its last report, and what this process has added since."""

__all__ = ["SharedCount"]


class SharedCount:
    """The last report of an engine, corrected by the work that this process added and ended since.

    A report contains work of this process that may have ended meanwhile. So the work of others is
    the report less the most work that this process had there since the previous report.
    """

    def __init__(self) -> None:
        self._own = 0
        self._most = 0
        """Maximum of `_own` since the last report"""
        self._others = 0

    @property
    def total(self) -> int:
        """Current count, as far as this process knows."""
        return self._others + self._own

    def add(self, count: int) -> None:
        """Add work of this process; a negative count subtracts ended work."""
        self._own += count
        self._most = max(self._most, self._own)

    def report(self, total: int) -> None:
        """Take a report of the engine."""
        self._others = max(0, total - self._most)
        self._most = self._own
