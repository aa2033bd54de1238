"""Endpoints POST /v1/models/load and /v1/models/unload, for operators."""

from functools import partial
from typing import Annotated

from msgspec import Struct
from starlette.requests import Request
from starlette.responses import Response

from services.http_shim.backends.model_source import ModelSource
from services.http_shim.backends.on_demand import OnDemandConnection, require_on_demand
from services.http_shim.dialects.bodies import Body, body_of
from services.http_shim.dialects.fields import KeepAlive, about, read_keep_alive
from services.http_shim.endpoints.model_cards import model_card
from services.http_shim.http.access import authorized_model, require_admin
from services.http_shim.http.body import BodyReader, json_response
from services.http_shim.http.exchange import exchange_of
from tokenwire.errors import invalid

__all__ = ["LoadBody", "ModelLoading", "UnloadBody"]


class LoadBody(Struct):
    """The body of POST /v1/models/load."""

    model: Annotated[str | None, about("Id, alias or id:variant.", minLength=1)] = None
    keep_alive: KeepAlive = None


class UnloadBody(Struct):
    """The body of POST /v1/models/unload."""

    model: Annotated[str | None, about("Id, alias or id:variant.", minLength=1)] = None
    force: Annotated[
        bool | None, about("Unload it although requests use it; they fail.", default=False)
    ] = None


class ModelLoading:
    """The endpoints of models on demand."""

    def __init__(self, models: ModelSource, bodies: BodyReader) -> None:
        self._models = models
        self._bodies = bodies

    async def load(self, request: Request) -> Response:
        """Load a model, and return its card."""
        require_admin(request.scope, "Loading a model")
        body = await self._read(request, LoadBody)
        keep_alive = read_keep_alive(body.keep_alive)
        connection = await self._connection(request, body.model)
        await connection.load(keep_alive)
        return await self._card(body.model)

    async def unload(self, request: Request) -> Response:
        """Unload a model, and return its card."""
        require_admin(request.scope, "Unloading a model")
        body = await self._read(request, UnloadBody)
        connection = await self._connection(request, body.model)
        await connection.unload(force=bool(body.force))
        return await self._card(body.model)

    async def _read(self, request: Request, kind: type[Body]) -> Body:
        exchange = exchange_of(request.scope)
        read = self._bodies.read(request.scope, request.receive, partial(body_of, kind))
        body, exchange.ignored = await read
        return body

    async def _connection(self, request: Request, name: str | None) -> OnDemandConnection:
        """Return the connection to a model on demand. Raises ServiceError."""
        if not name:
            raise invalid("model", "model is required; GET /v1/models lists the models.")
        served = await authorized_model(exchange_of(request.scope), self._models, name)
        return require_on_demand(served, name, "model")

    async def _card(self, name: str | None) -> Response:
        return json_response(model_card(await self._models.listed_as(name or "")))
