"""The models that are served, in OpenAI's form."""

import grpc
from msgspec import Struct
from starlette.requests import Request
from starlette.responses import Response

from services.http_shim.backend import Backend
from services.http_shim.body import json_response
from tokenwire.completion.v1 import completion_pb2
from tokenwire.errors import ServiceError

__all__ = ["Models"]


class ModelCard(Struct):
    """One model."""

    id: str
    object: str
    created: int
    owned_by: str
    aliases: list[str]
    max_model_len: int
    max_output_length: int
    max_logprobs: int
    infill: bool
    grammar: bool
    system_fingerprint: str


class ModelList(Struct):
    """All of them."""

    object: str
    data: list[ModelCard]


class Models:
    """GET /v1/models and /v1/models/{id}."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend

    async def all(self, request: Request) -> Response:
        """The list."""
        cards = [_card(model) for model in await self._backend.models()]
        return json_response(ModelList("list", cards))

    async def one(self, request: Request) -> Response:
        """A model, by its id or an alias."""
        name = request.path_params["model"]
        for model in await self._backend.models():
            if name == model.id or name in model.aliases:
                return json_response(_card(model))
        raise ServiceError(
            grpc.StatusCode.NOT_FOUND,
            "MODEL_NOT_FOUND",
            f"There is no model {name}; GET /v1/models lists those there are.",
            field="model",
        )


def _card(model: completion_pb2.Model) -> ModelCard:
    return ModelCard(
        id=model.id,
        object="model",
        created=model.created,
        owned_by="tokenwire",
        aliases=list(model.aliases),
        max_model_len=model.context_length,
        max_output_length=model.max_output_length,
        max_logprobs=model.max_logprobs,
        infill=model.infill,
        grammar=model.grammar,
        system_fingerprint=model.system_fingerprint,
    )
