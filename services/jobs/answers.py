"""Answers to requests that the service makes on behalf of their creators."""

import asyncio
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass
from typing import Protocol

from services.jobs.creator import Creator
from tokenwire.batch_run import Reply

__all__ = ["Answering", "BackgroundAnswer"]


@dataclass(frozen=True, slots=True)
class BackgroundAnswer:
    """The answer to a request that the model has accepted."""

    model: str
    """Canonical id of the model"""
    ignored: Sequence[str]
    """Paths of the body's parts that have no effect"""
    events: AsyncGenerator[bytes, None]
    """Encoded server-sent events, of which the last one has the ended response. Close it if you
    leave it early"""


class Answering(Protocol):
    """Answers JSON bodies in the forms of OpenAI's and Anthropic's APIs."""

    async def answer(self, path: str, body: bytes, creator: Creator) -> Reply:
        """Return the whole answer to a body, or the refusal of it. It counts as a request."""

    async def begin(
        self, path: str, body: bytes, creator: Creator, cancelled: asyncio.Event
    ) -> BackgroundAnswer:
        """Start the answer to a body that is to run in the background.

        cancelled: ends the response with the output that it has, once it is set. Raises
        ServiceError, whose field has the client's name, if the request is refused.
        """
