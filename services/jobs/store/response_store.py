"""Store of responses: in memory, or in a SQLite file that survives a restart."""

import itertools
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import grpc

from services.jobs.store.database_guard import DatabaseGuard, connect
from services.jobs.store.store_thread import StoreThread
from tokenwire.errors import ServiceError

__all__ = ["ResponseStore", "StoredResponse"]

_PART = "responses"
_MOST_BYTES = 16 * 1024 * 1024  # of a response; decoding it delays all streams by up to 0.2 s
_SCHEMA = """
CREATE TABLE IF NOT EXISTS responses (
    number INTEGER PRIMARY KEY AUTOINCREMENT,
    id TEXT NOT NULL UNIQUE,
    owner TEXT NOT NULL,
    created REAL NOT NULL,
    response BLOB NOT NULL,
    input BLOB NOT NULL,
    context BLOB NOT NULL,
    bytes INTEGER NOT NULL
);
CREATE INDEX IF NOT EXISTS responses_of_owner ON responses (owner, number, id, bytes);
CREATE TABLE IF NOT EXISTS running (id TEXT PRIMARY KEY)
"""


@dataclass(frozen=True, slots=True)
class StoredResponse:
    """A response, and what a next one needs to continue it."""

    id: str
    owner: str
    """Owner: the API key, or the tenant on a server without keys"""
    response: bytes
    """The response as JSON"""
    input: bytes
    """JSON array of its input's items"""
    context: bytes
    """JSON array of all items up to its output: those before its input, its input, its output"""
    is_running: bool = False
    """True while it runs in the background and has no output"""

    @property
    def size(self) -> int:
        return len(self.response) + len(self.input) + len(self.context)


class ResponseStore:
    """A bounded store, whose oldest responses give way to new ones: those of who has most first.

    Any thread may call its methods; coroutines call them through `thread`.
    """

    def __init__(self, path: str, max_bytes: int, seconds: float) -> None:
        """path: of the file; empty = memory. seconds: how long a response is kept.

        Raises sqlite3.Error if the file can't be opened.
        """
        self.thread = StoreThread(_PART)
        self.guard = DatabaseGuard(_PART)
        self._max_bytes = max_bytes
        self._seconds = seconds
        self._database = connect(path or ":memory:", _SCHEMA)
        self._database.execute("PRAGMA synchronous = NORMAL")
        if path:
            self.guard.guard(Path(path))
        [[self._bytes]] = self._database.execute("SELECT coalesce(sum(bytes), 0) FROM responses")

    def put(self, stored: StoredResponse) -> bool:
        """Keep a response, in place of what is kept of it.

        Returns False if it is too large. Raises ALREADY_EXISTS if another owner's response has its
        id, and StoreUnavailableError.
        """
        if stored.size > min(self._max_bytes, _MOST_BYTES):
            return False
        self._require_owner(stored)
        self._write(stored)
        return True

    def _require_owner(self, stored: StoredResponse) -> None:
        with self.guard.used():
            found = self._database.execute(
                "SELECT 1 FROM responses WHERE id = ? AND owner <> ?", (stored.id, stored.owner)
            ).fetchone()
        if found is not None:
            message = f"The id {stored.id!r} is taken."
            raise ServiceError(grpc.StatusCode.ALREADY_EXISTS, "RESPONSE_EXISTS", message)

    def get(self, identity: str, owner: str) -> StoredResponse:
        """Return an owner's response. Raises NOT_FOUND and StoreUnavailableError."""
        with self.guard.used():
            found = self._database.execute(
                "SELECT response, input, context, id IN running FROM responses "
                "WHERE id = ? AND owner = ? AND created > ?",
                (identity, owner, time.time() - self._seconds),
            ).fetchone()
        if found is None:
            raise _unknown(identity)
        response, asked, context, is_running = found
        return StoredResponse(identity, owner, response, asked, context, bool(is_running))

    def interrupted(self) -> list[StoredResponse]:
        """Return the running responses; after a start, an earlier process has left them.

        Raises StoreUnavailableError.
        """
        with self.guard.used():
            found = self._database.execute(
                "SELECT id, owner, response, input, context, 1 FROM responses WHERE id IN running"
            ).fetchall()
        return [StoredResponse(*each) for each in found]

    def delete(self, identity: str, owner: str) -> None:
        """Drop an owner's response. Raises NOT_FOUND and StoreUnavailableError."""
        self.get(identity, owner)
        with self._change():
            self._drop(identity)

    def close(self) -> None:
        self.thread.close()
        self._database.close()

    @contextmanager
    def _change(self) -> Iterator[None]:
        """Change the store as a whole, or not at all if the block raises or the process ends."""
        with self.guard.used():
            before = self._bytes
            self._database.execute("BEGIN IMMEDIATE")
            try:
                yield
                self._database.execute("COMMIT")
            except BaseException:
                self._bytes = before
                if self._database.in_transaction:
                    self._database.execute("ROLLBACK")
                raise

    def _write(self, stored: StoredResponse) -> None:
        with self._change():
            self._drop(stored.id)
            self._drop_expired()
            self._make_room(stored)
            self._database.execute(
                "INSERT INTO responses (id, owner, created, response, input, context, bytes) "
                "VALUES (?, ?, ?, ?, ?, ?, ?)",
                (
                    *(stored.id, stored.owner, time.time()),
                    *(stored.response, stored.input, stored.context, stored.size),
                ),
            )
            self._bytes += stored.size
            if stored.is_running:
                self._database.execute("INSERT INTO running (id) VALUES (?)", (stored.id,))

    def _drop(self, identity: str) -> None:
        dropped = self._database.execute(
            "DELETE FROM responses WHERE id = ? RETURNING bytes", (identity,)
        ).fetchall()
        self._bytes -= sum(size for [size] in dropped)
        self._database.execute("DELETE FROM running WHERE id = ?", (identity,))

    def _drop_expired(self) -> None:
        expired = time.time() - self._seconds
        oldest = self._database.execute("SELECT id, created FROM responses ORDER BY number")
        drops = itertools.takewhile(lambda row: row[1] <= expired, oldest)
        for identity in [identity for identity, _ in drops]:
            self._drop(identity)

    def _make_room(self, new: StoredResponse) -> None:
        """Drop the oldest response of the owner that has most, until there is room for a new one.

        An owner that keeps much thus displaces its own responses.
        """
        if self._bytes + new.size <= self._max_bytes:
            return
        sizes = dict(
            self._database.execute("SELECT owner, sum(bytes) FROM responses GROUP BY owner")
        )
        while sizes and self._bytes + new.size > self._max_bytes:
            added = {new.owner: new.size}
            owner = max(sizes, key=lambda each: sizes[each] + added.get(each, 0))
            oldest = self._database.execute(
                "SELECT id, bytes FROM responses WHERE owner = ? ORDER BY number LIMIT 1", (owner,)
            ).fetchone()
            if oldest is None:
                del sizes[owner]
                continue
            identity, size = oldest
            sizes[owner] -= size
            self._drop(identity)


def _unknown(identity: str) -> ServiceError:
    return ServiceError(
        grpc.StatusCode.NOT_FOUND,
        "RESPONSE_NOT_FOUND",
        f"There is no response {identity!r}, or it is kept no longer.",
    )
