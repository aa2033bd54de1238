"""Progress of the steps of a start that take seconds: a bar on a terminal, log lines elsewhere."""

import logging
import sys
import time

__all__ = ["StartProgress"]

_LOG = logging.getLogger("loop")
_WIDTH = 30
_LINE_SECONDS = 10.0
"""Seconds between two log lines; a quick start has none"""


class StartProgress:
    """Counter of finished items. It prints nothing unless `shown`."""

    def __init__(self, name: str, total: int, *, shown: bool) -> None:
        """name: name of the counted items, such as "CUDA graphs"."""
        self._name = name
        self._total = max(total, 1)
        self._done = 0
        self._shown = shown
        self._terminal = sys.stderr.isatty()
        self._started = self._logged_at = time.monotonic()

    def add(self) -> None:
        """Count one more item."""
        self._done += 1
        if not self._shown:
            return
        now = time.monotonic()
        if self._terminal:
            filled = _WIDTH * self._done // self._total
            bar = "█" * filled + "░" * (_WIDTH - filled)
            end = "\n" if self._done == self._total else ""
            print(f"\r{self._name} {bar} {self._amount()}", end=end, file=sys.stderr, flush=True)
        elif now - self._logged_at >= _LINE_SECONDS:
            self._logged_at = now
            share = round(self._done / self._total, 3)
            _LOG.info("%s: %s", self._name, self._amount(), extra={"progress": share})

    def _amount(self) -> str:
        return f"{self._done} of {self._total} in {time.monotonic() - self._started:.1f} s"
