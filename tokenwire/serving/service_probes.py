"""Probes that tell when services serve."""

import asyncio
import ssl
from collections.abc import Awaitable, Callable, Sequence
from typing import TypeVar

from services.common.network.health import is_ready, is_serving
from tokenwire.serving.service import Service
from tokenwire.serving.service_process import ServiceProcess

__all__ = ["POLL_SECONDS", "serves", "until_ready", "until_up"]

POLL_SECONDS = 0.1
"""Time between two probes of a process"""
Place = TypeVar("Place")


async def until_ready(services: Sequence[Service], url: str) -> None:
    """Wait until every service serves and the HTTP server answers 200."""
    await _until_serving(services)
    await _until(_answers, url)


async def until_up(services: Sequence[Service], processes: Sequence[ServiceProcess]) -> None:
    """Wait until all services serve. Raises ServeError when a process ends before."""
    ready = asyncio.ensure_future(_until_serving(services))
    ends = [asyncio.ensure_future(process.wait()) for process in processes]
    try:
        await asyncio.wait([ready, *ends], return_when=asyncio.FIRST_COMPLETED)
        if not ready.done():
            ended = next(each for each in processes if each.returncode is not None)
            raise await ended.failure(was_up=False)
        ready.result()
    finally:
        for each in (ready, *ends):
            each.cancel()


async def _until_serving(services: Sequence[Service]) -> None:
    for service in reversed(services):
        await _until(serves, service)


async def serves(service: Service) -> bool:
    """Return whether the service's process, rather than one beside it, serves."""
    url = service.health_url
    return await (_answers(url) if url else is_serving(service.target))


async def _answers(url: str) -> bool:
    """Return whether the shim answers; its certificate is for other names than this machine's."""
    return await is_ready(url, ssl._create_unverified_context())


async def _until(probe: Callable[[Place], Awaitable[bool]], place: Place) -> None:
    while not await probe(place):  # noqa: ASYNC110 - another process has no event to wait for
        await asyncio.sleep(POLL_SECONDS)
