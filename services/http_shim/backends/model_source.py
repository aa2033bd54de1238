"""What answers to a model's name."""

import asyncio
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol

import grpc

from services.http_shim.backends.backend import Backend, RetryPolicy
from services.http_shim.formats.model_cards import ModelCard, served_card
from tokenwire.errors import ServiceError

__all__ = ["Connection", "ModelSource", "ServedModel", "SingleBackend", "model_not_found"]


class Connection:
    """A backend, and how many requests use it."""

    def __init__(self, target: str, retry_policy: RetryPolicy) -> None:
        self.backend = Backend(target, retry_policy)
        self._users = 0
        self._idle = asyncio.Event()
        self._idle.set()

    @contextmanager
    def used(self) -> Iterator[Backend]:
        """Around a request: until it ends, `retire` waits."""
        self._users += 1
        self._idle.clear()
        try:
            yield self.backend
        finally:
            self._users -= 1
            if not self._users:
                self._idle.set()

    async def retire(self) -> None:
        """Close it once nobody uses it. Nobody new may come."""
        await self._idle.wait()
        await self.backend.close()


@dataclass(frozen=True, slots=True)
class ServedModel:
    """A model that can be asked."""

    id: str
    """Canonical id, which answers bear and keys are for; a variant has that of the model that it
    varies. "" = as the backend calls it"""
    backend_name: str
    """What the backend knows it by; "" = its only model"""
    connection: Connection
    max_output_length: int | None = None
    context: int | None = None
    """Tokens of prompt and output together, if fewer than the backend's"""


class ModelSource(Protocol):
    """The models of this server."""

    def find(self, name: str | None) -> ServedModel:
        """The model of a name; None and "default" stand for the only one. Raises ServiceError."""

    async def id_of(self, served: ServedModel) -> str:
        """What keys call the model."""

    async def require(self, names: Sequence[str]) -> None:
        """Raises NOT_FOUND for a name that `find` can't judge, before anything is asked of it."""

    async def cards(self) -> list[ModelCard]:
        """All of them."""

    async def card(self, name: str) -> ModelCard:
        """The one of a name. Raises NOT_FOUND."""

    async def is_ready(self) -> bool:
        """Whether any of them would answer."""

    async def close(self) -> None:
        """Cut what still runs."""


class SingleBackend:
    """The models of one tokenizer service, under the names that it gives them."""

    def __init__(self, target: str, retry_policy: RetryPolicy) -> None:
        self._connection = Connection(target, retry_policy)

    def find(self, name: str | None) -> ServedModel:
        return ServedModel("", name or "", self._connection)

    async def id_of(self, served: ServedModel) -> str:
        if served.backend_name not in ("", "default"):
            return served.backend_name
        (card,) = await self.cards()
        return card.id

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

    async def is_ready(self) -> bool:
        return await self._connection.backend.is_ready()

    async def close(self) -> None:
        await self._connection.backend.close()


def model_not_found(name: str) -> ServiceError:
    """NOT_FOUND for a name that is nobody's."""
    return ServiceError(
        grpc.StatusCode.NOT_FOUND,
        "MODEL_NOT_FOUND",
        f"There is no model {name}; GET /v1/models lists those there are.",
        field="model",
    )
