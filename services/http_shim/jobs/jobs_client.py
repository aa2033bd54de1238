"""Client of the jobs service, for a shim that may run without one."""

import asyncio
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import suppress
from typing import Any, TypeVar

import grpc

from services.common.logging import request_id, traceparent
from services.common.network.health import PART_PREFIX, reports_failure, reports_serving
from services.common.peers.peer import ChannelSettings, Peer, PeerKind, PeerRefusedError
from tokenwire.errors import ServiceError
from tokenwire.pb.jobs.v1 import jobs_pb2
from tokenwire.pb.jobs.v1.jobs_pb2_grpc import (
    BatchServiceStub,
    FileServiceStub,
    ResponseServiceStub,
    UsageServiceStub,
)

__all__ = ["JobsClient", "Upload"]

_SERVICE = jobs_pb2.DESCRIPTOR.services_by_name["FileService"].full_name
_KIND = PeerKind("jobs service", _SERVICE, "jobs_health")
_ASK_SECONDS = 2.0
_START_SECONDS = 10.0
"""Time after the start in which calls wait for the service, which may start beside this process"""
_CALL_SECONDS = 30.0
_KEEP_SECONDS = 10.0
"""Longest time to keep a response, whose client waits for it"""
_USAGE_SECONDS = 2.0
_READ_SECONDS = 180.0
"""Longest time to read documents, with their wait for the documents of other requests"""
_CANCEL_SECONDS = 90.0
"""Longest time until a cancelled response has ended and is stored"""
_PARTS = ("batches", "files", "responses", "stores", "usage")
"""Parts of the service whose faults are faults of the shim's routes"""
_PIECE = 256 * 1024
"""Bytes of a piece of an upload"""
_ABSENT = (
    "This server runs without the jobs service, which keeps files, batches, responses and usage "
    "and reads PDFs: start `python -m services.jobs`, and the shim with --jobs HOST:PORT."
)
Answer = TypeVar("Answer")


class _Stubs:
    """The rpcs of a channel."""

    def __init__(self, channel: grpc.aio.Channel) -> None:
        self.files = FileServiceStub(channel)
        self.batches = BatchServiceStub(channel)
        self.responses = ResponseServiceStub(channel)
        self.usage = UsageServiceStub(channel)


class JobsClient:
    """The rpcs of the jobs service. Create it on the event loop that uses it.

    Without a service, each raises UNIMPLEMENTED with the sentence that says how to start one; only
    `keep` keeps nothing instead. With one, they raise the errors of the service, and UNAVAILABLE
    if it can't be reached.
    """

    def __init__(self, target: str, settings: ChannelSettings | None = None) -> None:
        """target: host:port; empty = there is no service."""
        self._peer: Peer | None = None
        if not target:
            return
        self._peer = Peer(target, _KIND, settings or ChannelSettings(), lambda: None)
        self._connected = _Stubs(self._peer.channel)
        self._patient_until = asyncio.get_running_loop().time() + _START_SECONDS
        self._peer.start(self._ask)

    async def reach(self) -> None:
        """Wait for the service, which may start beside this process; not longer after that."""
        if self._peer is not None and self._is_patient:
            with suppress(TimeoutError):
                async with asyncio.timeout_at(self._patient_until):
                    await self._peer.reach()

    async def close(self) -> None:
        if self._peer is not None:
            await self._peer.close()

    async def faults(self) -> Sequence[str]:
        """Return the parts of the service that do not work; "jobs" if none can be reached."""
        if self._peer is None:
            return ()
        channel = self._peer.channel
        if not await reports_serving(channel, wait_for_ready=self._is_patient):
            return ("jobs",)
        failures = [reports_failure(channel, f"{PART_PREFIX}{part}") for part in _PARTS]
        found = await asyncio.gather(*failures)
        return [part for part, fails in zip(_PARTS, found, strict=True) if fails]

    # Files.

    def upload(self, context: jobs_pb2.RequestContext, name: str, purpose: str) -> "Upload":
        """Begin to keep a file, after `reach`. purpose: empty = not known yet."""
        head = jobs_pb2.UploadFileRequest(context=context, name=name, purpose=purpose)
        call = self._stubs.files.UploadFile(**self._options(None))
        return Upload(call, head, self._translated)

    async def file(self, request: jobs_pb2.GetFileRequest) -> jobs_pb2.File:
        return (await self._call(self._stubs.files.GetFile, request)).file

    async def list_files(self, request: jobs_pb2.ListFilesRequest) -> jobs_pb2.ListFilesResponse:
        return await self._call(self._stubs.files.ListFiles, request)

    async def delete_file(self, request: jobs_pb2.DeleteFileRequest) -> None:
        await self._call(self._stubs.files.DeleteFile, request)

    async def download(self, request: jobs_pb2.DownloadFileRequest) -> AsyncGenerator[bytes, None]:
        """Yield the pieces of a file."""
        async for answer in self._stream(self._stubs.files.DownloadFile, request):
            yield answer.piece

    async def read_texts(self, request: jobs_pb2.ReadTextRequest) -> Sequence[str]:
        return (await self._call(self._stubs.files.ReadText, request, _READ_SECONDS)).texts

    # Batches.

    async def create_batch(self, request: jobs_pb2.CreateBatchRequest) -> jobs_pb2.Batch:
        return (await self._call(self._stubs.batches.CreateBatch, request)).batch

    async def batch(self, request: jobs_pb2.GetBatchRequest) -> jobs_pb2.Batch:
        return (await self._call(self._stubs.batches.GetBatch, request)).batch

    async def list_batches(
        self, request: jobs_pb2.ListBatchesRequest
    ) -> jobs_pb2.ListBatchesResponse:
        return await self._call(self._stubs.batches.ListBatches, request)

    async def cancel_batch(self, request: jobs_pb2.CancelBatchRequest) -> jobs_pb2.Batch:
        return (await self._call(self._stubs.batches.CancelBatch, request)).batch

    # Responses.

    async def keep(self, request: jobs_pb2.PutResponseRequest) -> bool:
        if self._peer is None:
            return False
        return (await self._call(self._stubs.responses.PutResponse, request, _KEEP_SECONDS)).kept

    async def find(self, request: jobs_pb2.GetResponseRequest) -> jobs_pb2.GetResponseResponse:
        return await self._call(self._stubs.responses.GetResponse, request)

    async def delete_response(self, request: jobs_pb2.DeleteResponseRequest) -> None:
        await self._call(self._stubs.responses.DeleteResponse, request, _CANCEL_SECONDS)

    async def input_items(
        self, request: jobs_pb2.ListInputItemsRequest
    ) -> jobs_pb2.ListInputItemsResponse:
        return await self._call(self._stubs.responses.ListInputItems, request)

    async def start_response(
        self, request: jobs_pb2.StartResponseRequest
    ) -> jobs_pb2.StartResponseResponse:
        """Start a response in the background, for which a model may first have to be free."""
        return await self._call(self._stubs.responses.StartResponse, request, None)

    async def watch_response(
        self, request: jobs_pb2.WatchResponseRequest
    ) -> AsyncGenerator[Sequence[jobs_pb2.ResponseEvent], None]:
        """Yield the events of a response, at first none: they can be read."""
        async for answer in self._stream(self._stubs.responses.WatchResponse, request):
            yield answer.events

    async def cancel_response(self, request: jobs_pb2.CancelResponseRequest) -> bytes:
        answer = await self._call(self._stubs.responses.CancelResponse, request, _CANCEL_SECONDS)
        return answer.response_json

    # Usage.

    async def record_usage(
        self, request: jobs_pb2.RecordUsageRequest
    ) -> jobs_pb2.RecordUsageResponse:
        return await self._call(self._stubs.usage.RecordUsage, request, _USAGE_SECONDS)

    async def usage(self, request: jobs_pb2.GetUsageRequest) -> jobs_pb2.GetUsageResponse:
        return await self._call(self._stubs.usage.GetUsage, request)

    async def _ask(self) -> None:
        """Ask whether the service knows this server. Raises PeerRefusedError if it does not."""
        page = jobs_pb2.Page(limit=1)
        try:
            await self._stubs.files.ListFiles(
                jobs_pb2.ListFilesRequest(page=page), timeout=_ASK_SECONDS
            )
        except grpc.aio.AioRpcError as failure:
            if failure.code() is grpc.StatusCode.UNAUTHENTICATED:
                error = ServiceError.from_rpc_error(failure)
                raise PeerRefusedError(
                    f"The jobs service refuses this server: {error.message}"
                ) from None

    @property
    def _stubs(self) -> "_Stubs":
        """The rpcs. Raises UNIMPLEMENTED without a service."""
        if self._peer is None:
            raise ServiceError(grpc.StatusCode.UNIMPLEMENTED, "NO_JOBS", _ABSENT)
        return self._connected

    async def _call(
        self,
        rpc: Callable[..., "grpc.aio.UnaryUnaryCall[Any, Answer]"],
        request: object,
        seconds: float | None = _CALL_SECONDS,
    ) -> Answer:
        await self.reach()
        try:
            return await rpc(request, **self._options(seconds))
        except grpc.aio.AioRpcError as failure:
            raise self._translated(failure) from None

    async def _stream(
        self, rpc: Callable[..., "grpc.aio.UnaryStreamCall[Any, Answer]"], request: object
    ) -> AsyncGenerator[Answer, None]:
        await self.reach()
        call = rpc(request, **self._options(None))
        try:
            async for answer in call:
                yield answer
        except grpc.aio.AioRpcError as failure:
            raise self._translated(failure) from None
        finally:
            call.cancel()

    @property
    def _is_patient(self) -> bool:
        """True while calls wait for the service."""
        return asyncio.get_running_loop().time() < self._patient_until

    def _options(self, seconds: float | None) -> dict[str, Any]:
        ids = (("x-request-id", request_id.get()), ("traceparent", traceparent.get()))
        return {
            "timeout": seconds,
            "metadata": [entry for entry in ids if entry[1]],
        }

    def _translated(self, failure: grpc.aio.AioRpcError) -> ServiceError:
        """Return the error of a call as clients see it."""
        error = ServiceError.from_rpc_error(failure)
        code = grpc.StatusCode.UNAVAILABLE
        is_late = failure.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        if error.reason == "UNREACHABLE" or (is_late and error.reason in ("", "UNKNOWN")):
            message = "The jobs service can't be reached now; try again."
            return ServiceError(code, "JOBS_UNAVAILABLE", message, retry_seconds=1)
        if failure.code() is grpc.StatusCode.UNAUTHENTICATED and self._peer is not None:
            self._peer.suspend()
            message = "The jobs service does not know this server; its log has the details."
            return ServiceError(code, "NOT_KNOWN", message, retry_seconds=1)
        return error


class Upload:
    """A file on its way to the jobs service."""

    def __init__(
        self,
        call: "grpc.aio.StreamUnaryCall[Any, jobs_pb2.UploadFileResponse]",
        head: jobs_pb2.UploadFileRequest,
        translated: Callable[[grpc.aio.AioRpcError], ServiceError],
    ) -> None:
        """head: the first message, without a piece."""
        self.size = 0
        """Bytes so far"""
        self._call = call
        self._next = head
        self._piece = bytearray()
        self._translated = translated

    async def write(self, data: bytes) -> None:
        """Send data, of which a part may wait for more. Raises ServiceError."""
        self.size += len(data)
        self._piece += data
        if len(self._piece) >= _PIECE:
            await self._send()

    async def end(self, purpose: str) -> jobs_pb2.File:
        """Return the kept file. Raises ServiceError."""
        self._next.purpose = purpose
        await self._send()
        try:
            await self._call.done_writing()
            return (await self._call).file
        except grpc.aio.AioRpcError as failure:
            raise self._translated(failure) from None

    def cancel(self) -> None:
        """Drop the file, unless it is kept."""
        self._call.cancel()

    async def _send(self) -> None:
        self._next.piece = bytes(self._piece)
        self._piece.clear()
        try:
            await self._call.write(self._next)
        except asyncio.InvalidStateError:  # the service has refused the file
            try:
                await self._call
            except grpc.aio.AioRpcError as failure:
                raise self._translated(failure) from None
        except grpc.aio.AioRpcError as failure:
            raise self._translated(failure) from None
        self._next = jobs_pb2.UploadFileRequest()
