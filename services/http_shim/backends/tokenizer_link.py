"""Connection to one tokenizer service: a Session for generation, unary calls for the rest."""

import asyncio
import logging

import grpc

from tokenwire.channel import connect
from tokenwire.errors import ServiceError
from tokenwire.pb.completion.v1 import completion_pb2
from tokenwire.pb.completion.v1.completion_pb2_grpc import CompletionServiceStub
from tokenwire.pb.tokenizer.v1.tokenizer_pb2_grpc import TokenizerServiceStub
from tokenwire.serving.health import reports_serving
from tokenwire.session import completion_session
from tokenwire.tls import ClientTls
from tokenwire.token_file import TokenFile, shown

__all__ = ["MAX_LOSSES", "TokenizerLink", "no_service"]

_LOG = logging.getLogger("tokenizer_link")
MAX_LOSSES = 3
"""Losses of a service that a request survives; the request itself may crash the service"""

_ASK_SECONDS = 2.0
_SERVICE = completion_pb2.DESCRIPTOR.services_by_name["CompletionService"].full_name


class TokenizerLink:
    """One tokenizer service, by its address."""

    def __init__(
        self,
        target: str,
        lost_seconds: float,
        tls: ClientTls | None = None,
        server_name: str = "",
        token: TokenFile | None = None,
    ) -> None:
        """The arguments are those of `connect`."""
        self.target = target
        self._channel = connect(target, lost_seconds, tls, server_name, shown(token))
        self._is_welcome: bool | None = None
        """True if the service takes calls of this server; None = it was not asked yet"""
        self.session = completion_session(self._channel)
        self.completion = CompletionServiceStub(self._channel)
        self.tokenizer = TokenizerServiceStub(self._channel)
        self.probe: asyncio.Task[None] | None = None
        """Asks whether the service is ready again; None = it is in use"""

    async def is_ready(self) -> bool:
        """Return whether the service accepts completions of this server."""
        if not await reports_serving(self._channel, _SERVICE):
            return False
        return self._is_welcome or await self._ask()

    def translated(self, error: ServiceError) -> ServiceError:
        """Return the error of a call as clients see it: they do not know this server's token."""
        # a stream that is refused before its first message may end without a reason
        is_refused = error.reason == "SESSION_LOST" and self._is_welcome is False
        if error.code is not grpc.StatusCode.UNAUTHENTICATED and not is_refused:
            return error
        if self._is_welcome is not False:
            _LOG.error("the service at %s refuses this server: %s", self.target, error.message)
        self._is_welcome = False
        message = "The tokenizer service does not know this server; its log has the details."
        code = grpc.StatusCode.UNAVAILABLE
        return ServiceError(code, "NOT_KNOWN", message, retry_seconds=1)

    async def _ask(self) -> bool:
        """Ask whether the service knows this server: its health is told to everyone."""
        request = completion_pb2.ListModelsRequest()
        try:
            await self.completion.ListModels(request, timeout=_ASK_SECONDS)
        except grpc.aio.AioRpcError as error:
            self.translated(ServiceError.from_rpc_error(error))
            return error.code() is not grpc.StatusCode.UNAUTHENTICATED
        self._is_welcome = True
        return True

    async def close(self) -> None:
        """End the Session and abort its requests."""
        if self.probe is not None:
            self.probe.cancel()
        await self.session.close()
        await self._channel.close()


def no_service() -> ServiceError:
    """Return the error of a request for which no address is known."""
    message = "No address of a tokenizer service is known yet."
    return ServiceError(grpc.StatusCode.UNAVAILABLE, "NO_SERVICE", message, retry_seconds=1)
