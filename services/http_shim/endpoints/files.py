"""Endpoints of files: /v1/files."""

import asyncio
import re
from collections.abc import AsyncGenerator
from io import BytesIO

import grpc
from msgspec import Struct
from starlette.datastructures import FormData, Headers, UploadFile
from starlette.formparsers import MultiPartException, MultiPartParser
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from services.common.sharing.shares import Shares
from services.http_shim.endpoints.paging import page_of
from services.http_shim.endpoints.stream_sender import client_left
from services.http_shim.errors import BodyTooLargeError, ClientGoneError, FileTooLargeError
from services.http_shim.http.body import json_response
from services.http_shim.http.exchange import Exchange, exchange_of
from services.http_shim.jobs.jobs import context_of
from services.http_shim.jobs.jobs_client import JobsClient, Upload
from tokenwire.errors import ServiceError, invalid
from tokenwire.pb.jobs.v1 import jobs_pb2

__all__ = ["DeletedFile", "FileList", "FileObject", "Files"]

_MOST_UPLOADS = 4
"""Most uploads at once of one owner; all owners together have twice as many"""
_FIELDS = 16
"""Fields of a form besides the file"""
_RANGE = re.compile(r"bytes=([0-9]{1,18})-")
_MOST_FIELD_BYTES = 32 * 1024 * 1024
"""Bytes of a form besides the content of the file"""


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

    def __init__(self, jobs: JobsClient) -> None:
        self._jobs = jobs
        self._uploads = Shares(_MOST_UPLOADS, reserve=_MOST_UPLOADS)
        """Forms that are being read"""

    async def create(self, request: Request) -> Response:
        """Keep a file that a form uploads, whose content goes on as it comes."""
        if not request.headers.get("content-type", "").startswith("multipart/form-data"):
            raise invalid("file", "A file is uploaded as multipart/form-data.")
        exchange = exchange_of(request.scope)
        owner = exchange.owner
        if not self._uploads.has_room(owner, 1):
            message = f"{self._uploads.held} files are being uploaded; try again."
            code = grpc.StatusCode.RESOURCE_EXHAUSTED
            raise ServiceError(code, "UPLOADS_FULL", message, retry_seconds=1)
        self._uploads.add(owner, 1)
        try:
            parser = _FormParser(request, exchange, self._jobs)
            file = await parser.keep_file()
        except ServiceError as error:
            if error.reason == "FILE_TOO_LARGE":
                raise FileTooLargeError(error.message) from None
            raise
        finally:
            self._uploads.add(owner, -1)
        return json_response(_object(file))

    async def all(self, request: Request) -> Response:
        """List the caller's files, the newest first unless the query says otherwise."""
        query = request.query_params
        asked = jobs_pb2.ListFilesRequest(
            context=_context(request), page=page_of(query), purpose=query.get("purpose")
        )
        answer = await self._jobs.list_files(asked)
        return json_response(FileList(list(map(_object, answer.files)), answer.has_more))

    async def one(self, request: Request) -> Response:
        return json_response(_object(await self._found(request)))

    async def delete(self, request: Request) -> Response:
        identity = request.path_params["file_id"]
        asked = jobs_pb2.DeleteFileRequest(context=_context(request), file_id=identity)
        await self._jobs.delete_file(asked)
        return json_response(DeletedFile(identity))

    async def content(self, request: Request) -> Response:
        """Return a file's content, with `Range: bytes=N-` from byte N on."""
        found = await self._found(request)
        begin = _first_byte(request)
        if begin is not None and begin >= found.bytes:
            return Response(status_code=416, headers={"content-range": f"bytes */{found.bytes}"})
        asked = jobs_pb2.DownloadFileRequest(
            context=_context(request), file_id=found.id, offset=begin or 0
        )
        pieces = self._jobs.download(asked)
        first = await anext(pieces, b"")  # raises before the status is sent
        return _Content(found, begin, first, pieces)

    async def _found(self, request: Request) -> jobs_pb2.File:
        identity = request.path_params["file_id"]
        asked = jobs_pb2.GetFileRequest(context=_context(request), file_id=identity)
        return await self._jobs.file(asked)


class _Content(Response):
    """The content of a file, which comes in pieces."""

    def __init__(
        self,
        file: jobs_pb2.File,
        begin: int | None,
        first: bytes,
        pieces: AsyncGenerator[bytes, None],
    ) -> None:
        """begin: first byte of the part that is asked for; None = the whole file."""
        is_of_user = file.purpose == "user_data"
        self._left = file.bytes - (begin or 0)
        headers = {"content-length": str(self._left), "accept-ranges": "bytes"}
        if begin is not None:
            headers["content-range"] = f"bytes {begin}-{file.bytes - 1}/{file.bytes}"
        super().__init__(
            status_code=200 if begin is None else 206,
            headers=headers,
            media_type="application/octet-stream" if is_of_user else "application/jsonl",
        )
        self._first = first
        self._pieces = pieces

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        start = {"type": "http.response.start", "status": self.status_code}
        head = start | {"headers": self.raw_headers}
        leaving = asyncio.ensure_future(client_left(receive))
        try:
            await send(head)
            if scope["method"] == "HEAD":
                self._left = 0
                await self._send_piece(send, b"")
                return
            await self._send_piece(send, self._first)
            async for piece in self._pieces:
                if leaving.done():
                    raise ClientGoneError
                await self._send_piece(send, piece)
        finally:
            leaving.cancel()
            await self._pieces.aclose()

    async def _send_piece(self, send: Send, piece: bytes) -> None:
        self._left -= len(piece)  # the last piece says so: the next request may follow it
        await send({"type": "http.response.body", "body": piece, "more_body": self._left > 0})


class _FormParser(MultiPartParser):
    """Parser of a form, which sends the content of its file on as it comes."""

    def __init__(self, request: Request, exchange: Exchange, jobs: JobsClient) -> None:
        stream = self._limited(request)
        super().__init__(request.headers, stream, max_files=1, max_fields=_FIELDS)
        self._exchange = exchange
        self._jobs = jobs
        self._upload: Upload | None = None
        self._is_whole = False
        """True once the end of the form came"""

    async def keep_file(self) -> jobs_pb2.File:
        """Read the form, and return the kept file. Raises ServiceError and BodyTooLargeError."""
        await self._jobs.reach()
        try:
            form = await self._form()
            if not self._is_whole:
                raise invalid("file", "The form can't be read: its last boundary is missing.")
            self._exchange.ignored = sorted({*form} - {"file", "purpose"})
            if self._upload is None:
                raise _no_file()
            return await self._upload.end(_purpose(form))
        finally:
            if self._upload is not None:
                self._upload.cancel()

    def on_headers_finished(self) -> None:
        """Replace the temporary file of the file's part by the upload."""
        super().on_headers_finished()
        part = self._current_part
        if part.file is None:
            return
        if part.field_name != "file":
            raise _no_file()
        purpose = _purpose(FormData(self.items))
        context = context_of(self._exchange)
        self._upload = self._jobs.upload(context, _encodable(part.file.filename or ""), purpose)
        part.file = _SentFile(self._upload, part.file.headers)

    def on_end(self) -> None:
        self._is_whole = True

    async def _form(self) -> FormData:
        try:
            return await self.parse()
        except ClientDisconnect:
            raise ClientGoneError from None
        except (MultiPartException, ValueError, LookupError) as error:
            reason = str(error).rstrip(".")
            raise invalid("file", f"The form can't be read: {reason}.") from None

    async def _limited(self, request: Request) -> AsyncGenerator[bytes, None]:
        """Yield a body. Raises BodyTooLargeError if too much of it is not the file's content."""
        size = 0
        async for data in request.stream():
            size += len(data)
            if size - (0 if self._upload is None else self._upload.size) > _MOST_FIELD_BYTES:
                raise BodyTooLargeError(_MOST_FIELD_BYTES)
            yield data


class _SentFile(UploadFile):
    """A file of a form that is sent on instead of being kept."""

    def __init__(self, upload: Upload, headers: Headers) -> None:
        super().__init__(BytesIO(), headers=headers)
        self._upload = upload

    async def write(self, data: bytes) -> None:
        await self._upload.write(data)


def _first_byte(request: Request) -> int | None:
    """Return the first byte that a request asks for; None for the whole file.

    A server may answer other ranges, and those of a state that it can't compare, by the whole.
    """
    found = _RANGE.fullmatch(request.headers.get("range", ""))
    return None if found is None or "if-range" in request.headers else int(found[1])


def _no_file() -> ServiceError:
    return invalid("file", "file is required: the content of the file.")


def _purpose(form: FormData) -> str:
    purpose = form.get("purpose")
    return _encodable(purpose) if isinstance(purpose, str) else ""


def _encodable(text: str) -> str:
    """Return a text of a form as one that a message can have."""
    return text.encode("utf-8", "replace").decode()


def _context(request: Request) -> jobs_pb2.RequestContext:
    return context_of(exchange_of(request.scope))


def _object(file: jobs_pb2.File) -> FileObject:
    return FileObject(file.id, file.bytes, file.created_at, file.name, file.purpose)
