"""The pool of peers: which of them serve, and what becomes of those that do not."""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager

import pytest
import pytest_asyncio
from hypothesis import given, settings
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, Gauge

from services.common.peers.peer import (
    ChannelSettings,
    Peer,
    PeerKind,
    PeerRefusedError,
    PeerState,
)
from services.common.peers.peer_pool import PeerPool
from tests.health_server import NOT_SERVING, SERVING, HealthServer, health_server

HANG_SECONDS = 20
STORE = PeerKind("store", "example.Store", "store_health")


class StoreLink:
    """The link of a process to a store."""

    def __init__(self, peer: Peer, why_refused: Callable[[], str]) -> None:
        self.peer = peer
        self.is_idle = True
        self.is_closed = False
        self._why_refused = why_refused

    async def ask(self) -> None:
        if why := self._why_refused():
            raise PeerRefusedError(why)

    async def close(self) -> None:
        self.is_closed = True


class Stores:
    """A pool of stores, and what it reports."""

    def __init__(self, *targets: str) -> None:
        self.why_refused = ""
        self.left = asyncio.Queue[StoreLink]()
        self.states: list[PeerState] = []
        """States of the stores after each change"""
        registry = CollectorRegistry()
        self._value = registry.get_sample_value
        self.pool = PeerPool(
            targets,
            STORE,
            ChannelSettings(),
            lambda peer: StoreLink(peer, lambda: self.why_refused),
            on_changed=lambda: self.states.extend(link.peer.state for link in self.pool.links),
            on_leaving=self.left.put_nowait,
            gauge=Gauge("stores", "Stores by state.", ["state"], registry=registry),
        )

    def counts(self) -> list[float | None]:
        """Return the numbers of stores that serve, are refused, and are away."""
        return [self._value("stores", {"state": each}) for each in ("serving", "refused", "away")]

    async def until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(HANG_SECONDS):
            while not condition():
                await self.pool._changed.wait()

    async def until_state(self, target: str, state: PeerState) -> None:
        await self.until(lambda: self.link(target).peer.state is state)

    def link(self, target: str) -> StoreLink:
        return next(link for link in self.pool.links if link.peer.target == target)


@asynccontextmanager
async def stores(*targets: str) -> AsyncIterator[Stores]:
    made = Stores(*targets)
    made.pool.start()
    try:
        yield made
    finally:
        await made.pool.close()


@pytest_asyncio.fixture
async def one() -> AsyncIterator[HealthServer]:
    async with health_server(STORE.service) as store:
        yield store


@pytest_asyncio.fixture
async def two() -> AsyncIterator[HealthServer]:
    async with health_server(STORE.service) as store:
        yield store


async def test_first_peer_ends_the_wait_and_the_others_are_followed(
    one: HealthServer, two: HealthServer
) -> None:
    await two.stop()
    async with stores(one.target, two.target) as ours:
        assert ours.counts() == [0, 0, 2]
        async with asyncio.timeout(HANG_SECONDS):
            await ours.pool.wait_for_first()
        assert [link.peer.target for link in ours.pool.serving] == [one.target]
        await two.start()
        await ours.until_state(two.target, PeerState.SERVING)
        assert ours.counts() == [2, 0, 0]


async def test_peer_that_stops_takes_no_requests_until_it_serves_again(one: HealthServer) -> None:
    async with stores(one.target) as ours:
        await ours.until_state(one.target, PeerState.SERVING)
        await one.report(NOT_SERVING)
        await ours.until_state(one.target, PeerState.UNREADY)
        assert not ours.pool.is_serving
        await one.report(SERVING)
        await ours.until_state(one.target, PeerState.SERVING)
        await one.stop()
        await ours.until_state(one.target, PeerState.AWAY)
        assert ours.counts() == [0, 0, 1]
        await one.start()
        async with asyncio.timeout(HANG_SECONDS):
            await ours.pool.wait_until_serving()


async def test_suspended_peer_is_used_again_once_it_reports_that_it_serves(
    one: HealthServer,
) -> None:
    """Its health may not change, so no report of its own would bring it back."""
    async with stores(one.target) as ours:
        await ours.until_state(one.target, PeerState.SERVING)
        ours.link(one.target).peer.suspend()
        assert not ours.pool.is_serving
        await ours.until_state(one.target, PeerState.SERVING)


async def test_suspended_peer_is_not_tried_again_while_it_reports_that_it_stops(
    one: HealthServer,
) -> None:
    """It would refuse the same request again and again."""
    async with stores(one.target) as ours:
        await ours.until_state(one.target, PeerState.SERVING)
        await one.report(NOT_SERVING)
        await ours.until_state(one.target, PeerState.UNREADY)
        peer = ours.link(one.target).peer
        assert peer.may_serve
        one.watched = asyncio.Queue()
        peer.suspend()
        async with asyncio.timeout(HANG_SECONDS):
            await one.watched.get()
        await one.report(SERVING)
        await ours.until_state(one.target, PeerState.SERVING)
        assert ours.states[-2:] == [PeerState.AWAY, PeerState.SERVING]


async def test_requests_leave_a_peer_that_stops_once_another_one_serves(
    one: HealthServer, two: HealthServer
) -> None:
    await two.stop()
    async with stores(one.target, two.target) as ours:
        await ours.until_state(one.target, PeerState.SERVING)
        busy = ours.link(one.target)
        busy.is_idle = False
        await one.report(NOT_SERVING)
        await ours.until_state(one.target, PeerState.UNREADY)
        assert ours.left.empty()
        await two.start()
        async with asyncio.timeout(HANG_SECONDS):
            assert await ours.left.get() is busy


async def test_peer_without_an_address_ends_its_requests_first(
    one: HealthServer, two: HealthServer
) -> None:
    async with stores() as ours:
        ours.pool.set_addresses({one.target: "", two.target: ""})
        await ours.until(lambda: len(ours.pool.serving) == 2)
        gone = ours.link(one.target)
        gone.is_idle = False
        ours.pool.set_addresses({two.target: ""})
        assert [link.peer.target for link in ours.pool.links] == [two.target]
        assert ours.counts() == [1, 0, 0]
        async with asyncio.timeout(HANG_SECONDS):
            assert await ours.left.get() is gone
            assert not gone.is_closed
            closing = ours.pool._retired[gone]
            gone.is_idle = True
            await closing
        assert gone.is_closed
        assert not ours.pool._retired


async def test_peer_whose_address_is_back_is_a_new_one(one: HealthServer) -> None:
    """The former one may still run requests, and must not take others."""
    async with stores() as ours:
        ours.pool.set_addresses({one.target: ""})
        await ours.until_state(one.target, PeerState.SERVING)
        former = ours.link(one.target)
        former.is_idle = False
        ours.pool.set_addresses({})
        former.peer.suspend()
        former.peer.refuse("too late")
        assert former.peer.state is PeerState.RETIRED
        ours.pool.set_addresses({one.target: ""})
        await ours.until_state(one.target, PeerState.SERVING)
        assert ours.link(one.target) is not former


async def test_refused_peer_is_asked_again_and_its_reason_is_logged_once(
    one: HealthServer, caplog: pytest.LogCaptureFixture
) -> None:
    asked = asyncio.Queue[None]()

    def why() -> str:
        asked.put_nowait(None)
        return "It holds other goods." if asked.qsize() < 4 else ""

    ours = Stores(one.target)
    ours.pool._open_link = lambda peer: StoreLink(peer, why)
    ours.pool.start()
    try:
        with caplog.at_level(logging.ERROR, "peer"):
            await ours.until_state(one.target, PeerState.REFUSED)
            assert ours.counts() == [0, 1, 0]
            assert ours.pool.refusals == ["It holds other goods."]
            await ours.until_state(one.target, PeerState.SERVING)
        assert caplog.messages == ["It holds other goods."]
        assert ours.pool.refusals == []
    finally:
        await ours.pool.close()


async def test_refusal_found_by_a_request_holds_until_the_peer_is_lost(one: HealthServer) -> None:
    """A report that it serves says nothing about what the request has found."""
    async with stores(one.target) as ours:
        await ours.until_state(one.target, PeerState.SERVING)
        peer = ours.link(one.target).peer
        peer.refuse("It holds other goods.")
        assert not ours.pool.is_serving
        await one.stop()
        await ours.until_state(one.target, PeerState.AWAY)
        assert not peer.refusal
        await one.start()
        await ours.until_state(one.target, PeerState.SERVING)


async def test_start_fails_if_all_peers_are_refused() -> None:
    async with (
        health_server("example.Other") as other,
        health_server("example.Another") as another,
        stores(other.target, another.target) as ours,
    ):
        async with asyncio.timeout(HANG_SECONDS):
            with pytest.raises(PeerRefusedError, match="is no store"):
                await ours.pool.wait_for_first()


async def test_start_waits_for_further_addresses_of_a_name(one: HealthServer) -> None:
    async with health_server("example.Other") as other:
        ours = Stores("dns:///stores.invalid:1")
        ours.pool.set_addresses({other.target: "stores"})
        first = asyncio.ensure_future(ours.pool.wait_for_first())
        try:
            await ours.until_state(other.target, PeerState.REFUSED)
            done, _ = await asyncio.wait({first}, timeout=0)
            assert not done
            ours.pool.set_addresses({other.target: "stores", one.target: "stores"})
            await asyncio.wait_for(first, HANG_SECONDS)
        finally:
            first.cancel()
            await ours.pool.close()


async def test_pool_closes_all_links(one: HealthServer, two: HealthServer) -> None:
    async with stores() as ours:
        ours.pool.set_addresses({one.target: "", two.target: ""})
        links = ours.pool.links
        ours.link(one.target).is_idle = False
        ours.pool.set_addresses({two.target: ""})
    assert all(link.is_closed for link in links)


ADDRESSES = st.sets(st.sampled_from(["127.0.0.1:1", "127.0.0.2:1", "127.0.0.3:1"]))


@settings(max_examples=30, deadline=None)
@given(st.lists(st.tuples(ADDRESSES, ADDRESSES), max_size=8))
def test_pool_has_one_link_to_each_address_and_closes_every_other(
    changes: list[tuple[set[str], set[str]]],
) -> None:
    """changes: the addresses from then on, and those whose peers have requests by then."""
    asyncio.run(_check(changes))


async def _check(changes: list[tuple[set[str], set[str]]]) -> None:
    ours = Stores()
    opened: list[StoreLink] = []

    def open_link(peer: Peer) -> StoreLink:
        opened.append(StoreLink(peer, lambda: ""))
        return opened[-1]

    ours.pool._open_link = open_link
    for addresses, busy in changes:
        ours.pool.set_addresses(dict.fromkeys(sorted(addresses), ""))
        links: Mapping[str, StoreLink] = {link.peer.target: link for link in ours.pool.links}
        assert links.keys() == addresses
        assert ours.counts() == [0, 0, len(addresses)]
        for target, link in links.items():
            link.is_idle = target not in busy
    ours.pool.set_addresses({})
    for link in opened:
        link.is_idle = True
    await asyncio.gather(*ours.pool._retired.values())
    assert all(link.is_closed for link in opened)
    assert not ours.pool._retired
    await ours.pool.close()
