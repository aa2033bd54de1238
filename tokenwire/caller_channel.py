"""Channel whose calls carry a token, and whose new connections use replaced certificates."""

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import grpc

from tokenwire.tls import TlsError, stamp

__all__ = ["CallerChannel"]

_LOG = logging.getLogger("tls")
_LOOK_SECONDS = 1.0
_AUTHORIZATION = "authorization"
_Call: TypeAlias = Callable[..., Any]
_Make: TypeAlias = Callable[[grpc.aio.Channel], Any]


class CallerChannel(grpc.aio.Channel):
    """Channels for successive certificates, which gRPC reads only when it opens a channel.

    New calls use the newest channel. An older channel is closed when its last call has ended, so
    running streams are not broken.
    """

    def __init__(
        self,
        open_channel: Callable[[], grpc.aio.Channel],
        files: Sequence[Path],
        token: Callable[[], str] | None,
    ) -> None:
        """open_channel: reads the files; raises TlsError. token: returns a call's token."""
        self._open_channel = open_channel
        self._files = files
        self._token = token
        self._stamp = stamp(files)
        self._looked_at = time.monotonic()
        self._current = _Connections(open_channel())
        self._all = {self._current}
        self._closing: set[asyncio.Task[None]] = set()

    def call(self, make: _Make, arguments: Sequence[Any], options: dict[str, Any]) -> Any:
        """Start a call of the rpc that `make` returns for a channel."""
        self._follow_files()
        if self._token is not None:
            given = tuple(options.get("metadata") or ())
            options["metadata"] = (*given, (_AUTHORIZATION, f"Bearer {self._token()}"))
        connections = self._current
        call = connections.rpc(make)(*arguments, **options)
        connections.open_calls += 1
        call.add_done_callback(lambda _: self._on_end(connections))
        return call

    def _follow_files(self) -> None:
        """Open another channel if the files were replaced; unusable files change nothing."""
        now = time.monotonic()
        if not self._files or now - self._looked_at < _LOOK_SECONDS:
            return
        self._looked_at = now
        if (found := stamp(self._files)) == self._stamp:
            return
        self._stamp = found
        try:
            channel = self._open_channel()
        except TlsError as error:
            _LOG.error("%s The previous certificates stay.", error)
            return
        _LOG.info("new connections use the certificates of %s", self._files[0])
        previous, self._current = self._current, _Connections(channel)
        self._all.add(self._current)
        self._close_unused(previous)

    def _on_end(self, connections: "_Connections") -> None:
        connections.open_calls -= 1
        self._close_unused(connections)

    def _close_unused(self, connections: "_Connections") -> None:
        is_old = connections is not self._current and connections in self._all
        if is_old and not connections.open_calls:
            self._all.discard(connections)
            closing = asyncio.ensure_future(connections.channel.close())
            self._closing.add(closing)
            closing.add_done_callback(self._closing.discard)

    # grpc.aio.Channel

    async def __aenter__(self) -> "CallerChannel":
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.close()

    async def close(self, grace: float | None = None) -> None:
        connections, self._all = self._all, {self._current}
        for each in connections:
            await each.channel.close(grace)

    def get_state(self, try_to_connect: bool = False) -> grpc.ChannelConnectivity:
        return self._current.channel.get_state(try_to_connect)

    async def wait_for_state_change(self, last_observed_state: grpc.ChannelConnectivity) -> None:
        await self._current.channel.wait_for_state_change(last_observed_state)

    async def channel_ready(self) -> None:
        await self._current.channel.channel_ready()

    def unary_unary(self, *arguments: Any, **options: Any) -> Any:
        return self._rpc(lambda channel: channel.unary_unary(*arguments, **options))

    def unary_stream(self, *arguments: Any, **options: Any) -> Any:
        return self._rpc(lambda channel: channel.unary_stream(*arguments, **options))

    def stream_unary(self, *arguments: Any, **options: Any) -> Any:
        return self._rpc(lambda channel: channel.stream_unary(*arguments, **options))

    def stream_stream(self, *arguments: Any, **options: Any) -> Any:
        return self._rpc(lambda channel: channel.stream_stream(*arguments, **options))

    def _rpc(self, make: _Make) -> _Call:
        return lambda *arguments, **options: self.call(make, arguments, options)


class _Connections:
    """One channel of gRPC, and the number of its open calls."""

    def __init__(self, channel: grpc.aio.Channel) -> None:
        self.channel = channel
        self.open_calls = 0
        self._rpcs: dict[_Make, _Call] = {}

    def rpc(self, make: _Make) -> _Call:
        if make not in self._rpcs:
            self._rpcs[make] = make(self.channel)
        return self._rpcs[make]
