"""Documents of a request, read before its prompt is made."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from weakref import WeakValueDictionary

from services.http_shim.documents.document_reader import DocumentReader, documents_busy
from services.http_shim.documents.request_documents import RequestDocument
from services.http_shim.http.body import HeldBytes
from services.http_shim.stored.file_store import FileStore
from tokenwire.errors import ServiceError, invalid

__all__ = ["Documents"]

_MOST_BYTES = 32 * 1024 * 1024
"""Of all documents of a request, uploaded or in the body"""
_MOST_SECONDS = 60
"""For all documents of a request, once it is its turn; as long it may wait for that"""
_MOST_CHARACTERS = 8 * 1024 * 1024
"""Of all documents of a request"""


class Documents:
    """Reads the documents of requests; uploaded files belong to their owners."""

    def __init__(self, reader: DocumentReader, store: FileStore) -> None:
        self._reader = reader
        self._store = store
        self._turns: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()
        """By owner, while one of its requests reads"""

    async def read(
        self,
        documents: Sequence[RequestDocument],
        owner: str,
        held: HeldBytes,
        image_bytes: int,
    ) -> None:
        """Put the text of each document in its place.

        held: counts the documents besides the request's images, until they are read. Raises
        INVALID_ARGUMENT, NOT_FOUND and UNAVAILABLE with the field of a document.
        """
        if not documents:
            return
        sizes = [await self._size(each, owner) for each in documents]
        if sum(sizes) > _MOST_BYTES:
            param = documents[0].param
            raise invalid(param, f"The documents have more than {_MOST_BYTES:,} bytes together.")
        held.resize(image_bytes + sum(sizes))
        async with self._turn(owner):
            try:
                async with asyncio.timeout(_MOST_SECONDS):
                    await self._put_texts(documents)
            except TimeoutError:
                message = f"The documents take more than {_MOST_SECONDS} s to read."
                raise invalid(documents[0].param, message) from None
        held.resize(image_bytes)

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

    async def _put_texts(self, documents: Sequence[RequestDocument]) -> None:
        length = 0
        for each in documents:
            data = await self._data(each)
            text = await self._reader.text(data, each.media_type, each.param)
            length += len(text)
            if length > _MOST_CHARACTERS:
                most = f"{_MOST_CHARACTERS:,}"
                raise invalid(each.param, f"The documents have more than {most} characters.")
            each.put(text)

    async def _size(self, document: RequestDocument, owner: str) -> int:
        if not document.file_id:
            return len(document.data)
        try:
            stored = await self._store.thread.run(self._store.file, document.file_id, owner)
        except ServiceError as error:
            error.field = document.param
            raise
        return stored.bytes

    async def _data(self, document: RequestDocument) -> bytes:
        if not document.file_id:
            return document.data
        path = self._store.path(document.file_id)
        try:
            return await asyncio.to_thread(path.read_bytes)
        except OSError:  # it was deleted meanwhile
            raise invalid(document.param, f"{document.param}: the file is gone.") from None
