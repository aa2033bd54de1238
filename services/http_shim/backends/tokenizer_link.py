"""Connection to one tokenizer service: a Session for generation, unary calls for the rest."""

import asyncio

import grpc

from tokenwire.channel import connect
from tokenwire.errors import ServiceError
from tokenwire.pb.completion.v1 import completion_pb2
from tokenwire.pb.completion.v1.completion_pb2_grpc import CompletionServiceStub
from tokenwire.pb.tokenizer.v1.tokenizer_pb2_grpc import TokenizerServiceStub
from tokenwire.serving.health import reports_serving
from tokenwire.session import completion_session
from tokenwire.tls import ClientTls

__all__ = ["MAX_LOSSES", "TokenizerLink", "no_service"]

MAX_LOSSES = 3
"""Losses of a service that a request survives; the request itself may crash the service"""

_SERVICE = completion_pb2.DESCRIPTOR.services_by_name["CompletionService"].full_name


class TokenizerLink:
    """One tokenizer service, by its address."""

    def __init__(
        self,
        target: str,
        lost_seconds: float,
        tls: ClientTls | None = None,
        server_name: str = "",
    ) -> None:
        """The arguments are those of `connect`."""
        self.target = target
        self._channel = connect(target, lost_seconds, tls, server_name)
        self.session = completion_session(self._channel)
        self.completion = CompletionServiceStub(self._channel)
        self.tokenizer = TokenizerServiceStub(self._channel)
        self.probe: asyncio.Task[None] | None = None
        """Asks whether the service is ready again; None = it is in use"""

    async def is_ready(self) -> bool:
        """Return whether the service accepts completions."""
        return await reports_serving(self._channel, _SERVICE)

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
