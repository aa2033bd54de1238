"""Endpoints that count the tokens of a prompt: Anthropic's and OpenAI's."""

from collections.abc import Callable

from msgspec import Struct
from starlette.requests import Request
from starlette.responses import Response

from services.http_shim.backends.model_source import ModelSource
from services.http_shim.dialects.reading import render_request
from services.http_shim.endpoints.prompt_reader import Prepare, PromptReader
from services.http_shim.errors import client_field_names
from services.http_shim.http.access import authorized_model
from services.http_shim.http.body import json_response
from services.http_shim.http.exchange import exchange_of

__all__ = ["TokenCounting"]


class TokenCounting:
    """An endpoint that counts."""

    def __init__(
        self,
        prepare: Prepare,
        answer: Callable[[int], Struct],
        models: ModelSource,
        prompts: PromptReader,
    ) -> None:
        """prepare: of the endpoint's dialect. answer: makes its answer of the count."""
        self._prepare = prepare
        self._count_answer = answer
        self._models = models
        self._prompts = prompts

    async def count(self, request: Request) -> Response:
        """Return the length of a prompt, in tokens."""
        exchange = exchange_of(request.scope)
        with self._prompts.bodies.held() as held:
            reading = await self._prompts.read(request.scope, request.receive, held, self._prepare)
            model = reading.request.model
            served = await authorized_model(exchange, self._models, model)
            await self._prompts.fetch_images(reading, held)
            rendered = render_request(reading, served.backend_name)
            with client_field_names(reading.field), served.connection.lease() as backend:
                answer = await backend.render(rendered)
        return json_response(self._count_answer(len(answer.ids)))
