"""Endpoints of files: /v1/files."""

import asyncio
from collections.abc import AsyncGenerator
from typing import BinaryIO

import grpc
from msgspec import Struct
from starlette.datastructures import UploadFile
from starlette.formparsers import MultiPartException, MultiPartParser
from starlette.requests import ClientDisconnect, Request
from starlette.responses import FileResponse, Response

from services.common.sharing.shares import Shares
from services.http_shim.endpoints.paging import page_of
from services.http_shim.errors import BodyTooLargeError, ClientGoneError
from services.http_shim.http.body import json_response
from services.http_shim.http.exchange import exchange_of
from services.http_shim.stored.file_store import FileStore, StoredFile, full
from tokenwire.errors import ServiceError, invalid

__all__ = ["DeletedFile", "FileList", "FileObject", "Files"]

_PURPOSES = ("batch", "user_data")
"""Lines of a batch, or a document that a prompt names"""
_MOST_NAME = 256
_MOST_LISTED = 1_000
_PIECE = 1 << 20
_MOST_UPLOADS = 4
"""Most uploads at once of one owner; all owners together have twice as many"""
_FIELDS = 16
"""Fields of a form besides the file"""


class FileObject(Struct):
    """A file."""

    id: str
    bytes: int
    created_at: int
    filename: str
    purpose: str
    object: str = "file"
    status: str = "processed"


class FileList(Struct):
    """The answer of GET /v1/files."""

    data: list[FileObject]
    has_more: bool
    object: str = "list"


class DeletedFile(Struct):
    """The answer of DELETE /v1/files/{id}."""

    id: str
    object: str = "file"
    deleted: bool = True


class Files:
    """The endpoints."""

    def __init__(self, store: FileStore, max_bytes: int) -> None:
        """max_bytes: of one file."""
        self._store = store
        self._max_bytes = max_bytes
        self._uploads = Shares(_MOST_UPLOADS, reserve=_MOST_UPLOADS)
        """Forms that are being read, into temporary files"""

    async def create(self, request: Request) -> Response:
        """Keep a file that a form uploads."""
        if not request.headers.get("content-type", "").startswith("multipart/form-data"):
            raise invalid("file", "A file is uploaded as multipart/form-data.")
        owner = exchange_of(request.scope).owner
        if not self._uploads.has_room(owner, 1):
            message = f"{self._uploads.held} files are being uploaded; try again."
            code = grpc.StatusCode.RESOURCE_EXHAUSTED
            raise ServiceError(code, "UPLOADS_FULL", message, retry_seconds=1)
        self._uploads.add(owner, 1)
        parser = MultiPartParser(
            request.headers, self._limited(request), max_files=1, max_fields=_FIELDS
        )
        try:
            form = await parser.parse()
        except ClientDisconnect:
            raise ClientGoneError from None
        except (MultiPartException, ValueError, LookupError) as error:
            reason = str(error).rstrip(".")
            raise invalid("file", f"The form can't be read: {reason}.") from None
        except OSError:
            raise full() from None
        finally:
            self._uploads.add(owner, -1)
        exchange_of(request.scope).ignored = sorted({*form} - {"file", "purpose"})
        try:
            upload, purpose = form.get("file"), form.get("purpose")
            if not isinstance(upload, UploadFile):
                raise invalid("file", "file is required: the content of the file.")
            if not isinstance(purpose, str) or purpose not in _PURPOSES:
                raise invalid("purpose", f"purpose must be one of {', '.join(_PURPOSES)}.")
            name = (upload.filename or "file")[:_MOST_NAME].encode("utf-8", "replace").decode()
            owner = exchange_of(request.scope).owner
            identity = await asyncio.to_thread(self._keep, owner, name, purpose, upload.file)
        finally:
            await form.close()
        stored = await self._store.thread.run(self._store.file, identity, owner)
        return json_response(_object(stored))

    def _keep(self, owner: str, name: str, purpose: str, content: BinaryIO) -> str:
        """Keep a file, and return its id."""
        with self._store.adding(owner, name, purpose) as new:
            while data := content.read(_PIECE):
                new.write(data)
        return new.stored.id

    async def all(self, request: Request) -> Response:
        """List the caller's files, the newest first unless the query says otherwise."""
        owner, query = exchange_of(request.scope).owner, request.query_params
        page, purpose = page_of(query, _MOST_LISTED), query.get("purpose")
        files, has_more = await self._store.thread.run(self._store.files, owner, page, purpose)
        return json_response(FileList(list(map(_object, files)), has_more))

    async def one(self, request: Request) -> Response:
        return json_response(_object(await self._found(request)))

    async def delete(self, request: Request) -> Response:
        identity = request.path_params["file_id"]
        owner = exchange_of(request.scope).owner
        await self._store.thread.run(self._store.delete_file, identity, owner)
        return json_response(DeletedFile(identity))

    async def content(self, request: Request) -> Response:
        """Return a file's content."""
        found = await self._found(request)
        is_of_user = found.purpose == "user_data"
        media_type = "application/octet-stream" if is_of_user else "application/jsonl"
        path = self._store.path(found.id)
        if not await asyncio.to_thread(path.is_file):
            message = f"The content of file {found.id!r} is gone from the server's folder."
            raise ServiceError(grpc.StatusCode.NOT_FOUND, "FILE_NOT_FOUND", message)
        return FileResponse(path, media_type=media_type)

    async def _found(self, request: Request) -> StoredFile:
        identity = request.path_params["file_id"]
        owner = exchange_of(request.scope).owner
        return await self._store.thread.run(self._store.file, identity, owner)

    async def _limited(self, request: Request) -> AsyncGenerator[bytes, None]:
        """Yield a body. Raises BodyTooLargeError once it exceeds the limit of a file."""
        size = 0
        async for data in request.stream():
            size += len(data)
            if size > self._max_bytes:
                raise BodyTooLargeError(self._max_bytes)
            yield data


def _object(stored: StoredFile) -> FileObject:
    return FileObject(stored.id, stored.bytes, stored.created, stored.name, stored.purpose)
