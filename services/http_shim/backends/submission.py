"""One request, on one tokenizer service after the other if they are lost."""

import asyncio
import logging
from collections.abc import Callable
from typing import Protocol

import grpc

from services.common.errors import internal_error
from services.common.peers.losses import Losses
from services.http_shim.backends.output_collector import OutputCollector
from services.http_shim.backends.tokenizer_link import TokenizerLink, no_service
from services.http_shim.images.kept_images import KeptImages
from services.http_shim.images.request_images import RequestImages
from tokenwire.errors import ServiceError
from tokenwire.pb.completion.v1 import completion_pb2
from tokenwire.pb.types.v1 import types_pb2

__all__ = ["Submission", "TokenizerChoice"]

_LOG = logging.getLogger("submission")
_LAST_SECONDS = 5.0
"""Longest wait for the end of an aborted request"""
_RETRIED = frozenset({"SESSION_LOST", "DRAINING", "NO_SERVICE", "NOT_KNOWN"})
"""Reasons after which a request continues on another service, or when one is back"""


class TokenizerChoice(Protocol):
    """The tokenizer services that a request may use."""

    @property
    def kept_images(self) -> KeptImages:
        """Images of admitted requests."""

    def choose(self) -> TokenizerLink | None:
        """Return the service for a new request; None if no service is known."""

    def suspend(self, link: TokenizerLink) -> None:
        """Stop sending requests to a service until it is ready again."""

    async def wait_until_serving(self, error: ServiceError) -> None:
        """Wait until a service serves. Raises `error` if that takes too long."""


class Submission:
    """A submitted request: hands its events to a collector, grants credit and cancels.

    A request that loses its service is submitted again with what the collector has received, and
    continues behind it. A request with best_of is repeated with its seed: it sends each choice
    whole, and the collector skips those that it has.
    """

    __slots__ = (
        "_cancelled",
        "_collector",
        "_context",
        "_credit",
        "_deadline",
        "_handle",
        "_images",
        "_link",
        "_losses",
        "_on_admitted",
        "_request",
        "_retry",
        "_services",
    )

    def __init__(
        self,
        services: TokenizerChoice,
        request: completion_pb2.GenerateRequest,
        context: completion_pb2.RequestContext,
        collector: OutputCollector,
        *,
        timeout: float | None = None,
        credit: int | None,
        images: RequestImages | None,
        on_admitted: Callable[[], None],
    ) -> None:
        """The arguments are those of `Backend.submit`; `images` are part of the request."""
        self._services = services
        self._request = request
        self._context = context
        self._collector = collector
        self._deadline: float | None = None
        """Time of the event loop"""
        if timeout is not None:
            self._deadline = asyncio.get_running_loop().time() + timeout
        self._credit = credit
        """Tokens per choice granted so far; None = unlimited"""
        self._images = images
        self._on_admitted = on_admitted
        self._losses = Losses()
        self._cancelled = False
        self._retry: asyncio.Task[None] | None = None
        self._link: TokenizerLink | None = None
        self._handle = 0
        """On the Session of the link"""
        self._submit()

    def on_event(self, event: completion_pb2.SessionEvent) -> None:
        """Hand an event to the collector."""
        if self._collector.accepted is None:
            self._on_admitted()
            if self._images is not None:
                self._services.kept_images.keep(self._images, self._context.tenant)
        self._collector.on_event(event)
        if self._images is not None and not self._collector.is_open():
            self._services.kept_images.drop(self._images)

    def on_error(self, error: ServiceError) -> None:
        """Submit the request again if it lost its service, else hand the error to the collector."""
        if self._link is not None:
            error = self._link.public_error(error)
        if error.field.startswith("resume"):
            error = _not_resumable(error)
        if error.reason in _RETRIED and self._link is not None:
            self._services.suspend(self._link)
        may_continue = self._images is None or self._images.is_held
        if error.reason == "SESSION_LOST":
            may_continue &= self._losses.count(self._collector.received.progress)
        if error.reason in _RETRIED and not self._cancelled and may_continue:
            self._link = None
            self._retry = asyncio.ensure_future(self._submit_again(error))
        else:
            self._fail(error)

    def grant(self, tokens: int) -> None:
        """Let every choice send that many more tokens."""
        if self._credit is not None:
            self._credit += tokens
        credit = completion_pb2.SessionCredit(tokens=tokens)
        self._send(completion_pb2.SessionCommand(credit=credit))

    def cancel(self) -> None:
        """Abort the request; its collector gets no more events."""
        self._abort()
        if self._link is not None:
            self._link.session.detach(self._handle)

    async def cancelled_usage(self) -> types_pb2.Usage | None:
        """Abort the request; return the tokens that it used, None if its service does not say."""
        self._abort()
        if self._link is None:
            return None
        try:
            async with asyncio.timeout(_LAST_SECONDS):
                return await self._collector.last_usage()
        except TimeoutError:
            self._link.session.detach(self._handle)
            return None

    def _abort(self) -> None:
        self._cancelled = True
        if self._images is not None:
            self._services.kept_images.drop(self._images)
        if self._retry is not None:
            self._retry.cancel()
        self._send(completion_pb2.SessionCommand(cancel=completion_pb2.SessionCancel()))

    def _fail(self, error: ServiceError) -> None:
        if self._images is not None:
            self._services.kept_images.drop(self._images)
        self._collector.on_error(error)

    def _send(self, command: completion_pb2.SessionCommand) -> None:
        if self._link is not None:
            command.handle = self._handle
            self._link.session.send(command)

    def _submit(self) -> None:
        self._link = self._services.choose()
        if self._link is None:
            self.on_error(no_service())
            return
        self._handle = self._link.session.open(self)
        self._send(self._start_command())

    def _start_command(self) -> completion_pb2.SessionCommand:
        command = completion_pb2.SessionCommand()
        start = command.start
        start.request.CopyFrom(self._request)
        start.context.CopyFrom(self._context)
        if self._deadline is not None:
            left = self._deadline - asyncio.get_running_loop().time()
            start.context.timeout_seconds = max(left, 0.0)
        if self._credit is not None:
            start.credit = self._credit
        if self._images is not None:
            self._images.copy_into(start.request)
        if self._collector.accepted is not None:
            start.request.sampling.seed = self._collector.accepted.seed
            if not _ranks_choices(self._request):
                start.request.resume.CopyFrom(self._collector.received.resumption())
        return command

    async def _submit_again(self, error: ServiceError) -> None:
        try:
            await self._services.wait_until_serving(error)
        except ServiceError as refusal:
            self._fail(refusal)
        else:
            try:
                self._submit()
            except Exception:  # the client would wait for ever
                _LOG.exception("a request could not be submitted again")
                self._fail(internal_error())


def _not_resumable(error: ServiceError) -> ServiceError:
    """Return the error of a lost request that can't continue: its client sent no `resume`."""
    message = (
        "The tokenizer service was lost, and the answer can't continue on another one: "
        f"{error.message}"
    )
    return ServiceError(grpc.StatusCode.UNAVAILABLE, "NOT_RESUMED", message)


def _ranks_choices(request: completion_pb2.GenerateRequest) -> bool:
    """Return whether best_of selects from all choices, so that none can be continued alone."""
    return request.best_of > (request.n if request.HasField("n") else 1)
