"""Servers that a chat talks to, and the choice of their models."""

import asyncio
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager

from tokenwire.cli.other_service import explain
from tokenwire.client import Client
from tokenwire.errors import ServiceError
from tokenwire.flag_parser import suggestion
from tokenwire.tls import ClientTls

__all__ = ["ChatServer", "ModelError", "TargetServer", "not_offered"]


class ModelError(Exception):
    """Model that the server does not offer or can't load. The message is one sentence."""


class ChatServer(ABC):
    """Server of one model or several."""

    @abstractmethod
    async def models(self) -> Sequence[str]:
        """Return the names of the models. Raises ServiceError."""

    @abstractmethod
    async def find(self, name: str) -> str:
        """Return the full name of a model; "" = the only one. Raises ModelError or ServiceError."""

    @abstractmethod
    def lease(self, model: str, show: Callable[[str], None]) -> AbstractAsyncContextManager[Client]:
        """Return a client of a model that stays in memory within the `async with`.

        show: gets what the load does. Raises ModelError or ServiceError.
        """

    @abstractmethod
    async def why_failed(self, error: ServiceError) -> str:
        """Return the reason of a failed request as a sentence."""


class TargetServer(ChatServer):
    """Tokenizer service at a fixed address."""

    def __init__(self, client: Client, target: str, tls: ClientTls | None) -> None:
        self._client = client
        self._target = target
        self._tls = tls

    async def models(self) -> Sequence[str]:
        return [model.id for model in await self._client.models()]

    async def find(self, name: str) -> str:
        served = await self._client.models()
        names = [each for model in served for each in (model.id, *model.aliases)]
        if not name and len(served) > 1:
            raise ModelError(f"{self._target} serves {', '.join(names)}: name one by --model.")
        if name and name not in names:
            raise ModelError(not_offered(name, names, self._target))
        return name or names[0]

    @asynccontextmanager
    async def lease(self, model: str, show: Callable[[str], None]) -> AsyncIterator[Client]:
        yield self._client

    async def why_failed(self, error: ServiceError) -> str:
        # a task of its own: the diagnosis goes on although the answer was cancelled
        return await asyncio.create_task(explain(self._target, error, self._tls))


def not_offered(model: str, names: Sequence[str], where: str) -> str:
    """Return the sentence about a model that a server does not offer."""
    hint = suggestion(model, names) or f" It has {', '.join(names)}."
    return f"{where} has no model {model}.{hint}"
