"""Endpoints that generate: POST /v1/completions, /v1/chat/completions, …"""

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from services.http_shim.backends.output_collector import OutputCollector
from services.http_shim.dialects.reading import Reading
from services.http_shim.endpoints.event_stream import EventStream
from services.http_shim.endpoints.generator import Generator, Running
from services.http_shim.endpoints.prompt_reader import Prepare, PromptReader
from services.http_shim.endpoints.stream_sender import (
    CREDIT,
    AsgiCall,
    client_left,
    send_last,
    send_stream,
    send_while_waiting,
)
from services.http_shim.errors import ClientGoneError
from services.http_shim.http.body import HeldBytes
from services.http_shim.http.exchange import exchange_of
from tokenwire.errors import ServiceError

__all__ = ["GenerationEndpoint", "watch_for_disconnect"]


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
        with self._prompts.bodies.held() as held:
            reading = await self._prompts.read(scope, receive, held, self._prepare)
            await self._run(reading, held, AsgiCall(scope, receive, send))

    async def _run(self, reading: Reading, held: HeldBytes, call: AsgiCall) -> None:
        """Run a request, and send its answer while the client stays."""
        credit = CREDIT if reading.is_streamed else None
        exchange = exchange_of(call.scope)
        async with self._generator.running(exchange, reading, held, credit=credit) as running:
            with _watched(call.receive, partial(self._leave, running)):
                await self._answer(running, call)
        if running.output.gone:
            raise ClientGoneError

    def _leave(self, running: Running) -> None:
        """End a request whose client left."""
        running.output.abandon()

    async def _begin(self, running: Running) -> None:
        """Prepare a stream, before its first event. Raises ServiceError."""

    async def _answer(self, running: Running, call: AsgiCall) -> None:
        if running.reading.is_streamed:
            await self._stream(running, call)
        else:
            whole = await running.whole()
            headers = {"x-tokens-used": str(running.exchange.tokens_used)}
            response = Response(whole, headers=headers, media_type="application/json")
            await response(call.scope, call.receive, call.send)

    async def _stream(self, running: Running, call: AsgiCall) -> None:
        """Send a stream. It begins before its admission while the model is being loaded."""
        connection = running.model.connection
        admission = asyncio.ensure_future(self._begun(running))
        try:
            has_begun = connection.waits_for_load and await send_while_waiting(
                call, admission, running.early_writer(), connection.load_progress
            )
            try:
                events = await admission
            except ServiceError as error:
                if not has_begun:
                    raise
                await send_last(call, await running.failure(error))
                return
        finally:
            admission.cancel()
        await send_stream(
            call.scope,
            call.send,
            running.output,
            running.submission,
            events,
            stall_seconds=self._stall_seconds,
            has_begun=has_begun,
        )

    async def _begun(self, running: Running) -> EventStream:
        """Wait for the admission; return the stream of the answer. Raises ServiceError."""
        events = await running.events()
        await self._begin(running)
        return events


@contextmanager
def _watched(receive: Receive, leave: Callable[[], None]) -> Iterator[None]:
    """Call `leave` when the client leaves."""
    watch = asyncio.ensure_future(_watch(receive, leave))
    try:
        yield
    finally:
        watch.cancel()


async def _watch(receive: Receive, leave: Callable[[], None]) -> None:
    await client_left(receive)
    leave()


async def watch_for_disconnect(receive: Receive, *outputs: OutputCollector) -> None:
    """Abandon the requests of a client when it leaves."""
    await client_left(receive)
    for output in outputs:
        output.abandon()
