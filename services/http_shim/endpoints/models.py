"""Endpoints GET /v1/models and GET /v1/models/{id}."""

import asyncio

from starlette.requests import Request
from starlette.responses import Response

from services.http_shim.backends.model_source import ModelSource
from services.http_shim.endpoints.model_cards import ModelList, model_card
from services.http_shim.http.body import json_response

__all__ = ["Models"]

_CARDS_AT_ONCE = 250  # between two yields to the event loop: long lists would stall streams


class Models:
    """The model endpoints."""

    def __init__(self, models: ModelSource) -> None:
        self._models = models

    async def all(self, request: Request) -> Response:
        """List the models."""
        cards = []
        for listed in await self._models.listed():
            cards.append(model_card(listed))
            if len(cards) % _CARDS_AT_ONCE == 0:
                await asyncio.sleep(0)  # other requests get a turn
        return json_response(ModelList("list", cards))

    async def one(self, request: Request) -> Response:
        """Return a model by its id, an alias or a variant; "default" is the only one."""
        name = request.path_params["model"]
        if not name:
            return await self.all(request)
        return json_response(model_card(await self._models.listed_as(name)))
