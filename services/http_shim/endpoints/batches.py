"""Endpoints of batches: /v1/batches."""

from collections.abc import Mapping
from functools import partial
from typing import Annotated, Any

from msgspec import Meta, Struct
from starlette.requests import Request
from starlette.responses import Response

from services.http_shim.dialects.bodies import body_of
from services.http_shim.dialects.fields import about
from services.http_shim.endpoints.paging import page_of
from services.http_shim.http.body import BodyReader, json_response
from services.http_shim.http.exchange import exchange_of
from services.http_shim.jobs.jobs import context_of
from services.http_shim.jobs.jobs_client import JobsClient
from tokenwire.batch_run import BATCH_PATHS
from tokenwire.errors import invalid
from tokenwire.pb.jobs.v1 import jobs_pb2

__all__ = ["BatchBody", "BatchList", "BatchObject", "Batches"]

_STATUSES: Mapping[int, str] = {
    jobs_pb2.BATCH_STATUS_IN_PROGRESS: "in_progress",
    jobs_pb2.BATCH_STATUS_CANCELLING: "cancelling",
    jobs_pb2.BATCH_STATUS_COMPLETED: "completed",
    jobs_pb2.BATCH_STATUS_CANCELLED: "cancelled",
    jobs_pb2.BATCH_STATUS_EXPIRED: "expired",
    jobs_pb2.BATCH_STATUS_FAILED: "failed",
}
_Text = Annotated[str, Meta(max_length=512)]


class BatchBody(Struct):
    """The body of POST /v1/batches."""

    input_file_id: Annotated[str | None, about("Id of the file of requests.")] = None
    endpoint: Annotated[
        str | None,
        about(
            "Path that all requests of the file name.",
            enum=[
                "/v1/chat/completions",
                "/v1/completions",
                "/v1/messages",
                "/v1/responses",
                "/v1/embeddings",
                "/v1/rerank",
                "/v1/score",
                "/v1/classify",
                "/v1/pooling",
            ],
        ),
    ] = None
    completion_window: Annotated[
        str | None, about("24h: what is not answered then, expires.", enum=["24h", None])
    ] = None
    metadata: Annotated[
        Annotated[dict[_Text, _Text], Meta(max_length=16)] | None,
        about("Up to 16 texts by name, which the batch shows.", maxProperties=16),
    ] = None


class RequestCounts(Struct):
    """Lines of a batch."""

    total: int
    completed: int
    failed: int


class BatchObject(Struct):
    """A batch. Times are Unix times in seconds."""

    id: str
    endpoint: str
    input_file_id: str
    completion_window: str
    status: str
    output_file_id: str | None
    error_file_id: str | None
    created_at: int
    in_progress_at: int
    expires_at: int
    completed_at: int | None
    failed_at: int | None
    expired_at: int | None
    cancelling_at: int | None
    cancelled_at: int | None
    request_counts: RequestCounts
    metadata: dict[str, str]
    errors: dict[str, Any] | None
    object: str = "batch"


class BatchList(Struct):
    """The answer of GET /v1/batches."""

    data: list[BatchObject]
    first_id: str | None
    last_id: str | None
    has_more: bool
    object: str = "list"


class Batches:
    """The endpoints."""

    def __init__(self, jobs: JobsClient, bodies: BodyReader) -> None:
        self._jobs = jobs
        self._bodies = bodies

    async def create(self, request: Request) -> Response:
        """Queue a batch."""
        exchange = exchange_of(request.scope)
        read = self._bodies.read(request.scope, request.receive, partial(body_of, BatchBody))
        body, exchange.ignored = await read
        if body.endpoint not in BATCH_PATHS:
            message = f"endpoint must be one of {', '.join(BATCH_PATHS)}."
            raise invalid("endpoint", message)
        if body.completion_window not in (None, "24h"):
            raise invalid("completion_window", "completion_window must be 24h.")
        if not body.input_file_id:
            raise invalid("input_file_id", "input_file_id is required: the id of a file.")
        asked = jobs_pb2.CreateBatchRequest(
            context=context_of(exchange),
            input_file_id=body.input_file_id,
            endpoint=body.endpoint,
            metadata=body.metadata or {},
        )
        return json_response(_object(await self._jobs.create_batch(asked)))

    async def all(self, request: Request) -> Response:
        """List the caller's batches, the newest first unless the query says otherwise."""
        asked = jobs_pb2.ListBatchesRequest(
            context=_context(request), page=page_of(request.query_params)
        )
        answer = await self._jobs.list_batches(asked)
        data = list(map(_object, answer.batches))
        first, last = (data[0].id, data[-1].id) if data else (None, None)
        return json_response(BatchList(data, first, last, answer.has_more))

    async def one(self, request: Request) -> Response:
        identity = request.path_params["batch_id"]
        asked = jobs_pb2.GetBatchRequest(context=_context(request), batch_id=identity)
        return json_response(_object(await self._jobs.batch(asked)))

    async def cancel(self, request: Request) -> Response:
        """End a batch with the answers that it has."""
        identity = request.path_params["batch_id"]
        asked = jobs_pb2.CancelBatchRequest(context=_context(request), batch_id=identity)
        return json_response(_object(await self._jobs.cancel_batch(asked)))


def _context(request: Request) -> jobs_pb2.RequestContext:
    return context_of(exchange_of(request.scope))


def _object(batch: jobs_pb2.Batch) -> BatchObject:
    ended = batch.ended_at if batch.HasField("ended_at") else None

    def ended_as(status: jobs_pb2.BatchStatus.ValueType) -> int | None:
        return ended if batch.status == status else None

    return BatchObject(
        id=batch.id,
        endpoint=batch.endpoint,
        input_file_id=batch.input_file_id,
        completion_window="24h",
        status=_STATUSES[batch.status],
        output_file_id=batch.output_file_id or None,
        error_file_id=batch.error_file_id or None,
        created_at=batch.created_at,
        in_progress_at=batch.created_at,
        expires_at=batch.expires_at,
        completed_at=ended_as(jobs_pb2.BATCH_STATUS_COMPLETED),
        failed_at=ended_as(jobs_pb2.BATCH_STATUS_FAILED),
        expired_at=ended_as(jobs_pb2.BATCH_STATUS_EXPIRED),
        cancelling_at=batch.cancelling_at if batch.HasField("cancelling_at") else None,
        cancelled_at=ended_as(jobs_pb2.BATCH_STATUS_CANCELLED),
        request_counts=RequestCounts(batch.total, batch.completed, batch.failed),
        metadata=dict(batch.metadata),
        errors=_errors(batch),
    )


def _errors(batch: jobs_pb2.Batch) -> dict[str, Any] | None:
    """Return why a batch failed, and the first lines that are no requests."""
    problems = [batch.problem] if batch.HasField("problem") else []
    problems += batch.invalid_lines
    return {"object": "list", "data": list(map(_error, problems))} if problems else None


def _error(problem: jobs_pb2.BatchProblem) -> dict[str, Any]:
    return {
        "code": problem.reason.lower() or "batch_failed",
        "message": problem.message,
        "line": problem.line if problem.HasField("line") else None,
        "param": None,
    }
