"""Endpoints that generate: POST /v1/completions, /v1/chat/completions, …"""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from services.http_shim.backends.model_source import ModelSource, ServedModel
from services.http_shim.backends.output_collector import OutputCollector
from services.http_shim.backends.submission import Submission
from services.http_shim.dialects.reading import Reading
from services.http_shim.dialects.writer import generated_tokens
from services.http_shim.endpoints.event_stream import EventStream
from services.http_shim.endpoints.prompt_reader import Prepare, PromptReader
from services.http_shim.endpoints.stream_sender import CREDIT, client_left, send_stream
from services.http_shim.errors import ClientGoneError, client_field_names
from services.http_shim.http.access import assign_model, charging, reserve
from services.http_shim.http.exchange import Exchange, exchange_of
from services.http_shim.http.gate import Gate
from services.http_shim.http.scheduling import priority_of
from tokenwire.pb.completion.v1 import completion_pb2
from tokenwire.pb.types.v1 import types_pb2

__all__ = ["AsgiCall", "GenerationEndpoint", "Running", "watch_for_disconnect"]

_INLINE = 256 * 1024  # bytes; a larger answer is put together in a thread


@dataclass(frozen=True, slots=True)
class AsgiCall:
    """The ASGI arguments of one request."""

    scope: Scope
    receive: Receive
    send: Send


@dataclass(frozen=True, slots=True)
class Running:
    """A request that runs."""

    exchange: Exchange
    model: ServedModel
    reading: Reading
    output: OutputCollector
    submission: Submission

    async def accepted(self) -> completion_pb2.Accepted:
        """Wait for the admission; note the model, and for the header the ignored parts."""
        accepted = await self.output.admitted()
        self.exchange.ignored += map(self.reading.place, accepted.ignored)
        if self.model.id:
            accepted.model = self.model.id
        self.exchange.model = accepted.model
        return accepted

    async def events(self) -> EventStream:
        """Wait for the admission; return the stream of the answer."""
        accepted = await self.accepted()
        events = self.reading.writer.events(accepted, self.exchange.request_id)
        return EventStream(self.output, events, self.exchange, self.reading.field)

    async def whole(self) -> Response:
        """Wait for the end of the request, and return the answer as one JSON object."""
        await self.accepted()
        usage = await self.output.completed()
        self._count(usage)
        is_large = self._output_bytes() >= _INLINE
        encoded = await self.reading.writer.answer(self.output, is_large=is_large)
        used = usage.prompt_tokens + usage.completion_tokens
        headers = {"x-tokens-used": str(used)}
        return Response(encoded, headers=headers, media_type="application/json")

    async def end(self) -> None:
        """Cancel the request unless it ended, and count the tokens of a client that left."""
        if self.output.gone and not self.reading.is_streamed:
            if (usage := await self.submission.cancelled_usage()) is not None:
                self._count(usage)
        elif self.output.is_open():
            self.submission.cancel()
        if self.reading.is_streamed:  # output that was not sent
            pending = self.output.pending.values()
            self.exchange.completion_tokens += sum(map(generated_tokens, pending))

    def _count(self, usage: types_pb2.Usage) -> None:
        self.exchange.prompt_tokens = usage.prompt_tokens
        self.exchange.completion_tokens = usage.completion_tokens

    def _output_bytes(self) -> int:
        deltas = (delta for choice in self.output.pending.values() for delta in choice)
        runs = (run for prompt in self.output.prompt_logprobs.values() for run in prompt)
        return sum(delta.ByteSize() for delta in deltas) + sum(run.ByteSize() for run in runs)


class GenerationEndpoint:
    """An endpoint as an ASGI application, which can watch for a client that leaves."""

    def __init__(
        self,
        prepare: Prepare,
        models: ModelSource,
        gate: Gate,
        prompts: PromptReader,
        stall_seconds: float,
    ) -> None:
        """prepare: of the endpoint's dialect."""
        self._prepare = prepare
        self._models = models
        self._gate = gate
        self._prompts = prompts
        self._stall_seconds = stall_seconds

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        exchange = exchange_of(scope)
        with self._prompts.bodies.held() as held:
            reading = await self._prompts.read(scope, receive, held, self._prepare)
            request = reading.request
            model = await assign_model(exchange, self._models, request.model, request)
            output = OutputCollector()
            with (
                charging(exchange, await reserve(exchange, request)),
                self._gate.admit(output),
                model.connection.lease() as backend,
                client_field_names(reading.field),
            ):
                await self._prompts.fetch_images(reading, held)
                submission = backend.submit(
                    request,
                    output,
                    tenant=exchange.tenant,
                    priority=priority_of(exchange, reading.priority),
                    timeout=reading.timeout,
                    credit=CREDIT if self._has_credit(reading) else None,
                    images=reading.images,
                    on_admitted=held.release,
                )
                running = Running(exchange, model, reading, output, submission)
                try:
                    await self._answer(running, AsgiCall(scope, receive, send))
                finally:
                    await running.end()
        if output.gone:
            raise ClientGoneError

    def _has_credit(self, reading: Reading) -> bool:
        """Return whether the answer must not be generated faster than its client reads."""
        return reading.is_streamed

    async def _answer(self, running: Running, call: AsgiCall) -> None:
        """Send the answer while the client stays."""
        scope, send, output = call.scope, call.send, running.output
        with _watched(call.receive, output):
            if running.reading.is_streamed:
                events, stall = await running.events(), self._stall_seconds
                await send_stream(
                    scope, send, output, running.submission, events, stall_seconds=stall
                )
            else:
                response = await running.whole()
                await response(scope, call.receive, send)


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
