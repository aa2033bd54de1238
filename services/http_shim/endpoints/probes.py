"""Endpoints for operators: /health, /ready, /metrics, /status.json, /version."""

import asyncio
import time
from collections.abc import Sequence
from importlib.metadata import version

import grpc
from msgspec import UNSET, Struct, UnsetType
from prometheus_client import REGISTRY
from prometheus_client.exposition import choose_encoder
from starlette.requests import Request
from starlette.responses import Response

from services.common.faults import faulty_parts
from services.http_shim.backends.model_source import ModelSource, ServedStatus
from services.http_shim.endpoints.model_statuses import Status, model_status
from services.http_shim.http.body import json_response
from services.http_shim.http.gate import Gate
from services.http_shim.jobs.jobs_client import JobsClient
from tokenwire.errors import ServiceError

__all__ = ["Probes", "State", "Version"]


class State(Struct):
    """Answer of a successful probe."""

    status: str
    faults: Sequence[str] | UnsetType = UNSET
    """Parts of the server that do not work; completions are served all the same"""


class Version(Struct):
    """Answer of /version."""

    version: str


class Probes:
    """The endpoints for operators."""

    def __init__(self, models: ModelSource, gate: Gate, jobs: JobsClient) -> None:
        self._models = models
        self._gate = gate
        self._jobs = jobs
        self._began = time.monotonic()
        self._asking: asyncio.Task[list[ServedStatus]] | None = None

    async def health(self, request: Request) -> Response:
        """Report that the process is alive."""
        return json_response(State("ok"))

    async def ready(self, request: Request) -> Response:
        """Report whether the server accepts completions, and what else does not work.

        Raises UNAVAILABLE.
        """
        if self._gate.closed or not await self._models.is_ready():
            raise ServiceError(
                grpc.StatusCode.UNAVAILABLE,
                "NOT_READY",
                "The server is stopping." if self._gate.closed else "The model is not ready yet.",
                retry_seconds=1,
            )
        faults = {*faulty_parts(), *await self._jobs.faults()}
        return json_response(State("ready", sorted(faults) or UNSET))

    async def metrics(self, request: Request) -> Response:
        """Return the metrics in Prometheus' text format."""
        encode, content_type = choose_encoder(request.headers.get("accept", ""))
        return Response(encode(REGISTRY), headers={"content-type": content_type})

    async def status(self, request: Request) -> Response:
        """Return the counts and the load of each served model.

        Concurrent requests share one call of the services, so that many open pages cost one.
        """
        uptime = time.monotonic() - self._began
        if self._asking is None or self._asking.done():
            self._asking = asyncio.create_task(self._models.statuses())
        statuses = await asyncio.shield(self._asking)
        models = [model_status(each) for each in statuses]
        return json_response(Status(version("tokenwire"), uptime, models))

    async def version(self, request: Request) -> Response:
        """Return the version of the server."""
        return json_response(Version(version("tokenwire")))
