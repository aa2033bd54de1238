"""Store of files and batches: SQLite for what is known of them, a folder for their content."""

import logging
import re
import secrets
import sqlite3
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from functools import cached_property, wraps
from pathlib import Path
from typing import Any, BinaryIO, Concatenate, Literal, ParamSpec, TypeVar

import grpc
import msgspec

from services.common.temporary_folder import TemporaryFolder
from services.jobs.store.database_guard import DatabaseGuard, connect
from services.jobs.store.store_thread import StoreThread
from tokenwire.errors import ServiceError, invalid

__all__ = [
    "PAGE_BYTES",
    "BatchStatus",
    "FileStore",
    "InvalidLine",
    "Page",
    "StoredBatch",
    "StoredFile",
    "full",
]

_LOG = logging.getLogger("files")
BatchStatus = Literal["in_progress", "cancelling", "completed", "cancelled", "expired", "failed"]
PAGE_BYTES = 4096
_LAST = 2**63 - 1
"""Larger than the number of any row"""
_MOST_UNFINISHED = 100
"""Batches of an owner that have not ended"""
_MOST_ENDED = 1_000
"""Batches of an owner that are kept after their end"""
_PART = "files"
_STRAY_SECONDS = 3600.0
"""Age of content that no process can be about to keep any more"""
_CONTENT = re.compile("(file-|batch_)[0-9a-f]{24}(-output|-error)?")
"""Names of content; the folder may hold other things of its owner"""
_SCHEMA = """
CREATE TABLE IF NOT EXISTS files (
    number INTEGER PRIMARY KEY AUTOINCREMENT, id TEXT NOT NULL UNIQUE, owner TEXT NOT NULL,
    name TEXT NOT NULL, purpose TEXT NOT NULL, created INTEGER NOT NULL, bytes INTEGER NOT NULL
);
CREATE INDEX IF NOT EXISTS files_of_owner ON files (owner, number);
CREATE TABLE IF NOT EXISTS batches (
    number INTEGER PRIMARY KEY AUTOINCREMENT, id TEXT NOT NULL UNIQUE, owner TEXT NOT NULL,
    status TEXT NOT NULL, reserved INTEGER NOT NULL DEFAULT 0, content BLOB NOT NULL
);
CREATE INDEX IF NOT EXISTS batches_of_owner ON batches (owner, number);
CREATE INDEX IF NOT EXISTS batches_by_status ON batches (status);
"""
_UNFINISHED = "status IN ('in_progress', 'cancelling')"
_BYTES = f"""
(SELECT coalesce(sum(bytes + {PAGE_BYTES}), 0) FROM files)
+ (SELECT coalesce(sum(reserved), 0) FROM batches WHERE {_UNFINISHED})
"""
"""Bytes of all files, and of the outputs of batches that have not ended. A file takes a page of
the disk at least"""
_BYTES_OF_OWNER = _BYTES.replace("FROM files", "FROM files WHERE owner = :owner").replace(
    _UNFINISHED, f"owner = :owner AND {_UNFINISHED}"
)
"""The same of one owner"""
_FILE = "id, owner, name, purpose, created, bytes"
P = ParamSpec("P")
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class StoredFile:
    """A file of an owner: an API key, or a tenant on a server without keys."""

    id: str
    owner: str
    name: str
    purpose: str
    created: int
    """Unix time in seconds"""
    bytes: int


@dataclass(frozen=True, slots=True)
class InvalidLine:
    """A line of a batch that is no request."""

    line: int
    """Number of the line, from 1"""
    message: str


@dataclass(frozen=True, slots=True)
class StoredBatch:
    """A batch. Times are Unix times in seconds; None = not reached."""

    id: str
    tenant: str
    """Tenant whose prefix cache its requests use"""
    account: str
    """Id of the API key that made it; empty = the server has no keys"""
    endpoint: str
    input_file: str
    """Id of its file"""
    metadata: dict[str, str]
    created: int
    expires: int
    status: BatchStatus = "in_progress"
    output_file: str | None = None
    error_file: str | None = None
    ended: int | None = None
    cancelled: int | None = None
    """Time of the wish to cancel it"""
    total: int = 0
    answered: int = 0
    failed: int = 0
    problem: str = ""
    """Reason of its failure, a sentence; empty = it did not fail"""
    reason: str = ""
    """Reason of that failure as errors have it, such as INVALID_FILE"""
    line: int | None = None
    """Line of its input at fault"""
    invalid_lines: tuple[InvalidLine, ...] = ()
    """First lines of its input that are no requests"""

    @property
    def owner(self) -> str:
        """The API key, or the tenant on a server without keys."""
        return self.account or self.tenant


@dataclass(frozen=True, slots=True)
class Page:
    """A part of a list."""

    limit: int
    after: str | None = None
    """Id of the item before it; None = the list begins with it"""
    is_ascending: bool = False
    """True if the oldest item is the first"""


def _uses_database(
    method: Callable[Concatenate["FileStore", P], T],
) -> Callable[Concatenate["FileStore", P], T]:
    """Let one thread at a time run a method, which raises StoreUnavailableError."""

    @wraps(method)
    def guarded(self: "FileStore", /, *args: P.args, **kwargs: P.kwargs) -> T:
        with self.guard.used():
            return method(self, *args, **kwargs)

    return guarded


class FileStore:
    """Files and batches, each of an owner.

    Its methods raise StoreUnavailableError. Any thread may call them; coroutines call them through
    `thread`.
    """

    def __init__(self, folder: str, max_bytes: int) -> None:
        """folder: empty = a temporary one, made when it is needed, which `close` removes.

        max_bytes: of all files, and of the outputs that batches write; each owner gets a share.
        Raises OSError and sqlite3.Error.
        """
        self.thread = StoreThread(_PART)
        self.guard = DatabaseGuard(_PART)
        self._temporary: TemporaryFolder | None = None
        self._place = folder
        self._max_bytes = max_bytes
        if folder:
            Path(folder).mkdir(parents=True, exist_ok=True)
            _ = self._database

    @cached_property
    def _folder(self) -> Path:
        if self._place:
            return Path(self._place)
        self._temporary = TemporaryFolder("files")
        return self._temporary.path

    @cached_property
    def _database(self) -> sqlite3.Connection:
        path = self._folder / "files.sqlite"
        database = connect(path, _SCHEMA)
        self.guard.guard(path)
        return database

    @_uses_database
    def _room_of(self, owner: str) -> int:
        """Return the bytes that an owner may add: so many that as many as it then has stay free.

        The empty owner, that of a server without keys, may add all that is free.
        """
        [[total, own]] = self._database.execute(
            f"SELECT {_BYTES}, {_BYTES_OF_OWNER}", {"owner": owner}
        )
        left: int = self._max_bytes - total
        return (left - own) // 2 if owner else left

    @property
    def is_open(self) -> bool:
        """False while a temporary folder has not been needed."""
        return "_database" in self.__dict__

    def close(self) -> None:
        self.thread.close()
        if not self.is_open:
            return
        self._database.close()
        if self._temporary is not None:
            self._temporary.remove()

    @_uses_database
    def remove_strays(self) -> None:
        """Remove the content that killed processes left, which no file and no batch owns."""
        written = [path for path in self._folder.iterdir() if _CONTENT.fullmatch(path.name)]
        owned = {identity for [identity] in self._database.execute("SELECT id FROM files")}
        owned.update(batch.id for batch in self.unfinished())
        for path in written:
            is_old = time.time() - path.lstat().st_mtime > _STRAY_SECONDS
            if is_old and path.name not in owned:
                _LOG.warning("removing %s, which nothing owns", path)
                path.unlink()

    # Files.

    def path(self, identity: str) -> Path:
        """Return the path of a file's content, or of a batch's output while it runs."""
        return self._folder / identity

    @contextmanager
    def adding(self, owner: str, name: str, purpose: str) -> Iterator["NewFile"]:
        """Yield a new file to write to. It is kept if the block ends without an exception.

        Until then, its `stored` may get another name and purpose.
        """
        new = NewFile(StoredFile(f"file-{secrets.token_hex(12)}", owner, name, purpose, 0, 0))
        path: Path | None = None
        try:
            new.room = self._room_of(owner)
            path = self.path(new.stored.id)
            with path.open("wb") as new.content:
                yield new
            self._keep(replace(new.stored, created=int(time.time()), bytes=path.stat().st_size))
        except OSError as error:
            _LOG.error("can't keep a file: %s", error)
            raise full() from None
        else:
            path = None
        finally:
            if path is not None:
                path.unlink(missing_ok=True)

    @_uses_database
    def _keep(self, stored: StoredFile) -> None:
        self._database.execute("BEGIN IMMEDIATE")  # another process may take the room
        with self._database:
            if stored.bytes + PAGE_BYTES > self._room_of(stored.owner):
                raise full()
            self._insert(stored)

    def _insert(self, stored: StoredFile) -> None:
        self._database.execute(
            f"INSERT INTO files ({_FILE}) VALUES (:id, :owner, :name, :purpose, :created, :bytes)",
            asdict(stored),
        )

    @_uses_database
    def file(self, identity: str, owner: str) -> StoredFile:
        """Return an owner's file. Raises NOT_FOUND."""
        found = self._database.execute(
            f"SELECT {_FILE} FROM files WHERE id = ? AND owner = ?", (identity, owner)
        ).fetchone()
        if found is None:
            raise _unknown("file", "FILE_NOT_FOUND", identity)
        return StoredFile(*found)

    @_uses_database
    def files(
        self, owner: str, page: Page, purpose: str | None = None
    ) -> tuple[Sequence[StoredFile], bool]:
        """Return a page of an owner's files, and whether more follow. purpose: None = any.

        Raises INVALID_ARGUMENT for a `page.after` that is not in the list.
        """
        if page.after is None and not self.is_open:
            return [], False  # a look makes no temporary folder
        rows, has_more = self._page("files", _FILE, owner, page, purpose)
        return [StoredFile(*row) for row in rows], has_more

    def _page(
        self, table: str, columns: str, owner: str, page: Page, purpose: str | None = None
    ) -> tuple[Sequence[tuple[Any, ...]], bool]:
        order, sign, start = ("ASC", ">", 0) if page.is_ascending else ("DESC", "<", _LAST)
        if page.after is not None:
            found = self._database.execute(
                f"SELECT number FROM {table} WHERE id = ? AND owner = ?", (page.after, owner)
            ).fetchone()
            if found is None:
                raise invalid("after", "after is no id of this list.")
            [start] = found
        condition, values = "", [owner, start]
        if purpose is not None:
            condition = "AND purpose = ? "
            values.append(purpose)
        rows = self._database.execute(
            f"SELECT {columns} FROM {table} WHERE owner = ? AND number {sign} ? {condition}"
            f"ORDER BY number {order} LIMIT ?",
            (*values, page.limit + 1),
        ).fetchall()
        return rows[: page.limit], len(rows) > page.limit

    @_uses_database
    def delete_file(self, identity: str, owner: str) -> None:
        """Drop an owner's file. Raises NOT_FOUND, and INVALID_ARGUMENT if a batch reads it."""
        stored = self.file(identity, owner)
        if any(batch.input_file == identity for batch in self.unfinished()):
            raise invalid("file_id", "A batch that has not ended reads the file.")
        self._database.execute("DELETE FROM files WHERE id = ?", (stored.id,))
        self.path(identity).unlink(missing_ok=True)

    # Batches.

    @_uses_database
    def add(self, batch: StoredBatch) -> None:
        """Keep a new batch; drop those that ended long ago. Raises RESOURCE_EXHAUSTED."""
        [[unfinished]] = self._database.execute(
            f"SELECT count(*) FROM batches WHERE owner = ? AND {_UNFINISHED}", (batch.owner,)
        )
        if unfinished >= _MOST_UNFINISHED:
            message = f"{_MOST_UNFINISHED} batches have not ended; try again when some have."
            code = grpc.StatusCode.RESOURCE_EXHAUSTED
            raise ServiceError(code, "BATCHES_FULL", message, retry_seconds=60)
        self._database.execute(
            f"DELETE FROM batches WHERE NOT {_UNFINISHED} AND owner = ? AND number NOT IN "
            "(SELECT number FROM batches WHERE owner = ? ORDER BY number DESC LIMIT ?)",
            (batch.owner, batch.owner, _MOST_ENDED),
        )
        self.put(batch)

    @_uses_database
    def put(self, batch: StoredBatch) -> None:
        """Keep a batch, in place of its former state."""
        self._database.execute(
            "INSERT INTO batches (id, owner, status, content) VALUES (?, ?, ?, ?) "
            "ON CONFLICT (id) DO UPDATE SET status = excluded.status, content = excluded.content",
            (batch.id, batch.owner, batch.status, msgspec.json.encode(batch)),
        )

    @_uses_database
    def end(self, batch: StoredBatch, outputs: Sequence[StoredFile]) -> None:
        """Keep an ended batch and its files, all or none."""
        self._database.execute("BEGIN IMMEDIATE")
        with self._database:
            for output in outputs:
                self._insert(output)
            self.put(batch)

    @_uses_database
    def reserve(self, batch: StoredBatch, size: int) -> bool:
        """Set aside room for the whole output of a running batch, in place of what it had.

        Returns False if there is no room. size: in bytes.
        """
        left = f"(:most - ({_BYTES} - reserved + :size))"
        changed = self._database.execute(
            f"UPDATE batches SET reserved = :size WHERE id = :id AND {left} >= "
            f"CASE :owner WHEN '' THEN 0 ELSE {_BYTES_OF_OWNER} - reserved + :size END",
            {"id": batch.id, "size": size, "most": self._max_bytes, "owner": batch.owner},
        )
        return changed.rowcount > 0

    @_uses_database
    def update(self, batch: StoredBatch) -> None:
        """Keep a batch's new state if it is in progress; another process may have changed that."""
        self._database.execute(
            "UPDATE batches SET status = ?, content = ? WHERE id = ? AND status = 'in_progress'",
            (batch.status, msgspec.json.encode(batch), batch.id),
        )

    @_uses_database
    def batch(self, identity: str, owner: str) -> StoredBatch:
        """Return an owner's batch. Raises NOT_FOUND."""
        found = self._database.execute(
            "SELECT content FROM batches WHERE id = ? AND owner = ?", (identity, owner)
        ).fetchone()
        if found is None:
            raise _unknown("batch", "BATCH_NOT_FOUND", identity)
        return _batch(found[0])

    @_uses_database
    def batches(self, owner: str, page: Page) -> tuple[Sequence[StoredBatch], bool]:
        """Return a page of an owner's batches, and whether more follow.

        Raises INVALID_ARGUMENT for a `page.after` that is not in the list.
        """
        rows, has_more = self._page("batches", "content", owner, page)
        return [_batch(content) for [content] in rows], has_more

    @_uses_database
    def unfinished(self) -> Sequence[StoredBatch]:
        """Return the batches of all owners that have not ended, the oldest first."""
        found = self._database.execute(
            f"SELECT content FROM batches WHERE {_UNFINISHED} ORDER BY number"
        )
        return [_batch(content) for [content] in found]


@dataclass(slots=True)
class NewFile:
    """A file that is being written."""

    stored: StoredFile
    content: BinaryIO | None = None
    room: int = 0
    """Bytes that may be written"""

    def write(self, data: bytes) -> None:
        """Append data. Raises RESOURCE_EXHAUSTED if the store has no room."""
        assert self.content is not None
        self.room -= len(data)
        if self.room < 0:
            raise full()
        self.content.write(data)


def full() -> ServiceError:
    """Return the error of a file for which the store has no room."""
    message = (
        "The server's store of files is full, or your share of it: delete files that are no longer "
        "needed."
    )
    return ServiceError(grpc.StatusCode.RESOURCE_EXHAUSTED, "FILES_FULL", message)


def _batch(content: bytes) -> StoredBatch:
    return msgspec.json.decode(content, type=StoredBatch)


def _unknown(kind: str, reason: str, identity: str) -> ServiceError:
    return ServiceError(grpc.StatusCode.NOT_FOUND, reason, f"There is no {kind} {identity!r}.")
