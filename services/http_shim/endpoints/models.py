"""Endpoints GET /v1/models and GET /v1/models/{id}."""

from starlette.requests import Request
from starlette.responses import Response

from services.http_shim.backends.model_source import ModelSource
from services.http_shim.formats.model_cards import ModelList
from services.http_shim.http.body import json_response

__all__ = ["Models"]


class Models:
    """The model endpoints."""

    def __init__(self, models: ModelSource) -> None:
        self._models = models

    async def all(self, request: Request) -> Response:
        """List the models."""
        return json_response(ModelList("list", await self._models.cards()))

    async def one(self, request: Request) -> Response:
        """Return a model by its id, an alias or a variant; "default" is the only one."""
        name = request.path_params["model"]
        return json_response(await self._models.card(name)) if name else await self.all(request)
