"""Progress of a download from a hub, in bytes."""

import time
from collections.abc import Callable
from typing import Any, TypeAlias

from tqdm.auto import tqdm  # type: ignore[import-untyped]

__all__ = ["Report", "reporting_bars"]

Report: TypeAlias = Callable[[int, int], None]
"""Takes the bytes that are there, and those of all files that are known"""
_INTERVAL_SECONDS = 0.2


def reporting_bars(total: int, report: Report) -> type[Any]:
    """Return a class of progress bars for huggingface_hub, which report instead of being drawn.

    Several bars count the bytes of a download in different ways; the fullest one is reported.
    total: bytes of the download; the bars know a file's only once it begins.
    """
    last = 0.0
    seen = 0

    class ReportingBar(tqdm):  # type: ignore[misc]  # it has no types
        def __init__(self, *args: Any, **fields: Any) -> None:
            self._counts_bytes = fields.get("unit") == "B"
            fields.pop("name", None)
            super().__init__(*args, **fields | {"disable": True})

        def update(self, n: float | None = 1) -> None:
            nonlocal last, seen
            self.n += n or 0
            now = time.monotonic()
            if self._counts_bytes and self.n > seen and now - last >= _INTERVAL_SECONDS:
                last, seen = now, int(self.n)
                report(min(seen, total), total)

    return ReportingBar
