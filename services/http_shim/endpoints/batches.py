"""Endpoints of batches: /v1/batches."""

import secrets
import time
from functools import partial
from typing import Annotated, Any

from msgspec import Meta, Struct
from starlette.requests import Request
from starlette.responses import Response

from services.http_shim.batches.batch_runner import BatchRunner
from services.http_shim.dialects.bodies import body_of
from services.http_shim.dialects.fields import about
from services.http_shim.endpoints.paging import page_of
from services.http_shim.http.body import BodyReader, json_response
from services.http_shim.http.exchange import exchange_of
from services.http_shim.stored.file_store import FileStore, StoredBatch
from tokenwire.batch_run import BATCH_PATHS
from tokenwire.errors import ServiceError, invalid

__all__ = ["BatchBody", "BatchList", "BatchObject", "Batches"]

_DAY = 24 * 60 * 60
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

    def __init__(self, store: FileStore, runner: BatchRunner, bodies: BodyReader) -> None:
        self._store = store
        self._runner = runner
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
        try:
            await self._store.thread.run(self._store.file, body.input_file_id, exchange.owner)
        except ServiceError as error:
            error.field = "input_file_id"
            raise
        now = int(time.time())
        batch = StoredBatch(
            id=f"batch_{secrets.token_hex(12)}",
            tenant=exchange.tenant,
            account="" if exchange.account is None else exchange.account.id,
            endpoint=body.endpoint,
            input_file=body.input_file_id,
            metadata=body.metadata or {},
            created=now,
            expires=now + _DAY,
        )
        await self._runner.add(batch)
        return json_response(_object(batch))

    async def all(self, request: Request) -> Response:
        """List the caller's batches, the newest first unless the query says otherwise."""
        page = page_of(request.query_params)
        owner = exchange_of(request.scope).owner
        batches, has_more = await self._store.thread.run(self._store.batches, owner, page)
        data = list(map(_object, batches))
        first, last = (data[0].id, data[-1].id) if data else (None, None)
        return json_response(BatchList(data, first, last, has_more))

    async def one(self, request: Request) -> Response:
        return json_response(_object(await self._found(request)))

    async def cancel(self, request: Request) -> Response:
        """End a batch with the answers that it has."""
        return json_response(_object(await self._runner.cancel(await self._found(request))))

    async def _found(self, request: Request) -> StoredBatch:
        identity = request.path_params["batch_id"]
        owner = exchange_of(request.scope).owner
        return await self._store.thread.run(self._store.batch, identity, owner)


def _object(batch: StoredBatch) -> BatchObject:
    def ended_as(status: str) -> int | None:
        return batch.ended if batch.status == status else None

    errors = None
    if batch.problem:
        code = batch.reason.lower() or "batch_failed"
        error = {"code": code, "message": batch.problem, "line": batch.line, "param": None}
        errors = {"object": "list", "data": [error]}
    return BatchObject(
        id=batch.id,
        endpoint=batch.endpoint,
        input_file_id=batch.input_file,
        completion_window="24h",
        status=batch.status,
        output_file_id=batch.output_file,
        error_file_id=batch.error_file,
        created_at=batch.created,
        in_progress_at=batch.created,
        expires_at=batch.expires,
        completed_at=ended_as("completed"),
        failed_at=ended_as("failed"),
        expired_at=ended_as("expired"),
        cancelling_at=batch.cancelled,
        cancelled_at=ended_as("cancelled"),
        request_counts=RequestCounts(batch.total, batch.answered, batch.failed),
        metadata=batch.metadata,
        errors=errors,
    )
