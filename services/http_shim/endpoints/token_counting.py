"""Endpoint POST /v1/messages/count_tokens."""

from functools import partial

import msgspec
from msgspec import Struct
from starlette.requests import Request
from starlette.responses import Response

from services.http_shim.backends.model_source import ModelSource
from services.http_shim.documents.request_documents import RequestDocument
from services.http_shim.endpoints.documents import Documents
from services.http_shim.errors import client_field_names
from services.http_shim.formats.anthropic.blocks import take_block_documents, take_block_images
from services.http_shim.formats.anthropic.message_requests import (
    CountTokensBody,
    ignored_tools,
    message_param_of,
    to_count_request,
)
from services.http_shim.formats.request_bodies import parse
from services.http_shim.http.access import authorized_model
from services.http_shim.http.body import BodyReader, json_response
from services.http_shim.http.exchange import exchange_of
from services.http_shim.images.image_fetcher import ImageFetcher, fetch_remote
from services.http_shim.images.request_images import RequestImages

__all__ = ["TokenCount", "TokenCounting"]

_DECODER = msgspec.json.Decoder(CountTokensBody)


class TokenCount(Struct):
    """Answer of /v1/messages/count_tokens."""

    input_tokens: int


class _Asked(Struct):
    body: CountTokensBody
    ignored: list[str]
    images: RequestImages
    documents: list[RequestDocument]


class TokenCounting:
    """The endpoint."""

    def __init__(
        self,
        models: ModelSource,
        bodies: BodyReader,
        fetcher: ImageFetcher | None,
        documents: Documents,
    ) -> None:
        self._models = models
        self._bodies = bodies
        self._fetcher = fetcher
        self._documents = documents

    async def count(self, request: Request) -> Response:
        """Return the length of a prompt, in tokens."""
        exchange = exchange_of(request.scope)
        with self._bodies.held() as held:
            asked = await self._bodies.read_with_images(
                request.scope, request.receive, _parse, held
            )
            exchange.ignored = asked.ignored
            served = await authorized_model(exchange, self._models, asked.body.model)
            images, owner = asked.images, exchange.owner
            await self._documents.read(asked.documents, owner, held, images.size)
            await fetch_remote(self._fetcher, images, held.resize)
            rendered = to_count_request(asked.body)
            rendered.model = served.backend_name
            images.copy_into(rendered)
            name_of = partial(_param_of, asked.body)
            with client_field_names(name_of), served.connection.used() as backend:
                answer = await backend.render(rendered)
        return json_response(TokenCount(len(answer.ids)))


def _parse(encoded: bytes) -> _Asked:
    body, ignored = parse(_DECODER, encoded)
    images, documents = take_block_images(body.messages), take_block_documents(body.messages)
    return _Asked(body, ignored + ignored_tools(body), images, documents)


def _param_of(body: CountTokensBody, path: str) -> str:
    return message_param_of(path, body)
