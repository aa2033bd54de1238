"""Redis as a process that tests kill and start again, without files."""

import asyncio
import shutil
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from redis.asyncio import Redis
from redis.exceptions import RedisError

from tests.stack import free_ports

__all__ = ["RedisServer", "needs_redis", "redis_server"]

needs_redis = pytest.mark.skipif(
    shutil.which("redis-server") is None, reason="Debian's package redis-server has it"
)


class RedisServer:
    """A server at one address of loopback, empty after each start."""

    def __init__(self) -> None:
        [self._port] = free_ports(1)
        self.url = f"redis://127.0.0.1:{self._port}/0"
        self._process: asyncio.subprocess.Process | None = None

    async def start(self) -> None:
        """Start it and wait until it answers."""
        self._process = await asyncio.create_subprocess_exec(
            *("redis-server", "--port", str(self._port), "--bind", "127.0.0.1"),
            *("--save", "", "--appendonly", "no"),
            stdout=asyncio.subprocess.DEVNULL,
        )
        async with Redis.from_url(self.url) as client:
            while True:
                try:
                    await client.ping()
                except (RedisError, OSError):
                    await asyncio.sleep(0.05)
                else:
                    return

    async def kill(self) -> None:
        """Send SIGKILL and wait for the end."""
        assert self._process is not None
        if self._process.returncode is None:
            self._process.kill()
        await self._process.wait()

    def pause(self) -> None:
        """Let it answer nothing more, with its connections open."""
        self._signal(signal.SIGSTOP)

    def resume(self) -> None:
        """Let it answer again."""
        self._signal(signal.SIGCONT)

    def _signal(self, number: signal.Signals) -> None:
        assert self._process is not None
        self._process.send_signal(number)


@asynccontextmanager
async def redis_server() -> AsyncIterator[RedisServer]:
    """Run a server, and kill it at the end."""
    server = RedisServer()
    await server.start()
    try:
        yield server
    finally:
        await server.kill()
