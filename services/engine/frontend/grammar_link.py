"""Connection to one grammar service: compilations, and matchers."""

from collections.abc import Callable, Sequence

from services.common.peers.peer import Peer, PeerKind
from services.engine.frontend.mask_stream import ANOTHER_TOKENIZER, GrammarClient, MaskStream
from tokenwire.errors import ServiceError
from tokenwire.pb.grammar.v1 import grammar_pb2
from tokenwire.pb.types.v1.types_pb2 import GrammarSpec

__all__ = ["GRAMMARS", "GrammarLink"]

_SERVICE = grammar_pb2.DESCRIPTOR.services_by_name["GrammarService"].full_name
GRAMMARS = PeerKind("grammar service", _SERVICE, "grammar_health")


class GrammarLink:
    """One grammar service, as long as its address is known."""

    def __init__(
        self, peer: Peer, make_masks: Callable[["GrammarLink"], MaskStream], fingerprint: str
    ) -> None:
        """make_masks: returns the stream of masks over the peer's channel.

        fingerprint: SHA-256 of the tokenizer.json that the service must have; empty = any.
        """
        self.peer = peer
        self.num_matchers = 0
        self._grammar = GrammarClient(peer.channel, fingerprint)
        self._masks = make_masks(self)

    @property
    def is_idle(self) -> bool:
        """True if no matcher is open at the service."""
        return not self.num_matchers

    async def ask(self) -> None:
        """Do nothing, because each answer to a compilation names the service's tokenizer."""

    async def close(self) -> None:
        """End the stream of masks."""
        await self._masks.aclose()

    async def compile(self, spec: GrammarSpec, timeout: float, tenant: str) -> str:
        """Return the id of a tenant's grammar.

        timeout: seconds. Raises ServiceError: INVALID_ARGUMENT with the invalid field,
        DEADLINE_EXCEEDED, or UNAVAILABLE if the service is lost or must not be used.
        """
        try:
            return await self._grammar.compile(spec, timeout, tenant)
        except ServiceError as error:
            if error.reason == ANOTHER_TOKENIZER:
                target = self.peer.target
                self.peer.refuse(f"The grammar service at {target} can't be used: {error.message}")
            raise

    # matchers

    def open_matcher(self, matcher: int, grammar_id: str, generated: Sequence[int]) -> None:
        """Open a matcher for a sequence that has already generated these tokens."""
        self.num_matchers += 1
        self._masks.open(matcher, grammar_id, generated)

    def accept(self, matcher: int, ids: Sequence[int], draft: Sequence[int]) -> None:
        """Feed drawn tokens, and request masks after these draft tokens with the next state."""
        self._masks.accept(matcher, ids)
        if draft:
            self._masks.ask_draft_masks(matcher, draft)

    def close_matcher(self, matcher: int) -> None:
        """Close a matcher, whether or not the service still has it."""
        self._masks.close(matcher)
        self.num_matchers -= 1
