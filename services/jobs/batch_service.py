"""The gRPC servicer of BatchService."""

import secrets
import time
from collections.abc import Mapping
from typing import Any

import grpc

from services.jobs.batches.batch_runner import BatchRunner
from services.jobs.creator import admit
from services.jobs.pages import page_of
from services.jobs.store.file_store import BatchStatus, FileStore, StoredBatch
from tokenwire.batch_run import BATCH_PATHS
from tokenwire.errors import ServiceError, invalid
from tokenwire.pb.jobs.v1 import jobs_pb2
from tokenwire.pb.jobs.v1.jobs_pb2_grpc import BatchServiceServicer

__all__ = ["BatchServicer"]

_DAY = 24 * 60 * 60
_MOST_ENTRIES, _MOST_TEXT = 16, 512
"""Entries of metadata, and code points of a key or a value"""
_STATUSES: Mapping[BatchStatus, jobs_pb2.BatchStatus.ValueType] = {
    "in_progress": jobs_pb2.BATCH_STATUS_IN_PROGRESS,
    "cancelling": jobs_pb2.BATCH_STATUS_CANCELLING,
    "completed": jobs_pb2.BATCH_STATUS_COMPLETED,
    "cancelled": jobs_pb2.BATCH_STATUS_CANCELLED,
    "expired": jobs_pb2.BATCH_STATUS_EXPIRED,
    "failed": jobs_pb2.BATCH_STATUS_FAILED,
}
Context = grpc.aio.ServicerContext[Any, Any]


class BatchServicer(BatchServiceServicer):
    """The batches of a store, which a runner runs."""

    def __init__(self, store: FileStore, runner: BatchRunner) -> None:
        self._store = store
        self._runner = runner

    async def CreateBatch(
        self, request: jobs_pb2.CreateBatchRequest, context: Context
    ) -> jobs_pb2.CreateBatchResponse:
        creator = await admit(request.context)
        _check(request)
        try:
            await self._store.thread.run(self._store.file, request.input_file_id, creator.owner)
        except ServiceError as error:
            error.field = "input_file_id"
            raise
        now = int(time.time())
        batch = StoredBatch(
            id=f"batch_{secrets.token_hex(12)}",
            tenant=creator.tenant,
            account=creator.account,
            endpoint=request.endpoint,
            input_file=request.input_file_id,
            metadata=dict(request.metadata),
            created=now,
            expires=now + _DAY,
        )
        await self._runner.add(batch)
        return jobs_pb2.CreateBatchResponse(batch=_message(batch))

    async def GetBatch(
        self, request: jobs_pb2.GetBatchRequest, context: Context
    ) -> jobs_pb2.GetBatchResponse:
        found = await self._found(request.context, request.batch_id)
        return jobs_pb2.GetBatchResponse(batch=_message(found))

    async def ListBatches(
        self, request: jobs_pb2.ListBatchesRequest, context: Context
    ) -> jobs_pb2.ListBatchesResponse:
        owner = (await admit(request.context)).owner
        page = page_of(request.page)
        batches, has_more = await self._store.thread.run(self._store.batches, owner, page)
        return jobs_pb2.ListBatchesResponse(batches=map(_message, batches), has_more=has_more)

    async def CancelBatch(
        self, request: jobs_pb2.CancelBatchRequest, context: Context
    ) -> jobs_pb2.CancelBatchResponse:
        found = await self._found(request.context, request.batch_id)
        return jobs_pb2.CancelBatchResponse(batch=_message(await self._runner.cancel(found)))

    async def _found(self, asked: jobs_pb2.RequestContext, identity: str) -> StoredBatch:
        owner = (await admit(asked)).owner
        return await self._store.thread.run(self._store.batch, identity, owner)


def _check(request: jobs_pb2.CreateBatchRequest) -> None:
    """Raise INVALID_ARGUMENT for what is not served."""
    if request.endpoint not in BATCH_PATHS:
        raise invalid("endpoint", f"endpoint must be one of {', '.join(BATCH_PATHS)}.")
    if not request.input_file_id:
        raise invalid("input_file_id", "input_file_id is required: the id of a file.")
    if len(request.metadata) > _MOST_ENTRIES:
        raise invalid("metadata", f"metadata may have at most {_MOST_ENTRIES} entries.")
    if any(len(text) > _MOST_TEXT for entry in request.metadata.items() for text in entry):
        message = f"Keys and values of metadata may have at most {_MOST_TEXT} characters."
        raise invalid("metadata", message)


def _message(batch: StoredBatch) -> jobs_pb2.Batch:
    message = jobs_pb2.Batch(
        id=batch.id,
        endpoint=batch.endpoint,
        input_file_id=batch.input_file,
        status=_STATUSES[batch.status],
        output_file_id=batch.output_file or "",
        error_file_id=batch.error_file or "",
        created_at=batch.created,
        expires_at=batch.expires,
        cancelling_at=batch.cancelled,
        ended_at=batch.ended,
        total=batch.total,
        completed=batch.answered,
        failed=batch.failed,
        metadata=batch.metadata,
    )
    if batch.problem:
        problem = jobs_pb2.BatchProblem(reason=batch.reason, message=batch.problem, line=batch.line)
        message.problem.CopyFrom(problem)
    for each in batch.invalid_lines:
        message.invalid_lines.add(reason="INVALID_LINE", message=each.message, line=each.line)
    return message
