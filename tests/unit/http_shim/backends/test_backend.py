"""The choice among tokenizer services, by what is known of them."""

import asyncio
from collections.abc import AsyncIterator, Collection
from contextlib import asynccontextmanager

import grpc

from services.common.peers.peer import PeerState
from services.http_shim.backends.backend import Backend, BackendSettings
from services.http_shim.backends.tokenizer_link import TOKENIZERS, TokenizerLink
from tests.health_server import NOT_SERVING, SERVING, HealthServer, health_server
from tokenwire.errors import ServiceError

HANG_SECONDS = 20
LOST = ServiceError(grpc.StatusCode.UNAVAILABLE, "SESSION_LOST", "lost")


class Pair:
    """Two servers, and the backend that calls them."""

    def __init__(self, one: HealthServer, two: HealthServer) -> None:
        self.one, self.two = one, two
        self.backend = Backend(f"{one.target},{two.target}", BackendSettings())

    def link(self, server: HealthServer) -> TokenizerLink:
        links = self.backend._peers.links
        return next(link for link in links if link.peer.target == server.target)

    async def until(self, server: HealthServer, state: PeerState) -> None:
        async with asyncio.timeout(HANG_SECONDS):
            await self.backend._peers.wait_until(lambda: self.link(server).peer.state is state)

    def chosen(self) -> Collection[str]:
        """Return the addresses that requests go to: the choice among equals is random."""
        links = [self.backend.choose() for _ in range(50)]
        return {link.peer.target for link in links if link is not None}


@asynccontextmanager
async def pair() -> AsyncIterator[Pair]:
    async with (
        health_server(TOKENIZERS.service) as one,
        health_server(TOKENIZERS.service) as two,
    ):
        made = Pair(one, two)
        try:
            yield made
        finally:
            await made.backend.close()


async def test_requests_spread_before_the_services_have_answered() -> None:
    """The first one to answer would otherwise take all requests of the start."""
    async with pair() as ours:
        assert ours.chosen() == {ours.one.target, ours.two.target}
        await ours.until(ours.one, PeerState.SERVING)
        await ours.until(ours.two, PeerState.SERVING)
        assert ours.chosen() == {ours.one.target, ours.two.target}


async def test_service_that_stops_gets_no_request_while_another_one_serves() -> None:
    async with pair() as ours:
        await ours.one.report(NOT_SERVING)
        await ours.until(ours.one, PeerState.UNREADY)
        await ours.until(ours.two, PeerState.SERVING)
        assert ours.chosen() == {ours.two.target}
        await ours.one.report(SERVING)
        await ours.until(ours.one, PeerState.SERVING)
        assert ours.chosen() == {ours.one.target, ours.two.target}


async def test_service_without_engines_gets_the_requests_of_a_lost_one() -> None:
    """It waits for its engines longer than the shim waits for a service."""
    async with pair() as ours:
        await ours.one.report(NOT_SERVING)
        await ours.until(ours.one, PeerState.UNREADY)
        await ours.until(ours.two, PeerState.SERVING)
        await ours.two.stop()
        await ours.until(ours.two, PeerState.AWAY)
        assert ours.chosen() == {ours.one.target}
        async with asyncio.timeout(HANG_SECONDS):
            await ours.backend.wait_until_serving(LOST)


async def test_request_waits_while_all_services_were_lost() -> None:
    async with pair() as ours:
        await ours.until(ours.one, PeerState.SERVING)
        await ours.until(ours.two, PeerState.SERVING)
        for server in (ours.one, ours.two):
            await server.stop()
            await ours.until(server, PeerState.AWAY)
        waiting = asyncio.ensure_future(ours.backend.wait_until_serving(LOST))
        done, _ = await asyncio.wait({waiting}, timeout=0)
        assert not done
        await ours.two.start()
        await asyncio.wait_for(waiting, HANG_SECONDS)
        assert ours.chosen() == {ours.two.target}
