"""Model source: the backend of each model name."""

import asyncio
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol

import grpc

from services.common.model_files.catalog_file import CatalogModel
from services.http_shim.backends.backend import Backend, BackendSettings
from tokenwire.errors import ServiceError
from tokenwire.pb.completion.v1 import models_pb2

__all__ = [
    "Connection",
    "ListedModel",
    "ModelSource",
    "ServedModel",
    "ServedStatus",
    "SingleBackend",
    "model_not_found",
]

_STATUS_SECONDS = 2.0  # above the time in which a tokenizer service gives up on its engine


class Connection:
    """A backend and the number of requests that use it."""

    def __init__(self, target: str, settings: BackendSettings) -> None:
        self.backend = Backend(target, settings)
        self._users = 0
        self._idle = asyncio.Event()
        self._idle.set()

    @contextmanager
    def lease(self) -> Iterator[Backend]:
        """Count a request as a user; `retire` waits for its end."""
        self._users += 1
        self._idle.clear()
        try:
            yield self.backend
        finally:
            self._users -= 1
            if not self._users:
                self._idle.set()

    async def status(self) -> models_pb2.ModelStatus | None:
        """Return the status of the service's model; None if it does not answer in time."""
        try:
            async with asyncio.timeout(_STATUS_SECONDS):
                with self.lease() as backend:
                    return await backend.status()
        except (ServiceError, TimeoutError):
            return None

    async def retire(self) -> None:
        """Close the backend when no request uses it, or when cancelled. No new one may come."""
        try:
            await self._idle.wait()
        finally:
            await self.backend.close()


@dataclass(frozen=True, slots=True)
class ServedModel:
    """A model and the backend that serves it."""

    id: str
    """Canonical id in answers and key files; a variant has its model's; "" = the backend's id"""
    backend_name: str
    """Name on the backend; "" = its only model"""
    connection: Connection
    max_output_length: int | None = None
    """Limit on max_tokens"""
    context: int | None = None
    """Limit on the tokens of prompt and output together, below the backend's own"""


@dataclass(frozen=True, slots=True)
class ListedModel:
    """A model of the list, and what its backend says of it."""

    row: CatalogModel
    """Row of the catalog; without one, a row with the backend's names of the model"""
    variants: Sequence[str] = ()
    """Full names of its variants"""
    model: models_pb2.Model | None = None
    """The backend's description; None = no backend serves it, or it does not answer now"""


@dataclass(frozen=True, slots=True)
class ServedStatus:
    """The status of a served model."""

    id: str
    status: models_pb2.ModelStatus | None
    """None = its tokenizer service does not answer"""


class ModelSource(Protocol):
    """The models that this server offers."""

    def find(self, name: str | None) -> ServedModel:
        """Return the model of a name; None and "default" mean the only one. Raises ServiceError."""

    async def id_of(self, served: ServedModel) -> str:
        """Return the canonical id of a model, which key files use."""

    async def require(self, names: Sequence[str]) -> None:
        """Raise NOT_FOUND for an unknown name that `find` accepts."""

    async def listed(self) -> list[ListedModel]:
        """Return all models."""

    async def listed_as(self, name: str) -> ListedModel:
        """Return the model of a name. Raises NOT_FOUND."""

    async def statuses(self) -> list[ServedStatus]:
        """Return the status of each served model, also of those that are not reachable."""

    async def is_ready(self) -> bool:
        """Return whether any backend accepts completions."""

    async def close(self) -> None:
        """Close the backends and abort their requests."""


class SingleBackend:
    """Model source of one tokenizer service, with the service's own model names."""

    def __init__(self, target: str, settings: BackendSettings) -> None:
        self._connection = Connection(target, settings)
        self._known_id = "default"
        """Id of the model; "default" until the service has told it"""

    def find(self, name: str | None) -> ServedModel:
        return ServedModel("", name or "", self._connection)

    async def id_of(self, served: ServedModel) -> str:
        if served.backend_name not in ("", "default"):
            return served.backend_name
        model, *_adapters = await self.listed()
        return model.row.id

    async def require(self, names: Sequence[str]) -> None:
        known = {"default", ""}
        for model in await self.listed():
            known.update(model.row.names)
        for name in names:
            if name not in known:
                raise model_not_found(name)

    async def listed(self) -> list[ListedModel]:
        with self._connection.lease() as backend:
            return [_listed(model) for model in await backend.models()]

    async def listed_as(self, name: str) -> ListedModel:
        for model in await self.listed():
            if name in ("default", *model.row.names):
                return model
        raise model_not_found(name)

    async def statuses(self) -> list[ServedStatus]:
        answer = await self._connection.status()
        if answer is not None:
            self._known_id = answer.model
        return [ServedStatus(self._known_id, answer)]

    async def is_ready(self) -> bool:
        return await self._connection.backend.is_ready()

    async def close(self) -> None:
        await self._connection.backend.close()


def _listed(model: models_pb2.Model) -> ListedModel:
    names = (model.id, *model.aliases)
    return ListedModel(CatalogModel(id=model.id, names=names, target=""), (), model)


def model_not_found(name: str) -> ServiceError:
    """Return the NOT_FOUND error for an unknown name."""
    return ServiceError(
        grpc.StatusCode.NOT_FOUND,
        "MODEL_NOT_FOUND",
        f"The model {name} does not exist; GET /v1/models lists the models.",
        field="model",
    )
