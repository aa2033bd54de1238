"""The grammar services of an engine: which serve, and which one takes a sequence."""

import asyncio
import hashlib
import logging
import math
from collections.abc import Callable, Collection, Mapping, Sequence

from services.common.targets import Discovery
from services.engine.frontend.grammar_link import GrammarLink
from services.engine.frontend.mask_stream import lost_service
from services.engine.frontend.metrics import GRAMMAR_SERVICES
from tokenwire.errors import ServiceError

__all__ = ["GrammarPool"]

_LOG = logging.getLogger("grammar_pool")
_LOAD_FACTOR = 1.25
"""Most matchers of a service, as a multiple of the mean"""


class GrammarPool:
    """All grammar services. With one, the choice is that one; the code is the same.

    Sequences of one grammar go to one service, by rendezvous hashing, which has then compiled it.
    The services of other ranks take what exceeds its share (consistent hashing with bounded
    loads, Mirrokni, Thorup and Zadimoghaddam, 2016).
    """

    def __init__(
        self,
        targets: Sequence[str],
        connect: Callable[[str, str], GrammarLink],
        on_leaving: Callable[[GrammarLink], None],
    ) -> None:
        """connect: returns the link to an address and its DNS name, empty without one.

        on_leaving: called when matchers should leave a service, and another one can take them.
        """
        self._connect = connect
        self._on_leaving = on_leaving
        self._links: dict[str, GrammarLink] = {}
        self._retired: set[GrammarLink] = set()
        """Services whose address is gone, until their last matcher is closed or moved"""
        self._usable: list[GrammarLink] = []
        self._changed = asyncio.Event()
        self._closing: set[asyncio.Task[None]] = set()
        self._discovery = Discovery(targets, self._on_addresses)
        self._discovery.start()

    async def aclose(self) -> None:
        """End all connections."""
        self._discovery.stop()
        for link in [*self._links.values(), *self._retired]:
            await link.aclose()

    def has_other(self, links: Collection[GrammarLink]) -> bool:
        """Return whether a service besides these can take matchers."""
        return any(link not in links for link in self._usable)

    def choose(self, key: bytes, avoided: Collection[GrammarLink] = ()) -> GrammarLink | None:
        """Return the service for one more matcher of a grammar; None if none serves.

        key: the grammar's. avoided: services that are used only if no other serves.
        """
        links = [link for link in self._usable if link not in avoided] or self._usable
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
                    await self._changed.wait()
        except TimeoutError:
            raise self.unreachable() from None
        return link

    def unreachable(self) -> ServiceError:
        """Return the error of a request for which no service answered in time."""
        refusals = [link.refusal for link in self._links.values() if link.refusal]
        unknown = "The grammar service is unreachable or does not answer."
        return lost_service(refusals[0] if refusals else unknown)

    # the services, as their owner

    def on_changed(self, link: GrammarLink) -> None:
        """Begin or cease to use a service; move matchers from those that cease."""
        links = [*self._links.values(), *self._retired]
        self._usable = [each for each in links if each.is_usable]
        self._count()
        self._changed.set()  # wakes the present waiters only
        self._changed.clear()
        if self._usable:
            for each in links:
                if each.num_matchers and not each.is_usable:
                    self._on_leaving(each)

    def on_idle(self, link: GrammarLink) -> None:
        """Close a retired service whose last matcher has gone."""
        if link in self._retired:
            self._retired.discard(link)
            closing = asyncio.ensure_future(link.aclose())
            self._closing.add(closing)
            closing.add_done_callback(self._closing.discard)

    def _on_addresses(self, addresses: Mapping[str, str]) -> None:
        for target in [each for each in self._links if each not in addresses]:
            self._retire(self._links.pop(target))
        for target, name in addresses.items():
            if target not in self._links:
                self._links[target] = link = self._connect(target, name)
                link.start(self)
        self._count()

    def _retire(self, link: GrammarLink) -> None:
        _LOG.info("the grammar service at %s is gone from its name's addresses", link.target)
        link.is_retired = True
        self._retired.add(link)
        self.on_changed(link)
        if not link.num_matchers:
            self.on_idle(link)

    def _count(self) -> None:
        refused = sum(bool(link.refusal) for link in self._links.values())
        serving = len(self._usable)
        GRAMMAR_SERVICES.labels("serving").set(serving)
        GRAMMAR_SERVICES.labels("refused").set(refused)
        GRAMMAR_SERVICES.labels("away").set(len(self._links) - serving - refused)


def _rank(link: GrammarLink, key: bytes) -> bytes:
    """Return the weight of a service for a grammar; the highest takes it."""
    return hashlib.blake2b(link.target.encode(), key=key, digest_size=8).digest()
