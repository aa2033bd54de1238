"""Generation: requests run on the model that they name, for the caller of an exchange."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

from services.http_shim.backends.model_source import ModelSource, ServedModel
from services.http_shim.backends.output_collector import OutputCollector
from services.http_shim.backends.submission import Submission
from services.http_shim.dialects.reading import Reading
from services.http_shim.dialects.writer import EventWriter, generated_tokens
from services.http_shim.endpoints.event_stream import EventStream
from services.http_shim.endpoints.prompt_reader import PromptReader
from services.http_shim.errors import client_field_names, http_status
from services.http_shim.http.access import assign_model, charging, reserve
from services.http_shim.http.body import HeldBytes
from services.http_shim.http.exchange import Exchange
from services.http_shim.http.gate import Gate
from services.http_shim.http.scheduling import priority_of
from tokenwire.errors import ServiceError
from tokenwire.pb.completion.v1 import completion_pb2
from tokenwire.pb.types.v1 import types_pb2

__all__ = ["Generator", "Running"]

_INLINE = 256 * 1024  # bytes; a larger answer is put together in a thread


@dataclass(frozen=True, slots=True)
class Running:
    """A request that runs."""

    exchange: Exchange
    model: ServedModel
    reading: Reading
    output: OutputCollector
    submission: Submission

    async def events(self) -> EventStream:
        """Wait for the admission; return the stream of the answer."""
        accepted = await self._accepted()
        events = self.reading.writer.events(accepted, self.exchange.request_id)
        return EventStream(self.output, events, self.exchange, self.reading.field)

    def early_writer(self) -> EventWriter:
        """Return a writer for what comes before the admission: pings, and a failure."""
        accepted = completion_pb2.Accepted(model=self.model.id)
        return self.reading.writer.events(accepted, self.exchange.request_id)

    async def failure(self, error: ServiceError) -> bytes:
        """Return the events of a request that failed before its admission."""
        self.exchange.status = http_status(error.code)
        self.exchange.error = error
        if error.field:
            error.field = self.reading.field(error.field)
        writer = self.early_writer()
        return b"".join(writer.fail(error)) + await writer.end()

    async def whole(self) -> bytes:
        """Wait for the end of the request, and return the answer as one JSON object."""
        await self._accepted()
        self._count(await self.output.completed())
        is_large = self._output_bytes() >= _INLINE
        return await self.reading.writer.answer(self.output, is_large=is_large)

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

    async def _accepted(self) -> completion_pb2.Accepted:
        """Wait for the admission; note the model, and for the header the ignored parts."""
        accepted = await self.output.admitted()
        self.exchange.ignored += map(self.reading.place, accepted.ignored)
        if self.model.id:
            accepted.model = self.model.id
        self.exchange.model = accepted.model
        self.exchange.cached_tokens = sum(accepted.cached_tokens)
        return accepted

    def _count(self, usage: types_pb2.Usage) -> None:
        self.exchange.prompt_tokens = usage.prompt_tokens
        self.exchange.completion_tokens = usage.completion_tokens

    def _output_bytes(self) -> int:
        deltas = (delta for choice in self.output.pending.values() for delta in choice)
        runs = (run for prompt in self.output.prompt_logprobs.values() for run in prompt)
        return sum(delta.ByteSize() for delta in deltas) + sum(run.ByteSize() for run in runs)


class Generator:
    """Runs requests to generate."""

    def __init__(self, models: ModelSource, gate: Gate, prompts: PromptReader) -> None:
        self._models = models
        self._gate = gate
        self._prompts = prompts

    @asynccontextmanager
    async def running(
        self, exchange: Exchange, reading: Reading, held: HeldBytes, *, credit: int | None
    ) -> AsyncIterator[Running]:
        """Submit a request, and yield it; it ends with the context at the latest.

        credit: tokens per choice that may be sent before more are granted; None = all. Raises
        ServiceError with the client's name of a field.
        """
        request = reading.request
        model = await assign_model(exchange, self._models, request.model, request)
        if reading.keep_alive is not None and not model.connection.on_demand:
            exchange.ignored.append("keep_alive")
        output = OutputCollector()
        with (
            charging(exchange, await reserve(exchange, request)),
            self._gate.admit(output),
            model.connection.lease(reading.keep_alive) as backend,
        ):
            await self._prompts.fetch_images(reading, held)
            with client_field_names(reading.field):
                submission = backend.submit(
                    request,
                    output,
                    tenant=exchange.tenant,
                    priority=priority_of(exchange, reading.priority),
                    timeout=reading.timeout,
                    credit=credit,
                    images=reading.images,
                    on_admitted=held.release,
                )
                running = Running(exchange, model, reading, output, submission)
                try:
                    yield running
                finally:
                    await running.end()
