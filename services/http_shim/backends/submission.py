"""One completion or chat on a tokenizer service, until it is admitted."""

import asyncio
from collections.abc import Callable
from typing import Protocol

from services.http_shim.backends.tokenizer_link import MAX_LOSSES, TokenizerLink, no_service
from tokenwire.errors import ServiceError
from tokenwire.pb.completion.v1 import completion_pb2
from tokenwire.session import Listener

__all__ = ["Submission", "TokenizerChoice"]

_RETRIED = frozenset({"SESSION_LOST", "DRAINING", "NO_SERVICE"})
"""Reasons after which a request that was not yet admitted is submitted again"""


class TokenizerChoice(Protocol):
    """The tokenizer services that a request may use."""

    def choose(self) -> TokenizerLink | None:
        """Return the service for a new request; None if no service is known."""

    def doubt(self, link: TokenizerLink) -> None:
        """Use a service no more until it is ready again."""

    async def wait_until_serving(self, error: ServiceError) -> None:
        """Wait until a service serves. Raises `error` if that takes too long."""


class Submission:
    """A submitted completion or chat: grants credit and cancels.

    A submission listens to its request until admission. The client has received nothing until
    then, so a request that loses its service is submitted again, to another one or when it is
    back. Its images are in memory until then.
    """

    __slots__ = (
        "_cancelled",
        "_command",
        "_handle",
        "_link",
        "_listener",
        "_losses",
        "_on_admitted",
        "_retry",
        "_services",
    )

    def __init__(
        self,
        services: TokenizerChoice,
        command: completion_pb2.SessionCommand,
        listener: Listener[completion_pb2.SessionEvent],
        on_admitted: Callable[[], None],
    ) -> None:
        self._services = services
        self._command: completion_pb2.SessionCommand | None = command
        self._on_admitted = on_admitted
        self._listener = listener
        self._losses = 0
        self._cancelled = False
        self._retry: asyncio.Task[None] | None = None
        self._link: TokenizerLink | None = None
        self._handle = 0
        """On the Session of the link"""
        self._submit()

    def on_event(self, event: completion_pb2.SessionEvent) -> None:
        """Hand the admission, and all later events directly, to the listener."""
        assert self._link is not None
        self._command = None
        self._on_admitted()
        self._link.session.hand_over(self._handle, self._listener)
        self._listener.on_event(event)

    def on_error(self, error: ServiceError) -> None:
        """Submit the request again if it lost its service, else hand the error to the listener."""
        self._losses += error.reason == "SESSION_LOST"
        if error.reason in _RETRIED and self._link is not None:
            self._services.doubt(self._link)
        if error.reason in _RETRIED and self._losses <= MAX_LOSSES and not self._cancelled:
            self._retry = asyncio.ensure_future(self._submit_again(error))
        else:
            self._listener.on_error(error)

    def grant(self, tokens: int) -> None:
        """Let every choice send that many more tokens."""
        credit = completion_pb2.Credit(tokens=tokens)
        self._send(completion_pb2.SessionCommand(credit=credit))

    def cancel(self) -> None:
        """Abort the request; its listener gets no more events."""
        self._cancelled = True
        if self._retry is not None:
            self._retry.cancel()
        if self._link is not None:
            self._link.session.detach(self._handle)
        self._send(completion_pb2.SessionCommand(cancel=completion_pb2.Cancel()))

    def _send(self, command: completion_pb2.SessionCommand) -> None:
        if self._link is not None:
            command.handle = self._handle
            self._link.session.send(command)

    def _submit(self) -> None:
        assert self._command is not None  # the request is not admitted
        self._link = self._services.choose()
        if self._link is None:
            self.on_error(no_service())
            return
        self._handle = self._link.session.open(self)
        self._send(self._command)

    async def _submit_again(self, error: ServiceError) -> None:
        try:
            await self._services.wait_until_serving(error)
        except ServiceError as refusal:
            self._listener.on_error(refusal)
        else:
            self._submit()
