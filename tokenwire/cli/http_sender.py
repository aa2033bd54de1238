"""Requests of a batch over HTTP."""

import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

import httpcore

from tokenwire.batch_run import NotReachedError, Reply, Send

__all__ = ["HttpSender"]

_CONNECT_SECONDS = 10.0
_KEEP_SECONDS = 30.0


@dataclass(frozen=True, slots=True)
class HttpSender:
    """Sender of requests to one server, with one API key."""

    url: str
    """URL of the server, without a path"""
    key: str
    tls: ssl.SSLContext | None
    """TLS context for https; None = the system's authorities"""

    @asynccontextmanager
    async def connect(self) -> AsyncIterator[Send]:
        """Open a worker's connection."""
        # each worker has a pool: the time of one pool grows with the square of its connections
        own = httpcore.AsyncConnectionPool(
            self.tls, max_connections=1, keepalive_expiry=_KEEP_SECONDS
        )
        async with own as pool:

            async def send(path: str, content: bytes) -> Reply:
                return await self._post(pool, path, content)

            yield send

    async def _post(self, pool: httpcore.AsyncConnectionPool, path: str, content: bytes) -> Reply:
        headers = [("content-type", "application/json"), ("accept", "application/json")]
        if self.key:
            headers.append(("authorization", f"Bearer {self.key}"))
        timeouts = {"timeout": {"connect": _CONNECT_SECONDS}}
        try:
            response = await pool.request(
                "POST", self.url + path, headers=headers, content=content, extensions=timeouts
            )
        except (
            httpcore.NetworkError,
            httpcore.RemoteProtocolError,
            httpcore.TimeoutException,
        ) as error:
            why = f"{self.url} does not answer: {error or type(error).__name__}."
            raise NotReachedError(why) from None
        named = {name.decode().lower(): value.decode("latin-1") for name, value in response.headers}
        return Reply(response.status, named, response.content)
