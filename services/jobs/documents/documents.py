"""Documents of one request, of which an owner has one read at a time."""

import asyncio
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from weakref import WeakValueDictionary

from services.common.contract import (
    MAX_DOCUMENTS,
    MAX_DOCUMENTS_BYTES,
    MAX_DOCUMENTS_CHARACTERS,
)
from services.common.sharing.shares import Shares
from services.jobs.documents.document_reader import DocumentReader, documents_busy
from services.jobs.store.file_store import FileStore
from tokenwire.errors import ServiceError, invalid
from tokenwire.pb.jobs.v1 import jobs_pb2

__all__ = ["Documents"]

_MOST_SECONDS = 60
"""Longest time for the documents of a request, and longest wait for its turn before"""


@dataclass(frozen=True, slots=True)
class _NamedDocument:
    """A document, and its name in errors."""

    field: str
    data: bytes
    file_id: str
    """Id of the file that has the data; empty = `data`"""
    media_type: str


class Documents:
    """Reads the documents of requests; uploaded files belong to their owners."""

    def __init__(self, reader: DocumentReader, store: FileStore, max_held_bytes: int) -> None:
        """max_held_bytes: of the documents of all requests that are read, or wait for that."""
        self._reader = reader
        self._store = store
        self._held = Shares(max_held_bytes, least=MAX_DOCUMENTS_BYTES)
        self._turns: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()
        """Turn of each owner of which a request reads documents"""

    async def read(self, asked: Sequence[jobs_pb2.Document], owner: str) -> list[str]:
        """Return the text of each document.

        Raises INVALID_ARGUMENT, NOT_FOUND and UNAVAILABLE with the field of a document.
        """
        if len(asked) > MAX_DOCUMENTS:
            message = f"documents: a request may have at most {MAX_DOCUMENTS} documents."
            raise invalid("documents", message)
        documents = [
            _NamedDocument(
                each.field or f"documents[{index}]", each.data, each.file_id, each.media_type
            )
            for index, each in enumerate(asked)
        ]
        size = sum([await self._size(each, owner) for each in documents])
        if size > MAX_DOCUMENTS_BYTES:
            message = f"The documents have more than {MAX_DOCUMENTS_BYTES:,} bytes together."
            raise invalid(documents[0].field, message)
        with self._holding(owner, size):
            async with self._turn(owner):
                try:
                    async with asyncio.timeout(_MOST_SECONDS):
                        return await self._texts(documents)
                except TimeoutError:
                    message = f"The documents take more than {_MOST_SECONDS} s to read."
                    raise invalid(documents[0].field, message) from None

    @contextmanager
    def _holding(self, owner: str, size: int) -> Iterator[None]:
        """Count bytes in memory. Raises UNAVAILABLE if the owner, or all, hold too many."""
        if not self._held.has_room(owner, size):
            raise documents_busy()
        self._held.add(owner, size)
        try:
            yield
        finally:
            self._held.add(owner, -size)

    @asynccontextmanager
    async def _turn(self, owner: str) -> AsyncIterator[None]:
        """Let an owner's requests read one after the other, so that others find a place."""
        turn = self._turns.setdefault(owner, asyncio.Lock())
        try:
            async with asyncio.timeout(_MOST_SECONDS):
                await turn.acquire()
        except TimeoutError:
            raise documents_busy() from None
        try:
            yield
        finally:
            turn.release()

    async def _texts(self, documents: Sequence[_NamedDocument]) -> list[str]:
        texts = []
        length = 0
        for each in documents:
            texts.append(
                await self._reader.text(await self._data(each), each.media_type, each.field)
            )
            length += len(texts[-1])
            if length > MAX_DOCUMENTS_CHARACTERS:
                most = f"{MAX_DOCUMENTS_CHARACTERS:,}"
                raise invalid(each.field, f"The documents have more than {most} characters.")
        return texts

    async def _size(self, document: _NamedDocument, owner: str) -> int:
        if not document.file_id:
            return len(document.data)
        try:
            stored = await self._store.thread.run(self._store.file, document.file_id, owner)
        except ServiceError as error:
            error.field = document.field
            raise
        return stored.bytes

    async def _data(self, document: _NamedDocument) -> bytes:
        if not document.file_id:
            return document.data
        path = self._store.path(document.file_id)
        try:
            return await asyncio.to_thread(path.read_bytes)
        except OSError:  # it was deleted meanwhile
            raise invalid(document.field, f"{document.field}: the file is gone.") from None
