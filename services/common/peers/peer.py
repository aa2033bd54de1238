"""One peer: a service in another process, and its life cycle as this process sees it."""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from contextlib import aclosing
from dataclasses import dataclass
from enum import Enum, auto

import grpc

from services.common.background import keep_running
from services.common.peers.peer_health import PeerHealth, Status
from tokenwire.channel import connect
from tokenwire.channel_options import LOST_SECONDS
from tokenwire.tls import ClientTls
from tokenwire.token_file import TokenFile, shown

__all__ = ["RETRY_SECONDS", "ChannelSettings", "Peer", "PeerKind", "PeerRefusedError", "PeerState"]

_LOG = logging.getLogger("peer")
RETRY_SECONDS = 0.2
"""Time after which a peer that was lost or refused is asked again"""


class PeerState(Enum):
    """State of a peer, as this process sees it."""

    CONNECTING = auto()
    """The peer has not answered yet"""
    SERVING = auto()
    """The peer takes requests, and was not lost since it last reported so"""
    UNREADY = auto()
    """The peer answers that it takes no requests: it starts, stops or lacks a service"""
    AWAY = auto()
    """The peer was lost, or it was suspended and has not served since"""
    REFUSED = auto()
    """The peer answers, but must not be used"""
    RETIRED = auto()
    """The address of the peer is gone: it finishes running requests, and gets no new ones"""


class PeerRefusedError(Exception):
    """The peer must not be used. The message is one sentence."""


@dataclass(frozen=True, slots=True)
class PeerKind:
    """The service that the peers of a pool offer."""

    name: str
    """Name of the service in messages, such as engine"""
    service: str
    """Full name of the gRPC service whose health is followed"""
    task: str
    """Name of the tasks that follow the health, in logs and metrics (see `keep_running`)"""


@dataclass(frozen=True, slots=True)
class ChannelSettings:
    """Settings of the channels to all peers of a pool; see `connect`."""

    lost_seconds: float = LOST_SECONDS
    tls: ClientTls | None = None
    token: TokenFile | None = None


class Peer:
    """One service, as long as its address is known."""

    def __init__(
        self,
        target: str,
        kind: PeerKind,
        settings: ChannelSettings,
        on_changed: Callable[[], None],
        server_name: str = "",
    ) -> None:
        """on_changed: called when the state has changed. server_name: parameter of `connect`."""
        self.target = target
        self.channel = connect(
            target, settings.lost_seconds, settings.tls, server_name, shown(settings.token)
        )
        self.state = PeerState.CONNECTING
        self.refusal = ""
        """Reason why the peer is REFUSED; empty in every other state"""
        self._is_suspended = False
        self._kind = kind
        self._on_changed = on_changed
        self._health = PeerHealth(self.channel, kind.service, f"the {kind.name} at {target}")

    @property
    def is_serving(self) -> bool:
        return self.state is PeerState.SERVING

    @property
    def may_serve(self) -> bool:
        """True if a request may be tried: nothing has failed since the peer last served."""
        return self.state in (PeerState.CONNECTING, PeerState.SERVING, PeerState.UNREADY)

    def start(self, ask: Callable[[], Awaitable[None]]) -> None:
        """Follow the peer's health.

        ask: called each time that the peer reports that it serves, to ask for the peer's
        properties. It raises PeerRefusedError if the peer must not be used, and AioRpcError if
        the peer is lost; in both cases it is called again later.
        """
        self._ask = ask
        self._watching = keep_running(self._kind.task, self._watch)

    def suspend(self) -> None:
        """Send no requests to the peer until it reports again that it serves."""
        if self.may_serve:
            self._is_suspended = True
            self._watching.cancel()
            self._watching = keep_running(self._kind.task, self._watch)
            self._change(PeerState.AWAY)

    def refuse(self, why: str) -> None:
        """Send no requests to the peer until its connection is lost. why: one sentence."""
        if why != self.refusal:
            _LOG.error("%s", why)
        self._change(PeerState.REFUSED, why)

    def retire(self) -> None:
        """Set the state to RETIRED, because the peer's address is gone."""
        _LOG.info("the %s at %s is no longer used", self._kind.name, self.target)
        self._watching.cancel()
        self._change(PeerState.RETIRED)

    async def reach(self) -> None:
        """Wait until the peer answers."""
        await self._health.reach()

    async def close(self) -> None:
        """Close the channel."""
        self._watching.cancel()
        await self.channel.close()

    async def _watch(self) -> None:
        while True:
            try:
                await self._follow()
            except PeerRefusedError as error:
                self.refuse(str(error))
            else:
                self._change(PeerState.AWAY)  # another service may come back at the address
            await asyncio.sleep(RETRY_SECONDS)

    async def _follow(self) -> None:
        """Follow the health until the connection is lost. Raises PeerRefusedError."""
        try:
            async with aclosing(self._health.statuses()) as statuses:
                async for status in statuses:
                    if status == Status.SERVICE_UNKNOWN:
                        message = f"The server at {self.target} is no {self._kind.name}."
                        raise PeerRefusedError(message)
                    if status == Status.SERVING:
                        await self._ask()
                        self._is_suspended = False
                        self._change(PeerState.SERVING)
                    else:
                        self._change(PeerState.AWAY if self._is_suspended else PeerState.UNREADY)
        except grpc.aio.AioRpcError as error:
            self._health.log_loss(error)

    def _change(self, state: PeerState, refusal: str = "") -> None:
        if self.state is PeerState.RETIRED or (state, refusal) == (self.state, self.refusal):
            return
        self.state, self.refusal = state, refusal
        self._on_changed()
