"""Endpoints that count the tokens of a prompt: Anthropic's and OpenAI's."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Generic, TypeVar

import msgspec
from msgspec import Struct
from starlette.requests import Request
from starlette.responses import Response

from services.http_shim.backends.model_source import ModelSource
from services.http_shim.documents.request_documents import RequestDocument
from services.http_shim.endpoints.documents import Documents
from services.http_shim.endpoints.stored_responses import (
    LookUp,
    look_up,
    prepare_continued,
    read_continuing,
)
from services.http_shim.errors import client_field_names
from services.http_shim.formats.anthropic.blocks import take_block_documents, take_block_images
from services.http_shim.formats.anthropic.message_requests import (
    CountTokensBody,
    ignored_tools,
    message_param_of,
    to_count_request,
)
from services.http_shim.formats.field_paths import within_input
from services.http_shim.formats.openai_responses.items import (
    take_item_documents,
    take_item_images,
)
from services.http_shim.formats.openai_responses.response_requests import (
    PreparedResponse,
    ResponseBody,
    ignored_in_count,
    response_param_of,
    to_input_count_request,
)
from services.http_shim.formats.request_bodies import parse
from services.http_shim.http.access import authorized_model
from services.http_shim.http.body import BodyReader, json_response
from services.http_shim.http.exchange import Exchange, exchange_of
from services.http_shim.images.image_fetcher import ImageFetcher, fetch_remote
from services.http_shim.images.request_images import RequestImages
from services.http_shim.jobs.jobs import InnerJobs
from tokenwire.pb.tokenizer.v1 import tokenizer_pb2

__all__ = ["MESSAGE_TOKENS", "InputTokenCount", "TokenCount", "TokenCounting", "input_tokens"]

Body = TypeVar("Body", bound=CountTokensBody | PreparedResponse)


class TokenCount(Struct):
    """Answer of /v1/messages/count_tokens."""

    input_tokens: int


class InputTokenCount(Struct):
    """Answer of /v1/responses/input_tokens."""

    input_tokens: int
    object: str = "response.input_tokens"


@dataclass(frozen=True, slots=True)
class CountingApi(Generic[Body]):
    """The formats that one endpoint reads and writes."""

    decoder: msgspec.json.Decoder[Any]
    prepare: Callable[[Any, Exchange, bytes | None], Body]
    """Makes the body of what was decoded; raises ServiceError for what is not served"""
    take_images: Callable[[Body], RequestImages]
    """Removes the images from a body; raises INVALID_ARGUMENT for invalid ones"""
    take_documents: Callable[[Body], list[RequestDocument]]
    """Returns the documents of a body, which must be read before it is converted"""
    ignored: Callable[[Body], list[str]]
    """Returns the paths of parts that have no effect, besides unknown fields"""
    to_request: Callable[[Body], tokenizer_pb2.RenderChatRequest]
    """Converts a body; raises INVALID_ARGUMENT for what the proto can't express"""
    param_of: Callable[[str, Body], str]
    """Returns the client's name of a field of the request"""
    answer: Callable[[int], Struct]
    look_up: LookUp | None = None


MESSAGE_TOKENS: CountingApi[CountTokensBody] = CountingApi(
    msgspec.json.Decoder(CountTokensBody),
    lambda body, *_: body,
    lambda body: take_block_images(body.messages),
    lambda body: take_block_documents(body.messages),
    ignored_tools,
    to_count_request,
    message_param_of,
    TokenCount,
)


def input_tokens(jobs: InnerJobs) -> CountingApi[PreparedResponse]:
    """Return the formats of /v1/responses/input_tokens, whose input may continue a response."""
    return CountingApi(
        msgspec.json.Decoder(ResponseBody),
        prepare_continued,
        lambda body: take_item_images(body.items),
        lambda body: take_item_documents(body.items),
        ignored_in_count,
        to_input_count_request,
        response_param_of,
        InputTokenCount,
        partial(look_up, jobs),
    )


class TokenCounting(Generic[Body]):
    """An endpoint that counts."""

    def __init__(
        self,
        api: CountingApi[Body],
        models: ModelSource,
        bodies: BodyReader,
        fetcher: ImageFetcher | None,
        documents: Documents,
    ) -> None:
        self._api: CountingApi[Body] = api
        self._models = models
        self._bodies = bodies
        self._fetcher = fetcher
        self._documents = documents

    async def count(self, request: Request) -> Response:
        """Return the length of a prompt, in tokens."""
        exchange = exchange_of(request.scope)
        with self._bodies.held() as held:
            asked = await read_continuing(
                self._bodies,
                request.scope,
                request.receive,
                held,
                exchange,
                self._api.look_up,
                partial(self._parse, exchange),
            )
            exchange.ignored = asked.ignored
            served = await authorized_model(exchange, self._models, asked.body.model)
            images = asked.images
            await self._documents.read(asked.documents, exchange, held, images.size)
            await fetch_remote(self._fetcher, images, held.resize)
            rendered = self._api.to_request(asked.body)
            rendered.model = served.backend_name
            images.copy_into(rendered)
            name_of = partial(self._param_of, asked.body)
            with client_field_names(name_of), served.connection.used() as backend:
                answer = await backend.render(rendered)
        return json_response(self._api.answer(len(answer.ids)))

    def _parse(self, exchange: Exchange, encoded: bytes, continued: bytes | None) -> "_Asked[Body]":
        decoded, ignored = parse(self._api.decoder, encoded)
        body = self._api.prepare(decoded, exchange, continued)
        return _Asked(
            body,
            ignored + self._api.ignored(body),
            self._api.take_images(body),
            self._api.take_documents(body),
        )

    def _param_of(self, body: Body, path: str) -> str:
        return self._api.param_of(within_input(path), body)


@dataclass(frozen=True, slots=True)
class _Asked(Generic[Body]):
    """A parsed request. Its images are apart, in order of their empty places in it."""

    body: Body
    ignored: list[str]
    """Paths of fields that are ignored"""
    images: RequestImages
    documents: list[RequestDocument]
