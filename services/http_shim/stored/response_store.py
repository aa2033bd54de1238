"""Store of responses: in memory, or in a SQLite file that survives a restart."""

import logging
import sqlite3
import threading
import time
from dataclasses import dataclass

import grpc

from tokenwire.errors import ServiceError

__all__ = ["ResponseStore", "StoredResponse"]

_LOG = logging.getLogger("responses")
_MOST_BYTES = 16 * 1024 * 1024  # of a response; reading it delays all streams by some milliseconds
_SCHEMA = """
CREATE TABLE IF NOT EXISTS responses (
    number INTEGER PRIMARY KEY AUTOINCREMENT,
    id TEXT NOT NULL UNIQUE,
    tenant TEXT NOT NULL,
    created REAL NOT NULL,
    response BLOB NOT NULL,
    input BLOB NOT NULL,
    context BLOB NOT NULL,
    bytes INTEGER NOT NULL
)
"""


@dataclass(frozen=True, slots=True)
class StoredResponse:
    """A response, and what a next one needs to continue it."""

    id: str
    tenant: str
    """Tenant that may read it"""
    response: bytes
    """The response as JSON"""
    input: bytes
    """JSON array of its input's items"""
    context: bytes
    """JSON array of all items up to its output: those before its input, its input, its output"""

    @property
    def size(self) -> int:
        return len(self.response) + len(self.input) + len(self.context)


class ResponseStore:
    """A bounded store; the oldest responses give way to new ones. Safe to use from any thread."""

    def __init__(self, path: str, max_bytes: int, seconds: float) -> None:
        """path: of the file; empty = memory. seconds: how long a response is kept.

        Raises sqlite3.Error if the file can't be opened.
        """
        self._lock = threading.Lock()
        self._max_bytes = max_bytes
        self._seconds = seconds
        self._database = sqlite3.connect(
            path or ":memory:", isolation_level=None, check_same_thread=False
        )
        self._database.execute("PRAGMA journal_mode = WAL")
        self._database.execute("PRAGMA synchronous = NORMAL")
        self._database.execute(_SCHEMA)
        [[self._bytes]] = self._database.execute("SELECT coalesce(sum(bytes), 0) FROM responses")

    def put(self, stored: StoredResponse) -> bool:
        """Keep a response; return False if it is too large, or can't be written."""
        if stored.size > min(self._max_bytes, _MOST_BYTES):
            return False
        try:
            self._write(stored)
        except sqlite3.Error as error:  # the answer itself is complete
            _LOG.warning("could not keep a response: %s", error)
            return False
        return True

    def get(self, identity: str, tenant: str) -> StoredResponse:
        """Return a tenant's response. Raises NOT_FOUND."""
        with self._lock:
            found = self._database.execute(
                "SELECT response, input, context FROM responses "
                "WHERE id = ? AND tenant = ? AND created > ?",
                (identity, tenant, time.time() - self._seconds),
            ).fetchone()
        if found is None:
            raise _unknown(identity)
        return StoredResponse(identity, tenant, *found)

    def delete(self, identity: str, tenant: str) -> None:
        """Drop a tenant's response. Raises NOT_FOUND."""
        stored = self.get(identity, tenant)
        with self._lock:
            gone = self._database.execute("DELETE FROM responses WHERE id = ?", (identity,))
            self._bytes -= stored.size if gone.rowcount else 0

    def close(self) -> None:
        self._database.close()

    def _write(self, stored: StoredResponse) -> None:
        with self._lock:
            self._drop_oldest(self._max_bytes - stored.size)
            self._database.execute(
                "INSERT INTO responses (id, tenant, created, response, input, context, bytes) "
                "VALUES (?, ?, ?, ?, ?, ?, ?)",
                (
                    *(stored.id, stored.tenant, time.time()),
                    *(stored.response, stored.input, stored.context, stored.size),
                ),
            )
            self._bytes += stored.size

    def _drop_oldest(self, max_bytes: int) -> None:
        """Drop expired responses, and the oldest until the others have `max_bytes`."""
        oldest = self._database.execute(
            "SELECT number, created, bytes FROM responses ORDER BY number"
        )
        expired, drops = time.time() - self._seconds, []
        for number, created, size in oldest:
            if created > expired and self._bytes <= max_bytes:
                break
            drops.append((number,))
            self._bytes -= size
        self._database.executemany("DELETE FROM responses WHERE number = ?", drops)


def _unknown(identity: str) -> ServiceError:
    return ServiceError(
        grpc.StatusCode.NOT_FOUND,
        "RESPONSE_NOT_FOUND",
        f"There is no response {identity!r}, or it is kept no longer.",
    )
