"""Guard of a store's database: its lock between threads, its errors, and its file."""

import logging
import os
import sqlite3
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import grpc

from services.common.faults import begin_fault, end_fault
from tokenwire.errors import ServiceError

__all__ = ["DatabaseGuard", "StoreUnavailableError", "connect"]

_LOG = logging.getLogger("stored")
_OPEN_SECONDS, _LOCK_SECONDS = 5.0, 0.2
"""Longest waits for the lock of another process: at the opening, and later"""

_REASONS = {
    "files": "FILES_UNAVAILABLE",
    "responses": "RESPONSES_UNAVAILABLE",
    "usage": "USAGE_UNAVAILABLE",
}


class StoreUnavailableError(ServiceError):
    """A store can't be read or written now."""

    def __init__(self, part: str, why: str = "") -> None:
        """part: name of the store. why: a sentence."""
        message = why or f"The server's store of {part} can't be used now; try again."
        super().__init__(grpc.StatusCode.UNAVAILABLE, _REASONS[part], message, retry_seconds=1)


class DatabaseGuard:
    """Lets one thread at a time use a database, and raises StoreUnavailableError for its errors."""

    def __init__(self, part: str) -> None:
        """part: name of the store in errors, in the log, and among the faults of the process."""
        self._part = part
        self._lock = threading.RLock()
        self._check_lock = threading.Lock()
        self._path: Path | None = None
        self._inode: tuple[int, int] | None = None
        self._is_lost = False
        self._problem = ""
        """The last error, while it is the same"""

    def guard(self, path: Path) -> None:
        """Refuse to use the database once its file is no longer this one."""
        self._path, self._inode = path, _inode(path)

    @contextmanager
    def used(self) -> Iterator[None]:
        """Use the database in the block. Raises StoreUnavailableError."""
        try:
            with self._lock:
                if not self.check():
                    raise StoreUnavailableError(self._part, self._loss())
                yield
        except (OSError, sqlite3.Error) as error:
            if self._problem != str(error):
                _LOG.error("the store of %s can't be used: %s", self._part, error)
            self._problem = str(error)
            raise StoreUnavailableError(self._part) from None
        else:
            self._problem = ""

    def check(self) -> bool:
        """Return whether the file is still there; note a loss, and its end, as a fault.

        What is written to a removed file is lost when the process ends. Any thread may call it.
        """
        with self._check_lock:
            is_lost = self._path is not None and _inode(self._path) != self._inode
            if is_lost != self._is_lost:
                self._is_lost = is_lost
                if is_lost:
                    _LOG.error("%s", self._loss())
                    begin_fault(self._part)
                else:
                    end_fault(self._part)
        return not is_lost

    def _loss(self) -> str:
        return (
            f"The server's store of {self._part} was removed or replaced while the server ran; "
            "the operator must put it back, or restart the server."
        )


def connect(path: Path | str, schema: str) -> sqlite3.Connection:
    """Open a database, or make it. Any thread may use the connection. Raises sqlite3.Error."""
    database = sqlite3.connect(
        path, timeout=_OPEN_SECONDS, isolation_level=None, check_same_thread=False
    )
    database.execute("PRAGMA journal_mode = WAL")
    database.executescript(schema)
    database.execute(f"PRAGMA busy_timeout = {_LOCK_SECONDS * 1000:.0f}")
    return database


def _inode(path: Path) -> tuple[int, int] | None:
    try:
        found = os.stat(path)
    except OSError:
        return None
    return found.st_dev, found.st_ino
