"""Endpoints that generate: POST /v1/completions, /v1/chat/completions, …"""

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Generic, TypeVar

import msgspec
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from services.http_shim.backends.model_source import ModelSource, ServedModel
from services.http_shim.backends.output_collector import OutputCollector
from services.http_shim.backends.submission import Submission
from services.http_shim.documents.request_documents import RequestDocument
from services.http_shim.endpoints.answer_format import (
    AnswerFormat,
    BackgroundFormat,
    ChoicesFormat,
    MessageFormat,
    ResponseFormat,
)
from services.http_shim.endpoints.background_responses import BackgroundResponses
from services.http_shim.endpoints.documents import Documents
from services.http_shim.endpoints.stored_responses import (
    LookUp,
    look_up,
    prepare_continued,
    read_continuing,
)
from services.http_shim.endpoints.stream_sender import CREDIT, client_left, send_stream
from services.http_shim.errors import ClientGoneError, client_field_names
from services.http_shim.formats.anthropic.blocks import take_block_documents, take_block_images
from services.http_shim.formats.anthropic.message_requests import (
    MessagesBody,
    ignored_in_message,
    message_param_of,
    message_schema_param,
    to_message_request,
)
from services.http_shim.formats.chat_messages import take_message_documents, take_message_images
from services.http_shim.formats.chat_requests import chat_param_of, to_chat_request
from services.http_shim.formats.chat_responses import ChatFormatter
from services.http_shim.formats.completion_requests import (
    param_of,
    schema_param,
    take_images,
    to_complete_request,
)
from services.http_shim.formats.completion_responses import CompletionFormatter
from services.http_shim.formats.field_paths import within_input
from services.http_shim.formats.openai_responses.items import (
    take_item_documents,
    take_item_images,
)
from services.http_shim.formats.openai_responses.response_requests import (
    PreparedResponse,
    ResponseBody,
    ignored_parts,
    response_param_of,
    response_schema_param,
    to_response_request,
)
from services.http_shim.formats.request_bodies import (
    ChatBody,
    CompletionBody,
    GenerationBody,
    parse,
)
from services.http_shim.formats.tools import unenforced_formats
from services.http_shim.http.access import assign_model, charged, reserve
from services.http_shim.http.body import BodyReader, HeldBytes
from services.http_shim.http.exchange import Exchange, exchange_of
from services.http_shim.http.gate import Gate
from services.http_shim.http.scheduling import priority_of
from services.http_shim.images.image_fetcher import ImageFetcher, fetch_remote
from services.http_shim.images.request_images import RequestImages
from services.http_shim.jobs.jobs import InnerJobs, context_of
from tokenwire.pb.completion.v1 import completion_pb2
from tokenwire.pb.types.v1 import types_pb2

__all__ = [
    "CHAT",
    "COMPLETIONS",
    "MESSAGES",
    "GenerationApi",
    "GenerationEndpoint",
    "responses_api",
    "watch_for_disconnect",
]

_INLINE = 256 * 1024  # bytes; a larger body or answer is read or put together in a thread
Body = TypeVar("Body", bound=GenerationBody | MessagesBody | PreparedResponse)


@dataclass(frozen=True, slots=True)
class GenerationApi(Generic[Body]):
    """The formats that one endpoint reads and writes."""

    decoder: msgspec.json.Decoder[Any]
    take_images: Callable[[Body], RequestImages]
    """Removes the images from a body; raises INVALID_ARGUMENT for invalid ones"""
    to_request: Callable[[Body], completion_pb2.GenerateRequest]
    """Converts a body; raises INVALID_ARGUMENT for what the proto can't express"""
    param_of: Callable[[str, Body], str]
    """Returns the client's name of a field of the request"""
    format_of: Callable[[Body, Exchange], AnswerFormat]
    schema_param: Callable[[str, Body], str]
    """Returns the client's name of a path into a schema"""
    ignored: Callable[[Body], list[str]] = lambda _: []
    """Returns the paths of parts that have no effect, besides unknown fields"""
    take_documents: Callable[[Body], list[RequestDocument]] = lambda _: []
    """Returns the documents of a body, which must be read before it is converted"""
    look_up: LookUp | None = None
    prepare: Callable[[Any, Exchange, bytes | None], Body] = lambda body, *_: body
    """Makes the body of what was decoded; raises ServiceError for what is not served"""
    is_background: Callable[[Body], bool] = lambda _: False


COMPLETIONS: GenerationApi[CompletionBody] = GenerationApi(
    msgspec.json.Decoder(CompletionBody),
    take_images,
    to_complete_request,
    param_of,
    lambda body, _: ChoicesFormat(CompletionFormatter.of(body), body.stream_options),
    schema_param,
    lambda body: unenforced_formats(body.tools),
)
CHAT: GenerationApi[ChatBody] = GenerationApi(
    msgspec.json.Decoder(ChatBody),
    lambda body: take_message_images(body.messages),
    to_chat_request,
    chat_param_of,
    lambda body, _: ChoicesFormat(ChatFormatter.of(body), body.stream_options),
    schema_param,
    lambda body: unenforced_formats(body.tools),
    lambda body: take_message_documents(body.messages),
)
MESSAGES: GenerationApi[MessagesBody] = GenerationApi(
    msgspec.json.Decoder(MessagesBody),
    lambda body: take_block_images(body.messages),
    to_message_request,
    message_param_of,
    lambda *_: MessageFormat(),
    message_schema_param,
    ignored_in_message,
    lambda body: take_block_documents(body.messages),
)


def responses_api(jobs: InnerJobs) -> GenerationApi[PreparedResponse]:
    """Return the formats of /v1/responses, whose responses `jobs` keeps."""

    def format_of(body: PreparedResponse, exchange: Exchange) -> AnswerFormat:
        make = BackgroundFormat if body.body.background else ResponseFormat
        return make(body, jobs, context_of(exchange))

    return GenerationApi(
        msgspec.json.Decoder(ResponseBody),
        lambda body: take_item_images(body.items),
        to_response_request,
        response_param_of,
        format_of,
        response_schema_param,
        ignored_parts,
        lambda body: take_item_documents(body.items),
        partial(look_up, jobs),
        prepare_continued,
        lambda body: bool(body.body.background),
    )


class GenerationEndpoint(Generic[Body]):
    """An endpoint as an ASGI application, which can watch for a client that leaves."""

    def __init__(
        self,
        api: GenerationApi[Body],
        models: ModelSource,
        gate: Gate,
        bodies: BodyReader,
        fetcher: ImageFetcher | None,
        documents: Documents,
        stall_seconds: float,
        background: BackgroundResponses | None = None,
    ) -> None:
        """background: starts responses in the background; None = they are answered as streams."""
        self._api: GenerationApi[Body] = api
        self._models = models
        self._gate = gate
        self._bodies = bodies
        self._fetcher = fetcher
        self._documents = documents
        self._stall_seconds = stall_seconds
        self._background = background

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        exchange = exchange_of(scope)
        with self._bodies.held() as held:
            asked = await self._read(scope, receive, exchange, held)
            body, exchange.ignored = asked.body, asked.ignored
            if self._background is not None and asked.background is not None:
                stream, started = bool(body.stream), self._background
                await started.answer(scope, receive, send, asked.background, stream=stream)
                return
            request = await self._request(exchange, asked, held)
            model = await assign_model(exchange, self._models, body.model, request)
            collector = OutputCollector()
            name_of = partial(self._param_of, body)
            with (
                charged(exchange, await reserve(exchange, request)),
                self._gate.entered(collector),
                model.connection.used() as backend,
                client_field_names(name_of),
            ):
                await fetch_remote(self._fetcher, asked.images, held.resize)
                format_ = self._api.format_of(body, exchange)
                streams = bool(body.stream) or isinstance(format_, BackgroundFormat)
                submission = backend.submit(
                    request,
                    collector,
                    tenant=exchange.tenant,
                    priority=priority_of(exchange, body.priority),
                    timeout=body.timeout,
                    credit=CREDIT if streams else None,
                    images=asked.images,
                    on_admitted=held.release,
                )
                locate = partial(self._schema_param, body)
                answer = _Answer(exchange, model, collector, format_, locate)
                try:
                    with _watched(receive, format_.left(collector, submission)):
                        if streams:
                            stall = self._stall_seconds
                            await answer.stream(scope, send, submission, name_of, stall)
                        else:
                            response = await answer.whole()
                            await response(scope, receive, send)
                finally:
                    if collector.gone and not streams:
                        answer.count_tokens(await submission.cancelled_usage())
                    elif collector.is_open():
                        submission.cancel()
                    if streams:
                        answer.count_unsent_tokens()
        if collector.gone:
            raise ClientGoneError

    async def _read(
        self, scope: Scope, receive: Receive, exchange: Exchange, held: HeldBytes
    ) -> "_Asked[Body]":
        """Read and parse the body."""
        parse_body = partial(self._parse, exchange)
        return await read_continuing(
            self._bodies, scope, receive, held, exchange, self._api.look_up, parse_body
        )

    async def _request(
        self, exchange: Exchange, asked: "_Asked[Body]", held: HeldBytes
    ) -> completion_pb2.GenerateRequest:
        """Return the request, whose documents are read before."""
        if asked.request is not None:
            return asked.request
        await self._documents.read(asked.documents, exchange, held, asked.images.size)
        return await asyncio.to_thread(self._api.to_request, asked.body)

    def _param_of(self, body: Body, path: str) -> str:
        return self._api.param_of(within_input(path), body)

    def _schema_param(self, body: Body, path: str) -> str:
        return self._api.schema_param(within_input(path), body)

    def _parse(self, exchange: Exchange, encoded: bytes, continued: bytes | None) -> "_Asked[Body]":
        decoded, ignored = parse(self._api.decoder, encoded)
        body = self._api.prepare(decoded, exchange, continued)
        ignored += self._api.ignored(body)
        images = self._api.take_images(body)
        documents = self._api.take_documents(body)
        request = None if documents else self._api.to_request(body)
        background = encoded if self._api.is_background(body) else None
        return _Asked(body, ignored, request, images, documents, background)


@dataclass(frozen=True, slots=True)
class _Asked(Generic[Body]):
    """A parsed request. Its images are apart, in order of their empty places in it."""

    body: Body
    ignored: list[str]
    """Paths of fields that are ignored"""
    request: completion_pb2.GenerateRequest | None
    """None while its documents are not read"""
    images: RequestImages
    documents: list[RequestDocument]
    background: bytes | None
    """The encoded body of a response in the background; None for all others"""


@dataclass(frozen=True, slots=True)
class _Answer:
    """The answer to one request, made of the output that its collector gathers."""

    exchange: Exchange
    model: ServedModel
    collector: OutputCollector
    format: AnswerFormat
    schema_param: Callable[[str], str]

    async def stream(
        self,
        scope: Scope,
        send: Send,
        submission: Submission,
        name_of: Callable[[str], str],
        stall_seconds: float,
    ) -> None:
        """Send the answer as server-sent events; `name_of` gives the client's name of a field."""
        accepted = await self._admitted()
        events = self.format.events(self.collector, accepted, self.exchange, name_of)
        await self.format.begin(events)
        await send_stream(
            scope, send, self.collector, submission, events, stall_seconds=stall_seconds
        )

    async def whole(self) -> Response:
        """Wait for the end of the request, and return the answer as one JSON object."""
        accepted = await self._admitted()
        usage = await self.collector.completed()
        self.count_tokens(usage)
        is_large = self._output_bytes() >= _INLINE
        encoded = await self.format.answer(self.collector, accepted, usage, is_large=is_large)
        used = usage.prompt_tokens + usage.completion_tokens
        return Response(
            encoded, headers={"x-tokens-used": str(used)}, media_type="application/json"
        )

    def count_tokens(self, usage: types_pb2.Usage | None) -> None:
        """Count the tokens of a request that ended, also one that its client left."""
        if usage is not None:
            self.exchange.prompt_tokens = usage.prompt_tokens
            self.exchange.completion_tokens = usage.completion_tokens

    def count_unsent_tokens(self) -> None:
        """Count the tokens that were generated but not sent before the client left."""
        pending = self.collector.pending.values()
        self.exchange.completion_tokens += sum(map(self.format.tokens_in, pending))

    async def _admitted(self) -> completion_pb2.Accepted:
        """Wait for the admission; note the model, and for the header the ignored parts."""
        accepted = await self.collector.admitted()
        self.exchange.ignored += [self.schema_param(path) for path in accepted.ignored]
        if self.model.id:
            accepted.model = self.model.id
        self.exchange.model = accepted.model
        return accepted

    def _output_bytes(self) -> int:
        deltas = (delta for choice in self.collector.pending.values() for delta in choice)
        runs = (run for prompt in self.collector.prompt_logprobs.values() for run in prompt)
        return sum(delta.ByteSize() for delta in deltas) + sum(run.ByteSize() for run in runs)


@contextmanager
def _watched(receive: Receive, on_left: Callable[[], None]) -> Iterator[None]:
    """Call `on_left` when the client leaves."""
    watch = asyncio.ensure_future(_watch(receive, on_left))
    try:
        yield
    finally:
        watch.cancel()


async def _watch(receive: Receive, on_left: Callable[[], None]) -> None:
    await client_left(receive)
    on_left()


async def watch_for_disconnect(receive: Receive, *collectors: OutputCollector) -> None:
    """Abandon the requests of a client when it leaves."""
    await client_left(receive)
    for collector in collectors:
        collector.abandon()
