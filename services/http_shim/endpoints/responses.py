"""Endpoint POST /v1/responses, whose responses can run in the background."""

from functools import partial

from services.http_shim.dialects.fields import JsonObject
from services.http_shim.dialects.reading import Read, Reading
from services.http_shim.dialects.responses.read import read_counted_response, read_response
from services.http_shim.dialects.responses.write import ResponseWriter
from services.http_shim.endpoints.background_responses import (
    BackgroundResponse,
    BackgroundResponses,
)
from services.http_shim.endpoints.generation import AsgiCall, GenerationEndpoint
from services.http_shim.endpoints.generator import Generator, Running
from services.http_shim.endpoints.prompt_reader import PromptReader
from services.http_shim.endpoints.response_keeper import ResponseKeeper
from services.http_shim.http.exchange import Exchange

__all__ = ["ResponsesEndpoint"]


class ResponsesEndpoint(GenerationEndpoint):
    """The endpoint as an ASGI application."""

    def __init__(
        self,
        keeper: ResponseKeeper,
        background: BackgroundResponses,
        prompts: PromptReader,
        generator: Generator,
        stall_seconds: float,
    ) -> None:
        super().__init__(self._prepared, prompts, generator, stall_seconds)
        self._keeper = keeper
        self._background = background

    async def _prepared(self, fields: JsonObject, exchange: Exchange) -> Read:
        """Look up the response that a body continues."""
        owner, keeper = exchange.owner, self._keeper
        context = await keeper.context(fields, owner)
        keep = keeper.keep_background if fields.get("background") is True else keeper.keep
        return partial(read_response, context=context, keep=partial(keep, owner=owner))

    async def prepare_count(self, fields: JsonObject, exchange: Exchange) -> Read:
        """Look up the response that a body continues, whose tokens are counted."""
        context = await self._keeper.context(fields, exchange.owner)
        return partial(read_counted_response, context=context)

    def _has_credit(self, reading: Reading) -> bool:
        return reading.is_streamed and not _writer(reading).is_background

    async def _answer(self, running: Running, call: AsgiCall) -> None:
        writer = _writer(running.reading)
        if not writer.is_background:
            await super()._answer(running, call)
            return
        owner = running.exchange.owner
        with self._background.admitted():
            events = await running.events()
            await self._keeper.keep_running(writer.kept, owner)
            response = BackgroundResponse(owner, writer, events, running)
            await self._background.answer(call, response)


def _writer(reading: Reading) -> ResponseWriter:
    assert isinstance(reading.writer, ResponseWriter)
    return reading.writer
