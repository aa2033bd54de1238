"""A TCP connection between two services that can be cut, held up and slowed down."""

import asyncio
import contextlib

__all__ = ["Link"]


class Link:
    """Forwards connections to a target, unless a test says otherwise."""

    def __init__(self, name: str, target: str) -> None:
        self.name = f"link to {name}"
        self._far_host, _, far_port = target.rpartition(":")
        self._far_port = int(far_port)
        self._server: asyncio.Server | None = None
        self._pumps: set[asyncio.Task[None]] = set()
        self._flows = asyncio.Event()
        self._flows.set()
        self.delay = 0.0
        """Seconds by which each piece of data is late"""

    async def start(self) -> None:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)

    @property
    def target(self) -> str:
        """Address of the link, host:port."""
        assert self._server is not None
        return f"127.0.0.1:{self._server.sockets[0].getsockname()[1]}"

    def cut(self) -> None:
        """Break all connections; new ones work."""
        for pump in [*self._pumps]:
            pump.cancel()

    def hold(self) -> None:
        """Forward nothing until `release`."""
        self._flows.clear()

    def release(self) -> None:
        """Forward what was held up."""
        self._flows.set()

    async def stop(self) -> None:
        """Break all connections, and take no more."""
        if self._server is not None:
            self._server.close()
        self.cut()
        await asyncio.gather(*self._pumps, return_exceptions=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            far_reader, far_writer = await asyncio.open_connection(self._far_host, self._far_port)
        except OSError:
            writer.close()
            return
        there = asyncio.ensure_future(self._pump(reader, far_writer))
        back = asyncio.ensure_future(self._pump(far_reader, writer))
        for pump, other in ((there, back), (back, there)):
            self._pumps.add(pump)
            pump.add_done_callback(self._pumps.discard)
            pump.add_done_callback(lambda _, other=other: other.cancel())  # type: ignore[misc]

    async def _pump(self, source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
        try:
            with contextlib.suppress(OSError):
                while data := await source.read(65_536):
                    await self._flows.wait()
                    if self.delay:
                        await asyncio.sleep(self.delay)
                    sink.write(data)
                    await sink.drain()
        finally:
            sink.close()
