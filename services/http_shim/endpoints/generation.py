"""Endpoints that generate: POST /v1/completions, /v1/chat/completions, …"""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from services.http_shim.backends.output_collector import OutputCollector
from services.http_shim.dialects.reading import Reading
from services.http_shim.endpoints.generator import Generator, Running
from services.http_shim.endpoints.prompt_reader import Prepare, PromptReader
from services.http_shim.endpoints.stream_sender import CREDIT, client_left, send_stream
from services.http_shim.errors import ClientGoneError
from services.http_shim.http.exchange import exchange_of

__all__ = ["AsgiCall", "GenerationEndpoint", "watch_for_disconnect"]


@dataclass(frozen=True, slots=True)
class AsgiCall:
    """The ASGI arguments of one request."""

    scope: Scope
    receive: Receive
    send: Send


class GenerationEndpoint:
    """An endpoint as an ASGI application, which can watch for a client that leaves."""

    def __init__(
        self,
        prepare: Prepare,
        prompts: PromptReader,
        generator: Generator,
        stall_seconds: float,
    ) -> None:
        """prepare: of the endpoint's dialect. stall_seconds: that a client may read nothing."""
        self._prepare = prepare
        self._prompts = prompts
        self._generator = generator
        self._stall_seconds = stall_seconds

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        exchange = exchange_of(scope)
        with self._prompts.bodies.held() as held:
            reading = await self._prompts.read(scope, receive, held, self._prepare)
            credit = CREDIT if self._has_credit(reading) else None
            async with self._generator.running(exchange, reading, held, credit=credit) as running:
                await self._answer(running, AsgiCall(scope, receive, send))
        if running.output.gone:
            raise ClientGoneError

    def _has_credit(self, reading: Reading) -> bool:
        """Return whether the answer must not be generated faster than its client reads."""
        return reading.is_streamed

    async def _answer(self, running: Running, call: AsgiCall) -> None:
        """Send the answer while the client stays."""
        output = running.output
        with _watched(call.receive, output):
            if running.reading.is_streamed:
                events, stall = await running.events(), self._stall_seconds
                await send_stream(
                    call.scope, call.send, output, running.submission, events, stall_seconds=stall
                )
            else:
                whole = await running.whole()
                headers = {"x-tokens-used": str(running.exchange.tokens_used)}
                response = Response(whole, headers=headers, media_type="application/json")
                await response(call.scope, call.receive, call.send)


@contextmanager
def _watched(receive: Receive, output: OutputCollector) -> Iterator[None]:
    """Abandon a request when its client leaves."""
    watch = asyncio.ensure_future(watch_for_disconnect(receive, output))
    try:
        yield
    finally:
        watch.cancel()


async def watch_for_disconnect(receive: Receive, *outputs: OutputCollector) -> None:
    """Abandon the requests of a client when it leaves."""
    await client_left(receive)
    for output in outputs:
        output.abandon()
