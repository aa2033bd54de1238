"""The grammar services of an engine, and the choice of a service for each sequence."""

import asyncio
import hashlib
import math
from collections.abc import Callable, Collection, Sequence

from services.common.peers.peer import ChannelSettings, Peer
from services.common.peers.peer_pool import PeerPool
from services.engine.frontend.grammar_link import GRAMMARS, GrammarLink
from services.engine.frontend.mask_stream import lost_service
from services.engine.frontend.metrics import GRAMMAR_SERVICES
from tokenwire.errors import ServiceError

__all__ = ["GrammarPool"]

_LOAD_FACTOR = 1.25
"""Most matchers of a service, as a multiple of the mean"""


class GrammarPool:
    """All grammar services.

    Sequences of one grammar go to one service, which is chosen by rendezvous hashing and has
    compiled the grammar. Sequences that exceed its share go to the services of the next ranks
    (consistent hashing with bounded loads, Mirrokni, Thorup and Zadimoghaddam, 2016).
    """

    def __init__(
        self,
        targets: Sequence[str],
        channels: ChannelSettings,
        open_link: Callable[[Peer], GrammarLink],
        on_leaving: Callable[[GrammarLink], None],
    ) -> None:
        """The parameters are those of `PeerPool`."""
        self._peers = PeerPool(
            targets,
            GRAMMARS,
            channels,
            open_link,
            on_leaving=on_leaving,
            gauge=GRAMMAR_SERVICES,
        )
        self._peers.start()

    async def aclose(self) -> None:
        """End all connections."""
        await self._peers.close()

    def has_other(self, links: Collection[GrammarLink]) -> bool:
        """Return whether a service besides these can take matchers."""
        return any(link not in links for link in self._peers.serving)

    def choose(self, key: bytes, avoided: Collection[GrammarLink] = ()) -> GrammarLink | None:
        """Return the service for one more matcher of a grammar; None if none serves.

        key: digest of the grammar. avoided: services that are used only if no other serves.
        """
        serving = self._peers.serving
        links = [link for link in serving if link not in avoided] or serving
        if len(links) < 2:
            return links[0] if links else None
        matchers = sum(link.num_matchers for link in links) + 1
        most = math.ceil(_LOAD_FACTOR * matchers / len(links))
        below = (link for link in links if link.num_matchers < most)
        return max(below, key=lambda link: _rank(link, key))

    async def wait_and_choose(
        self, key: bytes, deadline: float, avoided: Collection[GrammarLink]
    ) -> GrammarLink:
        """Return the service for one more matcher, as soon as one serves.

        deadline: loop time. Raises UNAVAILABLE when it passes.
        """
        try:
            async with asyncio.timeout_at(deadline):
                while (link := self.choose(key, avoided)) is None:
                    await self._peers.wait_until_serving()
        except TimeoutError:
            raise self.unreachable() from None
        return link

    def unreachable(self) -> ServiceError:
        """Return the error of a request for which no service answered in time."""
        unknown = "The grammar service is unreachable or does not answer."
        return lost_service(next(iter(self._peers.refusals), unknown))


def _rank(link: GrammarLink, key: bytes) -> bytes:
    """Return the weight of a service for a grammar. The service with the highest takes it."""
    return hashlib.blake2b(link.peer.target.encode(), key=key, digest_size=8).digest()
