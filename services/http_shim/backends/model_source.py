"""Model source: the backend of each model name."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from services.common.model_files.catalog_file import CatalogModel
from services.common.model_files.unknown_model import model_not_found
from services.http_shim.backends.backend import BackendSettings
from services.http_shim.backends.connection import Connection
from services.http_shim.backends.model_manager import ModelManagerClient
from tokenwire.pb.completion.v1 import models_pb2
from tokenwire.pb.models.v1 import model_manager_pb2

__all__ = [
    "ListedModel",
    "ModelSource",
    "ServedModel",
    "ServedStatus",
    "SingleBackend",
]


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
    state: model_manager_pb2.Model | None = None
    """State of a model on demand; None = the model is always loaded, or its state is not known"""


@dataclass(frozen=True, slots=True)
class ServedStatus:
    """The status of a served model."""

    id: str
    status: models_pb2.ModelStatus | None
    """None = its tokenizer service does not answer"""
    state: model_manager_pb2.Model | None = None
    """State of a model on demand; None = the model is always loaded, or its state is not known"""
    on_demand: bool = False


class ModelSource(Protocol):
    """The models that this server offers."""

    @property
    def manager(self) -> ModelManagerClient | None:
        """The manager of models on demand; None = there are none."""

    async def find(self, name: str | None) -> ServedModel:
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

    manager = None

    def __init__(self, target: str, settings: BackendSettings) -> None:
        self._connection = Connection(target, settings)
        self._known_id = "default"
        """Id of the model; "default" until the service has told it"""

    async def find(self, name: str | None) -> ServedModel:
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
                raise model_not_found(name, known)

    async def listed(self) -> list[ListedModel]:
        return [_listed(model) for model in await self._connection.models()]

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
        return await self._connection.is_ready()

    async def close(self) -> None:
        await self._connection.close()


def _listed(model: models_pb2.Model) -> ListedModel:
    names = (model.id, *model.aliases)
    return ListedModel(CatalogModel(id=model.id, names=names, target=""), (), model)
