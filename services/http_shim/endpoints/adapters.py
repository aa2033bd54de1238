"""Endpoints POST /v1/load_lora_adapter and /v1/unload_lora_adapter, as vLLM has them."""

from collections.abc import Mapping
from functools import partial
from typing import Annotated

import grpc
from msgspec import Struct
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response

from services.http_shim.backends.model_source import ModelSource, ServedModel
from services.http_shim.dialects.bodies import Body, body_of
from services.http_shim.dialects.fields import about
from services.http_shim.errors import client_field_names
from services.http_shim.http.access import authorized_model
from services.http_shim.http.body import BodyReader
from services.http_shim.http.exchange import exchange_of
from tokenwire.errors import ServiceError, invalid
from tokenwire.pb.completion.v1 import models_pb2

__all__ = ["Adapters", "LoadAdapterBody", "UnloadAdapterBody"]

_FIELDS: Mapping[str, str] = {"name": "lora_name", "path": "lora_path"}


class LoadAdapterBody(Struct):
    """The body of POST /v1/load_lora_adapter."""

    lora_name: Annotated[
        str | None, about("Name of the adapter, for which requests ask as their model.")
    ] = None
    lora_path: Annotated[
        str | None, about("Its directory, in PEFT's format, on the machines of the engines.")
    ] = None


class UnloadAdapterBody(Struct):
    """The body of POST /v1/unload_lora_adapter."""

    lora_name: Annotated[
        str | None, about("Name of the adapter, for which requests ask as their model.")
    ] = None


class Adapters:
    """The endpoints of LoRA adapters."""

    def __init__(self, models: ModelSource, bodies: BodyReader, *, is_allowed: bool) -> None:
        """is_allowed: False = every request is refused."""
        self._models = models
        self._bodies = bodies
        self._is_allowed = is_allowed

    async def load(self, request: Request) -> Response:
        """Load an adapter on all engines of its model."""
        body = await self._read(request, LoadAdapterBody)
        served = await self._adapter(request, body.lora_name)
        if not body.lora_path:
            raise invalid(
                "lora_path", "lora_path is required: a directory on the engine's machine."
            )
        asked = models_pb2.LoadAdapterRequest(name=served.backend_name, path=body.lora_path)
        with client_field_names(_client_name), served.connection.lease() as backend:
            await backend.load_adapter(asked)
        return PlainTextResponse(f"Success: LoRA adapter '{body.lora_name}' added successfully.")

    async def unload(self, request: Request) -> Response:
        """Unload an adapter from all engines of its model. Its running requests go on."""
        body = await self._read(request, UnloadAdapterBody)
        served = await self._adapter(request, body.lora_name)
        asked = models_pb2.UnloadAdapterRequest(name=served.backend_name)
        with client_field_names(_client_name), served.connection.lease() as backend:
            await backend.unload_adapter(asked)
        return PlainTextResponse(f"Success: LoRA adapter '{body.lora_name}' removed successfully.")

    async def _adapter(self, request: Request, name: str | None) -> ServedModel:
        """Return the adapter of that name; a catalog must list it. Raises ServiceError."""
        if not name:
            raise invalid("lora_name", "lora_name is required: the name that requests give.")
        served = await authorized_model(exchange_of(request.scope), self._models, name)
        if not served.backend_name:
            raise invalid("lora_name", f"{name} is a model of the catalog, not an adapter.")
        return served

    async def _read(self, request: Request, kind: type[Body]) -> Body:
        """Return the body, and note its ignored fields for the header."""
        if not self._is_allowed:
            raise ServiceError(
                grpc.StatusCode.PERMISSION_DENIED,
                "ADAPTER_ROUTES_OFF",
                "This server does not let clients change its adapters (--adapter-routes).",
            )
        read = self._bodies.read(request.scope, request.receive, partial(body_of, kind))
        body, exchange_of(request.scope).ignored = await read
        return body


def _client_name(field: str) -> str:
    return _FIELDS.get(field, field)
