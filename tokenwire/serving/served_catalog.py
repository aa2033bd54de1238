"""Catalog in force: its plan, the file for the services that read it, and the scans of folders."""

import asyncio
import time
from pathlib import Path

from services.common.model_files.catalog_file import write_catalog
from tokenwire.serving.stack_layout import CatalogPlan

__all__ = ["ServedCatalog"]

_SCAN_SECONDS = 2.0
"""Least time between two scans of the model folders"""


class ServedCatalog:
    """The catalog that a server serves now."""

    def __init__(self, file: Path, plan: CatalogPlan) -> None:
        """file: the resolved catalog, which shim and jobs read."""
        self.plan = plan
        self.scanning = asyncio.Lock()
        self.has_changed = False
        """True if the last scan has found other models than before"""
        self._file = file
        self._scanned_at = time.monotonic()

    def publish(self, plan: CatalogPlan) -> None:
        """Write the catalog for its readers."""
        self.plan = plan
        write_catalog(self._file, plan.models)

    def is_old(self) -> bool:
        """Return whether the folders may be scanned again."""
        return time.monotonic() - self._scanned_at >= _SCAN_SECONDS

    def note_scan(self, *, has_changed: bool) -> None:
        self._scanned_at = time.monotonic()
        self.has_changed = has_changed
