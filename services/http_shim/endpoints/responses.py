"""Endpoint POST /v1/responses, whose responses can run in the background."""

from functools import partial

import grpc
import msgspec

from services.http_shim.dialects.fields import JsonObject
from services.http_shim.dialects.reading import Read, Reading
from services.http_shim.dialects.responses.read import read_counted_response, read_response
from services.http_shim.dialects.responses.write import CANCELLED, ResponseWriter
from services.http_shim.endpoints.background_responses import BackgroundResponses
from services.http_shim.endpoints.generation import GenerationEndpoint
from services.http_shim.endpoints.generator import Generator, Running
from services.http_shim.endpoints.prompt_reader import PromptReader
from services.http_shim.endpoints.response_keeper import ResponseKeeper
from services.http_shim.endpoints.stream_sender import AsgiCall
from services.http_shim.http.body import HeldBytes
from services.http_shim.http.exchange import Exchange
from services.http_shim.jobs.jobs import InnerJobs, context_of
from tokenwire.errors import ServiceError

__all__ = ["ResponsesEndpoint"]


class ResponsesEndpoint(GenerationEndpoint):
    """The endpoint as an ASGI application."""

    def __init__(
        self,
        jobs: InnerJobs,
        background: BackgroundResponses | None,
        prompts: PromptReader,
        generator: Generator,
        stall_seconds: float,
    ) -> None:
        """background: starts responses in the background; None = they are answered as streams."""
        super().__init__(self._prepared, prompts, generator, stall_seconds)
        self._keeper = ResponseKeeper(jobs)
        self._background = background

    async def prepare_count(self, fields: JsonObject, exchange: Exchange) -> Read:
        """Look up the response that a body continues, whose tokens are counted."""
        context = await self._keeper.context(fields, context_of(exchange))
        return partial(read_counted_response, context=context)

    async def _prepared(self, fields: JsonObject, exchange: Exchange) -> Read:
        """Look up the response that a body continues, unless the jobs service does."""
        is_background = fields.get("background") is True
        if is_background and self._background is not None:
            return _ForwardedBody
        caller, keeper = context_of(exchange), self._keeper
        context = await keeper.context(fields, caller)
        keep = keeper.keep_background if is_background else keeper.keep
        return partial(read_response, context=context, keep=partial(keep, caller=caller))

    async def _run(self, reading: Reading, held: HeldBytes, call: AsgiCall) -> None:
        if isinstance(reading, _ForwardedBody):
            assert self._background is not None
            stream = reading.is_streamed
            await self._background.answer(call, reading.take(), held.release, stream=stream)
        else:
            await super()._run(reading, held, call)

    async def _begin(self, running: Running) -> None:
        """Keep a response in the background as one that runs, before its first event."""
        writer = _writer(running.reading)
        if writer.is_background:
            await self._keeper.keep_running(writer.kept, context_of(running.exchange))

    def _leave(self, running: Running) -> None:
        """End a response whose caller left; one in the background keeps the output that it has."""
        output = running.output
        if not _writer(running.reading).is_background:
            output.abandon()
        elif output.is_open():
            running.submission.cancel()
            message = "The response was cancelled."
            output.on_error(ServiceError(grpc.StatusCode.CANCELLED, CANCELLED, message))


class _ForwardedBody(Reading):
    """The body of a response in the background, which the jobs service reads."""

    def __init__(self, fields: JsonObject) -> None:
        super().__init__([], {})
        self._body = msgspec.json.encode(fields)
        self.is_streamed = fields.get("stream") is True

    @property
    def held_bytes(self) -> int:
        return len(self._body)

    @property
    def exempt_length(self) -> int:
        """All of the body: the jobs service, which reads it, applies the limit."""
        return len(self._body)

    def take(self) -> bytes:
        """Return the encoded body, and hold it no longer."""
        body, self._body = self._body, b""
        return body


def _writer(reading: Reading) -> ResponseWriter:
    assert isinstance(reading.writer, ResponseWriter)
    return reading.writer
