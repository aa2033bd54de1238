"""Endpoints for operators: /health, /ready, /metrics, /status.json, /version."""

import math
from collections.abc import Sequence
from importlib.metadata import version

import grpc
from msgspec import UNSET, Struct, UnsetType
from prometheus_client import REGISTRY
from prometheus_client.exposition import choose_encoder
from starlette.requests import Request
from starlette.responses import Response

from services.common.faults import faulty_parts
from services.http_shim.backends.model_source import ModelSource
from services.http_shim.backends.status_history import StatusHistory
from services.http_shim.endpoints.model_statuses import Status, model_status
from services.http_shim.http.body import json_response
from services.http_shim.http.gate import Gate
from services.http_shim.jobs.jobs_client import JobsClient
from tokenwire.errors import ServiceError, invalid

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

    def __init__(
        self, models: ModelSource, gate: Gate, jobs: JobsClient, history: StatusHistory
    ) -> None:
        self._models = models
        self._gate = gate
        self._jobs = jobs
        self._history = history

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

        With `since`, also its samples after that time: those of the last ten minutes at most.
        """
        since = _time(request.query_params.get("since"))
        models = [model_status(each) for each in await self._history.statuses()]
        if since is not None:
            for model in models:
                model.history = self._history.samples(model.id, since)
        return json_response(Status(version("tokenwire"), self._history.now, models))

    async def version(self, request: Request) -> Response:
        """Return the version of the server."""
        return json_response(Version(version("tokenwire")))


def _time(text: str | None) -> float | None:
    """Return the value of `since`. Raises INVALID_ARGUMENT."""
    try:
        since = None if text is None else float(text)
    except ValueError:
        since = math.nan
    if since is not None and not math.isfinite(since):
        raise invalid("since", "since must be a time of a sample, in seconds.")
    return since
