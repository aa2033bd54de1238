"""Progress of weight loading: a bar on a terminal, log lines elsewhere."""

import logging
import sys
import time

__all__ = ["LoadProgress"]

_LOG = logging.getLogger("loop")
_WIDTH = 30
_LINE_SECONDS = 10.0
"""Seconds between two log lines; a quick load has none"""


class LoadProgress:
    """Counter of loaded bytes, which is silent unless `shown`."""

    def __init__(self, total_bytes: int, *, shown: bool) -> None:
        self._total = max(total_bytes, 1)
        self._loaded = 0
        self._shown = shown
        self._terminal = sys.stderr.isatty()
        self._started = self._logged_at = time.monotonic()

    def add(self, num_bytes: int) -> None:
        self._loaded += num_bytes
        if not self._shown:
            return
        if self._terminal:
            self._draw()
        elif (now := time.monotonic()) - self._logged_at >= _LINE_SECONDS:
            self._logged_at = now
            share = round(self._loaded / self._total, 3)
            _LOG.info("loaded %s", self._amount(), extra={"progress": share})

    def finish(self) -> None:
        """End the bar's line. Call it after failed loads too."""
        if self._shown and self._terminal:
            print(file=sys.stderr)

    def _draw(self) -> None:
        filled = _WIDTH * self._loaded // self._total
        bar = "█" * filled + "░" * (_WIDTH - filled)
        print(f"\rloading {bar} {self._amount()}", end="", file=sys.stderr, flush=True)

    def _amount(self) -> str:
        seconds = time.monotonic() - self._started
        return f"{self._loaded / 1e6:,.0f} of {self._total / 1e6:,.0f} MB in {seconds:.1f} s"
