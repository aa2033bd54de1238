"""Endpoints POST /api/chat and /api/generate."""

from collections.abc import Callable

from starlette.responses import Response

from services.http_shim.backends.model_source import ModelSource
from services.http_shim.dialects.fields import JsonObject
from services.http_shim.dialects.ollama.read import OllamaReading
from services.http_shim.dialects.ollama.write import OllamaWriter
from services.http_shim.dialects.reading import Reading, render_request
from services.http_shim.endpoints.generation import GenerationEndpoint
from services.http_shim.endpoints.generator import Generator, Running
from services.http_shim.endpoints.prompt_reader import PromptReader, always
from services.http_shim.endpoints.stream_sender import AsgiCall
from services.http_shim.errors import client_field_names
from services.http_shim.http.access import authorized_model
from services.http_shim.http.body import HeldBytes
from services.http_shim.http.exchange import Exchange, exchange_of
from services.http_shim.ollama.loading import load_model, unload_model
from services.http_shim.ollama.model_names import existing_name, naming
from tokenwire.errors import invalid
from tokenwire.pb.completion.v1 import models_pb2

__all__ = ["OllamaGeneration"]


class OllamaGeneration(GenerationEndpoint):
    """An endpoint that generates. A request without input loads or unloads its model."""

    def __init__(
        self,
        read: Callable[[JsonObject], OllamaReading],
        models: ModelSource,
        prompts: PromptReader,
        generator: Generator,
        stall_seconds: float,
    ) -> None:
        super().__init__(always(read), prompts, generator, stall_seconds)
        self._models = models

    async def _run(self, reading: Reading, held: HeldBytes, call: AsgiCall) -> None:
        assert isinstance(reading, OllamaReading)
        with naming(reading.named):
            reading.request.model = await existing_name(self._models, reading.named)
            if not reading.has_input:
                await self._load(reading, call)
                return
            await self._fit(reading, exchange_of(call.scope))
            if reading.context:
                await self._continue_context(reading, call)
            await super()._run(reading, held, call)

    async def _load(self, reading: OllamaReading, call: AsgiCall) -> None:
        """Answer a request without input."""
        name, writer = reading.request.model, _writer(reading)
        if reading.unloads:
            await unload_model(exchange_of(call.scope), self._models, name)
            body = writer.empty("unload")
        else:
            await load_model(exchange_of(call.scope), self._models, name, reading.keep_alive)
            body = writer.empty("load")
        await Response(body, media_type="application/json")(call.scope, call.receive, call.send)

    async def _answer(self, running: Running, call: AsgiCall) -> None:
        _writer(running.reading).waits_for_load = running.model.connection.waits_for_load
        await super()._answer(running, call)

    async def _fit(self, reading: OllamaReading, exchange: Exchange) -> None:
        """Check what a request asks of its model, and let a prompt's answer fill the context."""
        request = reading.request
        is_infill = request.HasField("prompts") and request.prompts.HasField("suffix")
        is_question = reading.bare_question is not None
        if not (is_infill or is_question or reading.must_reason or reading.takes_all_room):
            return
        model = await self._described(reading, exchange)
        if model is None:
            return  # the services report why
        if is_infill and not model.infill:
            raise invalid("", f'"{reading.named}" does not support insert')
        if reading.must_reason and not model.reasoning:
            raise invalid("", f'"{reading.named}" does not support thinking')
        if is_question and not model.chat:
            reading.ask_without_template()
        if reading.takes_all_room:
            request.stopping.max_tokens = model.max_output_length

    async def _described(
        self, reading: OllamaReading, exchange: Exchange
    ) -> models_pb2.Model | None:
        """Return what a model says of itself, which is loaded if it never was; None = nothing."""
        listed = await self._models.listed_as(reading.request.model)
        if listed.model is None and listed.row.on_demand:
            await load_model(exchange, self._models, reading.request.model, reading.keep_alive)
            listed = await self._models.listed_as(reading.request.model)
        return listed.model

    async def _continue_context(self, reading: OllamaReading, call: AsgiCall) -> None:
        """Put the ids of earlier turns before the prompt; the answer is then plain text."""
        request, exchange = reading.request, exchange_of(call.scope)
        served = await authorized_model(exchange, self._models, request.model)
        rendering = render_request(reading, served.backend_name)
        with client_field_names(reading.field), served.connection.lease() as backend:
            ids = list((await backend.render(rendering)).ids)
            tokenizer = await backend.tokenizer(served.backend_name)
            model, *_ = await backend.models()
        if tokenizer.HasField("bos_token_id") and ids[:1] == [tokenizer.bos_token_id]:
            del ids[0]  # it stands at the beginning of the context
        request.prompts.items.add().token_ids.ids.extend([*reading.context, *ids])
        request.truncate_prompt = request.drop_oldest_messages
        request.drop_oldest_messages = False
        if not request.stopping.HasField("max_tokens"):
            request.stopping.max_tokens = model.max_output_length


def _writer(reading: Reading) -> OllamaWriter:
    assert isinstance(reading.writer, OllamaWriter)
    return reading.writer
