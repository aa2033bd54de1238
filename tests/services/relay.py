"""TCP relay to a service, with an optional delay."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, closing

__all__ = ["relay"]


@asynccontextmanager
async def relay(target: str, *, port: int = 0, seconds_away: float = 0.0) -> AsyncIterator[str]:
    """Forward connections to `target`, and yield the relay's host:port.

    port: the port to listen on; 0 selects a free one.
    seconds_away: delay of the first bytes of each connection, in seconds.
    """
    host, its_port = target.rsplit(":", 1)

    async def pump(source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
        with closing(sink):
            while data := await source.read(65_536):
                sink.write(data)

    async def hand_on(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await asyncio.sleep(seconds_away)
        far_reader, far_writer = await asyncio.open_connection(host, int(its_port))
        await asyncio.gather(pump(reader, far_writer), pump(far_reader, writer))

    way = await asyncio.start_server(hand_on, "127.0.0.1", port)
    try:
        yield f"127.0.0.1:{way.sockets[0].getsockname()[1]}"
    finally:
        way.close()
