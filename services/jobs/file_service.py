"""The gRPC servicer of FileService."""

import asyncio
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, BinaryIO

import grpc

from services.common.accounts import identity
from services.common.accounts.metering import charge_requests
from services.common.sharing.shares import Shares
from services.jobs.creator import admit
from services.jobs.documents.documents import Documents
from services.jobs.metrics import UPLOADS
from services.jobs.pages import MOST_FILES, page_of
from services.jobs.store.file_store import FileStore, StoredFile
from tokenwire.errors import ServiceError, invalid
from tokenwire.pb.jobs.v1 import jobs_pb2
from tokenwire.pb.jobs.v1.jobs_pb2_grpc import FileServiceServicer

__all__ = ["FileServicer"]

_PURPOSES = ("batch", "user_data")
"""Lines of a batch, or a document that a prompt names"""
_MOST_NAME = 256
_PIECE = 1 << 20
_MOST_PIECE = 4 << 20
_MOST_UPLOADS = 4
"""Most uploads at once of one owner; all owners together have twice as many"""
_REQUEST_BYTES = 1 << 20
"""Bytes of a download that count as one more request of the key"""
Context = grpc.aio.ServicerContext[Any, Any]


class FileServicer(FileServiceServicer):
    """Uploads, downloads and lists of files, and the text of documents."""

    def __init__(
        self, store: FileStore, documents: Documents, max_bytes: int, stall_seconds: float
    ) -> None:
        """max_bytes: of one file. stall_seconds: longest wait for the next piece of an upload."""
        self._store = store
        self._documents = documents
        self._max_bytes = max_bytes
        self._stall_seconds = stall_seconds
        self._uploads = Shares(_MOST_UPLOADS, reserve=_MOST_UPLOADS)

    async def UploadFile(
        self, request_iterator: AsyncIterator[jobs_pb2.UploadFileRequest], context: Context
    ) -> jobs_pb2.UploadFileResponse:
        first = await self._next(request_iterator)
        if first is None:
            raise invalid("context", "The first message of an upload must have its context.")
        owner = (await admit(first.context)).owner
        with self._counted(owner):
            identity = await self._keep(owner, first, request_iterator)
        stored = await self._store.thread.run(self._store.file, identity, owner)
        return jobs_pb2.UploadFileResponse(file=_message(stored))

    async def GetFile(
        self, request: jobs_pb2.GetFileRequest, context: Context
    ) -> jobs_pb2.GetFileResponse:
        owner = (await admit(request.context)).owner
        stored = await self._store.thread.run(self._store.file, request.file_id, owner)
        return jobs_pb2.GetFileResponse(file=_message(stored))

    async def ListFiles(
        self, request: jobs_pb2.ListFilesRequest, context: Context
    ) -> jobs_pb2.ListFilesResponse:
        owner = (await admit(request.context)).owner
        page = page_of(request.page, MOST_FILES)
        purpose = request.purpose if request.HasField("purpose") else None
        files, has_more = await self._store.thread.run(self._store.files, owner, page, purpose)
        return jobs_pb2.ListFilesResponse(files=map(_message, files), has_more=has_more)

    async def DeleteFile(
        self, request: jobs_pb2.DeleteFileRequest, context: Context
    ) -> jobs_pb2.DeleteFileResponse:
        owner = (await admit(request.context)).owner
        await self._store.thread.run(self._store.delete_file, request.file_id, owner)
        return jobs_pb2.DeleteFileResponse()

    async def DownloadFile(
        self, request: jobs_pb2.DownloadFileRequest, context: Context
    ) -> AsyncIterator[jobs_pb2.DownloadFileResponse]:
        owner = (await admit(request.context)).owner
        stored = await self._store.thread.run(self._store.file, request.file_id, owner)
        offset = min(request.offset, stored.bytes)
        content = await asyncio.to_thread(_opened, self._store.path(stored.id), offset)
        sent = 0
        try:
            while piece := await asyncio.to_thread(content.read, _PIECE):
                sent += len(piece)
                yield jobs_pb2.DownloadFileResponse(piece=piece)
        finally:
            content.close()
            account = identity.current.get().account
            if account is not None and (more := sent // _REQUEST_BYTES):
                charge_requests(account, more)

    async def ReadText(
        self, request: jobs_pb2.ReadTextRequest, context: Context
    ) -> jobs_pb2.ReadTextResponse:
        owner = (await admit(request.context)).owner
        return jobs_pb2.ReadTextResponse(texts=await self._documents.read(request.documents, owner))

    @contextmanager
    def _counted(self, owner: str) -> Iterator[None]:
        """Count an upload while it runs. Raises RESOURCE_EXHAUSTED if too many do."""
        if not self._uploads.has_room(owner, 1):
            message = f"{self._uploads.held} files are being uploaded; try again."
            code = grpc.StatusCode.RESOURCE_EXHAUSTED
            raise ServiceError(code, "UPLOADS_FULL", message, retry_seconds=1)
        self._uploads.add(owner, 1)
        UPLOADS.inc()
        try:
            yield
        finally:
            self._uploads.add(owner, -1)
            UPLOADS.dec()

    async def _next(
        self, requests: AsyncIterator[jobs_pb2.UploadFileRequest]
    ) -> jobs_pb2.UploadFileRequest | None:
        """Return the next message; None at the end. Raises RESOURCE_EXHAUSTED if it is late."""
        try:
            async with asyncio.timeout(self._stall_seconds):
                return await anext(requests, None)
        except TimeoutError:
            message = f"The upload had no further piece for {self._stall_seconds:g} s."
            code = grpc.StatusCode.RESOURCE_EXHAUSTED
            raise ServiceError(code, "STALLED", message, retry_seconds=1) from None

    async def _keep(
        self,
        owner: str,
        first: jobs_pb2.UploadFileRequest,
        requests: AsyncIterator[jobs_pb2.UploadFileRequest],
    ) -> str:
        """Keep a file, and return its id."""
        name = purpose = ""
        size = 0
        request: jobs_pb2.UploadFileRequest | None = first
        adding = self._store.adding(owner, "", "")
        new = await asyncio.to_thread(adding.__enter__)
        try:
            while request is not None:
                name, purpose = name or request.name, purpose or request.purpose
                size += len(request.piece)
                self._check_sizes(len(request.piece), size)
                if request.piece:
                    await asyncio.to_thread(new.write, request.piece)
                request = await self._next(requests)
            if purpose not in _PURPOSES:
                raise invalid("purpose", f"purpose must be one of {', '.join(_PURPOSES)}.")
            shown = (name or "file")[:_MOST_NAME]
            new.stored = replace(new.stored, name=shown, purpose=purpose)
        except BaseException:
            await asyncio.to_thread(adding.__exit__, *sys.exc_info())
            raise
        await asyncio.to_thread(adding.__exit__, None, None, None)
        return new.stored.id

    def _check_sizes(self, piece: int, size: int) -> None:
        """Raise INVALID_ARGUMENT for a piece or a file that is too large."""
        if piece > _MOST_PIECE:
            raise invalid("piece", f"A piece may have {_MOST_PIECE:,} bytes, got {piece:,}.")
        if size > self._max_bytes:
            message = f"The file is larger than {self._max_bytes} bytes."
            raise invalid("piece", message, reason="FILE_TOO_LARGE")


def _opened(path: Path, offset: int) -> BinaryIO:
    """Open the content of a file behind its first bytes. Raises NOT_FOUND."""
    try:
        content = path.open("rb")
        content.seek(offset)
        return content
    except OSError:
        message = f"The content of file {path.name!r} is gone from the server's folder."
        raise ServiceError(grpc.StatusCode.NOT_FOUND, "FILE_NOT_FOUND", message) from None


def _message(stored: StoredFile) -> jobs_pb2.File:
    return jobs_pb2.File(
        id=stored.id,
        name=stored.name,
        purpose=stored.purpose,
        created_at=stored.created,
        bytes=stored.bytes,
    )
