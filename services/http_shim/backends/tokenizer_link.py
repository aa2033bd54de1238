"""Connection to one tokenizer service: a Session for generation, unary calls for the rest."""

import grpc

from services.common.network.health import reports_serving
from services.common.peers.peer import Peer, PeerKind, PeerRefusedError
from tokenwire.errors import ServiceError
from tokenwire.pb.completion.v1 import completion_pb2, models_pb2
from tokenwire.pb.completion.v1.completion_pb2_grpc import CompletionServiceStub
from tokenwire.pb.tokenizer.v1.tokenizer_pb2_grpc import TokenizerServiceStub
from tokenwire.session import completion_session

__all__ = ["TOKENIZERS", "TokenizerLink", "no_service"]

_ASK_SECONDS = 2.0
_SERVICE = completion_pb2.DESCRIPTOR.services_by_name["CompletionService"].full_name
TOKENIZERS = PeerKind("tokenizer service", _SERVICE, "tokenizer_health")


class TokenizerLink:
    """One tokenizer service, by its address."""

    def __init__(self, peer: Peer) -> None:
        self.peer = peer
        self.session = completion_session(peer.channel)
        self.completion = CompletionServiceStub(peer.channel)
        self.tokenizer = TokenizerServiceStub(peer.channel)

    @property
    def is_idle(self) -> bool:
        """True if no request is open on the Session."""
        return not self.session.num_open

    async def is_ready(self) -> bool:
        """Return whether the service accepts completions of this server."""
        if not await reports_serving(self.peer.channel, _SERVICE):
            return False
        try:
            if not self.peer.is_serving:
                await self.ask()
        except PeerRefusedError:
            return False
        return True

    async def ask(self) -> None:
        """Ask whether the service knows this server: its health is told to everyone.

        Raises PeerRefusedError if it does not.
        """
        request = models_pb2.ListModelsRequest()
        try:
            await self.completion.ListModels(request, timeout=_ASK_SECONDS)
        except grpc.aio.AioRpcError as failure:
            if failure.code() is grpc.StatusCode.UNAUTHENTICATED:
                error = ServiceError.from_rpc_error(failure)
                raise PeerRefusedError(
                    f"The service at {self.peer.target} refuses this server: {error.message}"
                ) from None

    def public_error(self, error: ServiceError) -> ServiceError:
        """Return the error of a call as clients see it: they do not know this server's token."""
        # a stream that is refused before its first message may end without a reason
        is_refused = error.reason == "SESSION_LOST" and self.peer.refusal
        if error.code is not grpc.StatusCode.UNAUTHENTICATED and not is_refused:
            return error
        self.peer.suspend()
        message = "The tokenizer service does not know this server; its log has the details."
        code = grpc.StatusCode.UNAVAILABLE
        return ServiceError(code, "NOT_KNOWN", message, retry_seconds=1)

    async def close(self) -> None:
        """End the Session and abort its requests."""
        await self.session.close()


def no_service() -> ServiceError:
    """Return the error of a request for which no address is known."""
    message = "No address of a tokenizer service is known yet."
    return ServiceError(grpc.StatusCode.UNAVAILABLE, "NO_SERVICE", message, retry_seconds=1)
