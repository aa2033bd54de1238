"""Pool of the peers of one kind: services that stand for each other."""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from typing import Generic, Protocol, TypeVar

from prometheus_client import Gauge

from services.common.peers.peer import (
    RETRY_SECONDS,
    ChannelSettings,
    Peer,
    PeerKind,
    PeerRefusedError,
    PeerState,
)
from services.common.peers.targets import Discovery

__all__ = ["Link", "PeerPool"]


class Link(Protocol):
    """A client's streams, calls and requests to one peer, without the life cycle of the peer."""

    @property
    def peer(self) -> Peer:
        """The peer that the link was opened for."""

    @property
    def is_idle(self) -> bool:
        """True if the peer has no request of this process."""

    async def ask(self) -> None:
        """Ask for the peer's properties: the parameter `ask` of `Peer.start`."""

    async def close(self) -> None:
        """End the streams. The pool closes the channel."""


L = TypeVar("L", bound=Link)


class PeerPool(Generic[L]):
    """All peers of one kind.

    The pool opens a link to each address, and follows whether its peer serves. A peer whose address
    is gone from DNS keeps its link until its last request has ended.
    """

    def __init__(
        self,
        targets: Sequence[str],
        kind: PeerKind,
        settings: ChannelSettings,
        open_link: Callable[[Peer], L],
        *,
        on_changed: Callable[[], None] = lambda: None,
        on_leaving: Callable[[L], None] = lambda _: None,
        leave_seconds: float = 0.0,
        gauge: Gauge | None = None,
    ) -> None:
        """targets: targets from `parse_targets`.

        on_changed: called when a peer was added, was retired, or changed its state.
        on_leaving: called with the link of a peer whose requests should move to others, because it
        does not serve and another peer does, `leave_seconds` after the change of state.
        gauge: number of peers by the label `state`: serving, refused or away.
        """
        self._kind = kind
        self._settings = settings
        self._open_link = open_link
        self._on_changed = on_changed
        self._on_leaving = on_leaving
        self._leave_seconds = leave_seconds
        self._gauge = gauge
        self._links: dict[str, L] = {}
        self._retired: dict[L, asyncio.Task[None]] = {}
        """Links of peers whose address is gone, and the tasks that close them when idle"""
        self._changed = asyncio.Event()
        self._discovery = Discovery(targets, self.set_addresses)

    @property
    def links(self) -> Sequence[L]:
        """Links to all known addresses."""
        return [*self._links.values()]

    @property
    def serving(self) -> Sequence[L]:
        """Links to the peers that serve."""
        return [link for link in self._links.values() if link.peer.is_serving]

    @property
    def is_serving(self) -> bool:
        """True if a peer serves."""
        return any(link.peer.is_serving for link in self._links.values())

    @property
    def refusals(self) -> Sequence[str]:
        """Reasons why peers are refused, one sentence for each of them."""
        return [link.peer.refusal for link in self._links.values() if link.peer.refusal]

    def start(self) -> None:
        """Open links to the addresses; begin to resolve names."""
        self._discovery.start()

    async def close(self) -> None:
        """Close all links; the peers abort their requests."""
        self._discovery.stop()
        for task in self._retired.values():
            task.cancel()
        for link in [*self._links.values(), *self._retired]:
            await _close(link)

    async def wait_until_serving(self) -> None:
        """Wait until a peer serves."""
        await self.wait_until(lambda: self.is_serving)

    async def wait_until(self, condition: Callable[[], bool]) -> None:
        """Wait until a condition holds. It is checked at each change of a peer."""
        while not condition():
            await self._changed.wait()

    async def wait_for_first(self) -> None:
        """Wait until a peer serves.

        Raises PeerRefusedError if all are refused, and no other address can come.
        """
        is_static = self._discovery.is_static
        await self.wait_until(
            lambda: self.is_serving or (is_static and len(self.refusals) == len(self._links))
        )
        if not self.is_serving:
            raise PeerRefusedError(self.refusals[0])

    def set_addresses(self, addresses: Mapping[str, str]) -> None:
        """Open links to new addresses, and retire the peers whose address is gone.

        addresses: DNS name of each address; empty for an address that was given as such.
        """
        for target in self._links.keys() - addresses.keys():
            self._retire(self._links.pop(target))
        for target, name in addresses.items():
            if target not in self._links:
                peer = Peer(target, self._kind, self._settings, self._note_change, name)
                self._links[target] = link = self._open_link(peer)
                peer.start(link.ask)
        self._note_change()

    def _retire(self, link: L) -> None:
        self._retired[link] = asyncio.ensure_future(self._close_when_idle(link))
        link.peer.retire()

    async def _close_when_idle(self, link: L) -> None:
        while not link.is_idle:  # noqa: ASYNC110 - each kind of link counts in its own way
            await asyncio.sleep(RETRY_SECONDS)
        await _close(link)
        del self._retired[link]

    def _note_change(self) -> None:
        self._count()
        self._on_changed()
        self._changed.set()  # wakes only the tasks that wait now
        self._changed.clear()
        if self.is_serving:
            asyncio.get_running_loop().call_later(self._leave_seconds, self._leave)

    def _leave(self) -> None:
        """Move requests from peers that do not serve to peers that serve, if there are any."""
        if self.is_serving:
            for link in [*self._links.values(), *self._retired]:
                if not (link.peer.is_serving or link.is_idle):
                    self._on_leaving(link)

    def _count(self) -> None:
        if self._gauge is None:
            return
        states = [link.peer.state for link in self._links.values()]
        serving, refused = states.count(PeerState.SERVING), states.count(PeerState.REFUSED)
        self._gauge.labels("serving").set(serving)
        self._gauge.labels("refused").set(refused)
        self._gauge.labels("away").set(len(states) - serving - refused)


async def _close(link: Link) -> None:
    await link.close()
    await link.peer.close()
