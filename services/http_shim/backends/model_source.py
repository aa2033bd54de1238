"""Model source: the backend of each model name."""

import asyncio
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol

import grpc

from services.http_shim.backends.backend import Backend, RetryPolicy
from services.http_shim.formats.model_cards import ModelCard, served_card
from services.http_shim.formats.model_statuses import ModelStatus, model_status
from tokenwire.errors import ServiceError
from tokenwire.pb.completion.v1 import models_pb2

__all__ = ["Connection", "ModelSource", "ServedModel", "SingleBackend", "model_not_found"]

_STATUS_SECONDS = 2.0  # above the time in which a tokenizer service gives up on its engine


class Connection:
    """A backend and the number of requests that use it."""

    def __init__(self, target: str, retry_policy: RetryPolicy) -> None:
        self.backend = Backend(target, retry_policy)
        self._users = 0
        self._idle = asyncio.Event()
        self._idle.set()

    @contextmanager
    def used(self) -> Iterator[Backend]:
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
                with self.used() as backend:
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


class ModelSource(Protocol):
    """The models that this server offers."""

    def find(self, name: str | None) -> ServedModel:
        """Return the model of a name; None and "default" mean the only one. Raises ServiceError."""

    async def id_of(self, served: ServedModel) -> str:
        """Return the canonical id of a model, which key files use."""

    async def require(self, names: Sequence[str]) -> None:
        """Raise NOT_FOUND for an unknown name that `find` accepts."""

    async def cards(self) -> list[ModelCard]:
        """Return the cards of all models."""

    async def card(self, name: str) -> ModelCard:
        """Return the card of a name. Raises NOT_FOUND."""

    async def statuses(self) -> list[ModelStatus]:
        """Return the status of each served model, also of those that are not reachable."""

    async def is_ready(self) -> bool:
        """Return whether any backend accepts completions."""

    async def close(self) -> None:
        """Close the backends and abort their requests."""


class SingleBackend:
    """Model source of one tokenizer service, with the service's own model names."""

    def __init__(self, target: str, retry_policy: RetryPolicy) -> None:
        self._connection = Connection(target, retry_policy)
        self._known_id = "default"
        """Id of the model; "default" until the service has told it"""

    def find(self, name: str | None) -> ServedModel:
        return ServedModel("", name or "", self._connection)

    async def id_of(self, served: ServedModel) -> str:
        if served.backend_name not in ("", "default"):
            return served.backend_name
        model, *_adapters = await self.cards()
        return model.id

    async def require(self, names: Sequence[str]) -> None:
        known = {"default", ""}
        for card in await self.cards():
            known |= {card.id, *card.aliases}
        for name in names:
            if name not in known:
                raise model_not_found(name)

    async def cards(self) -> list[ModelCard]:
        with self._connection.used() as backend:
            return [served_card(model) for model in await backend.models()]

    async def card(self, name: str) -> ModelCard:
        for card in await self.cards():
            if name in ("default", card.id, *card.aliases):
                return card
        raise model_not_found(name)

    async def statuses(self) -> list[ModelStatus]:
        answer = await self._connection.status()
        if answer is not None:
            self._known_id = answer.model
        return [model_status(self._known_id, answer)]

    async def is_ready(self) -> bool:
        return await self._connection.backend.is_ready()

    async def close(self) -> None:
        await self._connection.backend.close()


def model_not_found(name: str) -> ServiceError:
    """Return the NOT_FOUND error for an unknown name."""
    return ServiceError(
        grpc.StatusCode.NOT_FOUND,
        "MODEL_NOT_FOUND",
        f"The model {name} does not exist; GET /v1/models lists the models.",
        field="model",
    )
