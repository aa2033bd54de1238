"""Servers that a chat talks to, and the choice of their models."""

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Sequence
from difflib import get_close_matches
from typing import NamedTuple

from tokenwire.cli.other_service import explain
from tokenwire.client import Client
from tokenwire.errors import ServiceError
from tokenwire.tls import ClientTls

__all__ = ["ChatServer", "ModelError", "OpenedModel", "TargetServer", "not_offered"]


class ModelError(Exception):
    """Model that the server does not offer or can't load. The message is one sentence."""


class OpenedModel(NamedTuple):
    """A model that answers."""

    name: str
    client: Client


class ChatServer(ABC):
    """Server of one model or several."""

    @abstractmethod
    async def models(self) -> Sequence[str]:
        """Return the names of the models. Raises ServiceError or ModelError."""

    @abstractmethod
    async def use(self, model: str) -> "OpenedModel":
        """Return a model that is ready to answer; "" = the only one.

        Raises ModelError or ServiceError.
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

    async def use(self, model: str) -> OpenedModel:
        served = await self._client.models()
        names = [name for each in served for name in (each.id, *each.aliases)]
        if not model and len(served) > 1:
            raise ModelError(f"{self._target} serves {', '.join(names)}: name one by --model.")
        if model and model not in names:
            raise ModelError(not_offered(model, names, self._target))
        return OpenedModel(model or names[0], self._client)

    async def why_failed(self, error: ServiceError) -> str:
        return await asyncio.create_task(explain(self._target, error, self._tls))


def not_offered(model: str, names: Sequence[str], where: str) -> str:
    """Return the sentence about a model that a server does not offer."""
    close = get_close_matches(model, names, 1)
    hint = f"Did you mean {close[0]}?" if close else f"It has {', '.join(names)}."
    return f"{where} has no model {model}. {hint}"
