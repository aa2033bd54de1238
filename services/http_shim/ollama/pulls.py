"""Endpoints POST /api/pull and DELETE /api/delete, for operators."""

import hashlib
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing
from functools import partial
from typing import Annotated, TypeVar

import grpc
import msgspec
from msgspec import UNSET, Struct, UnsetType
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from services.http_shim.backends.model_manager import ModelManagerClient
from services.http_shim.backends.model_source import ModelSource
from services.http_shim.dialects.bodies import body_of
from services.http_shim.dialects.fields import about
from services.http_shim.dialects.ollama.types import OllamaName
from services.http_shim.dialects.ollama.write import OLLAMA_ERRORS
from services.http_shim.http.access import require_admin
from services.http_shim.http.body import BodyReader, json_response
from services.http_shim.http.exchange import exchange_of
from services.http_shim.ollama.model_names import existing_name, hub_name, naming
from tokenwire.errors import ServiceError, invalid

__all__ = ["DeleteBody", "OllamaPulls", "PullBody", "PullStatus"]

_encode = msgspec.json.Encoder().encode


class DeleteBody(Struct):
    """The body of DELETE /api/delete."""

    model: OllamaName = None
    name: Annotated[str | None, about("Another name of model.")] = None


class PullBody(DeleteBody):
    """The body of POST /api/pull."""

    stream: Annotated[
        bool | None, about("Answer with a line of JSON for each step.", default=True)
    ] = None
    insecure: Annotated[bool | None, about("No effect.", default=False)] = None
    username: Annotated[str | None, about("No effect.")] = None
    password: Annotated[str | None, about("No effect.")] = None


class PullStatus(Struct):
    """A line of the answer of /api/pull."""

    status: str
    digest: str | UnsetType = UNSET
    """Name of the download: a digest of the model's name"""
    total: int | UnsetType = UNSET
    """Bytes to download"""
    completed: int | UnsetType = UNSET


_Body = TypeVar("_Body", bound=DeleteBody)


class OllamaPulls:
    """The endpoints."""

    def __init__(self, models: ModelSource, bodies: BodyReader) -> None:
        self._models = models
        self._bodies = bodies

    async def pull(self, request: Request) -> Response:
        """Download a model from the hub."""
        require_admin(request.scope, "Pulling a model")
        body = await self._read(request, PullBody)
        statuses = _statuses(self._manager(), hub_name(body.model or body.name or ""))
        if body.stream is False:
            async with aclosing(statuses):
                *_, last = [status async for status in statuses]
            return json_response(last)
        first = await anext(statuses)  # a refusal has a status of its own
        lines = _lines(first, statuses, exchange_of(request.scope).request_id)
        return StreamingResponse(lines, media_type="application/x-ndjson")

    async def delete(self, request: Request) -> Response:
        """Remove a model's files from the hub's cache."""
        require_admin(request.scope, "Deleting a model")
        body = await self._read(request, DeleteBody)
        named = body.model or body.name or ""
        with naming(named):
            name = await existing_name(self._models, named)
            await self._manager().remove(name)
        return Response()

    def _manager(self) -> ModelManagerClient:
        if self._models.manager is None:
            raise ServiceError(
                grpc.StatusCode.UNIMPLEMENTED,
                "UNSUPPORTED",
                "This server has a fixed set of models: start it with --models to download others.",
            )
        return self._models.manager

    async def _read(self, request: Request, kind: type[_Body]) -> _Body:
        exchange = exchange_of(request.scope)
        read = self._bodies.read(request.scope, request.receive, partial(body_of, kind))
        body, exchange.ignored = await read
        if not (body.model or body.name):
            raise invalid("model", "model is required.")
        return body


async def _statuses(manager: ModelManagerClient, name: str) -> AsyncGenerator[PullStatus, None]:
    digest = hashlib.sha256(name.encode()).hexdigest()
    pulling = f"pulling {digest[:12]}"
    has_begun = False
    async with aclosing(manager.pull(name)) as pull:
        async for progress in pull:
            if not has_begun:
                has_begun = True
                yield PullStatus("pulling manifest")
            if progress.total_bytes:
                total, completed = progress.total_bytes, progress.completed_bytes
                yield PullStatus(pulling, f"sha256:{digest}", total, completed)
    yield PullStatus("success")


async def _lines(
    first: PullStatus, statuses: AsyncGenerator[PullStatus, None], request_id: str
) -> AsyncIterator[bytes]:
    """Yield a line for each status, and one for a failure."""
    try:
        async with aclosing(statuses):
            yield _encode(first) + b"\n"
            async for status in statuses:
                yield _encode(status) + b"\n"
    except ServiceError as error:
        yield OLLAMA_ERRORS.of_service(error, request_id) + b"\n"
