"""Endpoints that generate: POST /v1/completions and POST /v1/chat/completions."""

import asyncio
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Generic, TypeVar

import msgspec
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from services.common.accounts.account import GenerationRequest
from services.http_shim.backends.model_source import ModelSource, ServedModel
from services.http_shim.backends.output_collector import OutputCollector
from services.http_shim.backends.submission import Submission
from services.http_shim.endpoints.event_stream import EventStream
from services.http_shim.endpoints.stream_sender import CREDIT, send_stream
from services.http_shim.errors import ClientGoneError, client_field_names
from services.http_shim.formats.chat_messages import take_message_images
from services.http_shim.formats.chat_requests import chat_param_of, to_chat_request
from services.http_shim.formats.chat_responses import ChatFormatter
from services.http_shim.formats.completion_requests import (
    param_of,
    schema_param,
    take_images,
    to_complete_request,
)
from services.http_shim.formats.completion_responses import CompletionFormatter
from services.http_shim.formats.request_bodies import (
    ChatBody,
    CompletionBody,
    GenerationBody,
    parse,
)
from services.http_shim.formats.responses import (
    ChoiceFormatter,
    Delta,
    Envelope,
    prompt_logprobs_of,
    usage_of,
)
from services.http_shim.http.access import assign_model, charged, reserve
from services.http_shim.http.body import BodyReader
from services.http_shim.http.exchange import Exchange, exchange_of
from services.http_shim.http.gate import Gate
from services.http_shim.http.scheduling import priority_of
from services.http_shim.images.image_fetcher import ImageFetcher, fetch_remote
from services.http_shim.images.request_images import RequestImages
from tokenwire.pb.completion.v1 import completion_pb2
from tokenwire.pb.types.v1 import types_pb2

__all__ = ["CHAT", "COMPLETIONS", "GenerationEndpoint", "watch_for_disconnect"]

_INLINE = 256 * 1024  # bytes of output; a larger answer is put together in a thread
Body = TypeVar("Body", bound=GenerationBody)


@dataclass(frozen=True, slots=True)
class GenerationApi(Generic[Body, Delta]):
    """The formats that one endpoint reads and writes."""

    decoder: msgspec.json.Decoder[Body]
    take_images: Callable[[Body], RequestImages]
    """Removes the images from a body; raises INVALID_ARGUMENT for invalid ones"""
    to_request: Callable[[Body], GenerationRequest]
    """Converts a body; raises INVALID_ARGUMENT for what the proto can't express"""
    param_of: Callable[[str, Body], str]
    """Returns the client's name of a field of the request"""
    formatter_of: Callable[[Body], ChoiceFormatter[Delta]]


COMPLETIONS: GenerationApi[CompletionBody, completion_pb2.ChoiceDelta] = GenerationApi(
    msgspec.json.Decoder(CompletionBody),
    take_images,
    to_complete_request,
    param_of,
    CompletionFormatter.of,
)
CHAT: GenerationApi[ChatBody, completion_pb2.ChatDelta] = GenerationApi(
    msgspec.json.Decoder(ChatBody),
    lambda body: take_message_images(body.messages),
    to_chat_request,
    chat_param_of,
    ChatFormatter.of,
)


class GenerationEndpoint(Generic[Body, Delta]):
    """An endpoint as an ASGI application, which can watch for a client that leaves."""

    def __init__(
        self,
        api: GenerationApi[Body, Delta],
        models: ModelSource,
        gate: Gate,
        bodies: BodyReader,
        fetcher: ImageFetcher | None,
        stall_seconds: float,
    ) -> None:
        self._api: GenerationApi[Body, Delta] = api
        self._models = models
        self._gate = gate
        self._bodies = bodies
        self._fetcher = fetcher
        self._stall_seconds = stall_seconds

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        exchange = exchange_of(scope)
        with self._bodies.held() as held:
            asked = await self._bodies.read_with_images(scope, receive, self._parse, held)
            body, request, exchange.ignored = asked.body, asked.request, asked.ignored
            model = await assign_model(exchange, self._models, body.model, request)
            collector: OutputCollector[Delta] = OutputCollector()
            name_of = partial(self._param_of, body)
            with (
                charged(exchange, await reserve(exchange, request)),
                self._gate.entered(collector),
                model.connection.used() as backend,
                client_field_names(name_of),
            ):
                await fetch_remote(self._fetcher, asked.images, held.resize)
                submission = backend.submit(
                    request,
                    collector,
                    tenant=exchange.tenant,
                    priority=priority_of(exchange, body.priority),
                    credit=CREDIT if body.stream else None,
                    images=asked.images,
                    on_admitted=held.release,
                )
                answer = _Answer(body, exchange, model, collector, self._api.formatter_of(body))
                watch = asyncio.ensure_future(watch_for_disconnect(receive, collector))
                try:
                    if body.stream:
                        await answer.stream(scope, send, submission, name_of, self._stall_seconds)
                    else:
                        response = await answer.whole()
                        await response(scope, receive, send)
                finally:
                    watch.cancel()
                    if collector.is_open():
                        submission.cancel()
                    if body.stream:
                        answer.count_unsent_tokens()
        if collector.gone:
            raise ClientGoneError

    def _param_of(self, body: Body, path: str) -> str:
        return self._api.param_of(path, body)

    def _parse(self, encoded: bytes) -> "_Asked[Body]":
        body, ignored = parse(self._api.decoder, encoded)
        images = self._api.take_images(body)
        return _Asked(body, ignored, self._api.to_request(body), images)


@dataclass(frozen=True, slots=True)
class _Asked(Generic[Body]):
    """A parsed request. Its images are apart, in order of their empty places in it."""

    body: Body
    ignored: list[str]
    """Paths of fields that are ignored"""
    request: GenerationRequest
    images: RequestImages


@dataclass(frozen=True, slots=True)
class _Answer(Generic[Delta]):
    """The answer to one request, made of the output that its collector gathers."""

    body: GenerationBody
    exchange: Exchange
    model: ServedModel
    collector: OutputCollector[Delta]
    formatter: ChoiceFormatter[Delta]

    async def stream(
        self,
        scope: Scope,
        send: Send,
        submission: Submission,
        name_of: Callable[[str], str],
        stall_seconds: float,
    ) -> None:
        """Send the answer as server-sent events; `name_of` gives the client's name of a field."""
        envelope = self._envelope(await self._admitted())
        events = EventStream(
            self.collector,
            self.formatter,
            self.body.stream_options,
            envelope,
            self.exchange,
            name_of,
        )
        await send_stream(
            scope, send, self.collector, submission, events, stall_seconds=stall_seconds
        )

    async def whole(self) -> Response:
        """Wait for the end of the request, and return the answer as one JSON object."""
        usage = await self.collector.completed()
        accepted = await self._admitted()
        if self._output_bytes() < _INLINE:
            return self._response(accepted, usage)
        return await asyncio.to_thread(self._response, accepted, usage)

    def count_unsent_tokens(self) -> None:
        """Count the tokens that were generated but not sent before the client left."""
        pending = self.collector.pending.values()
        self.exchange.completion_tokens += sum(map(self.formatter.tokens_in, pending))

    async def _admitted(self) -> completion_pb2.CompleteAccepted:
        """Wait for the admission; note the model, and for the header the ignored parts."""
        accepted = await self.collector.admitted()
        self.exchange.ignored += [schema_param(path, self.body) for path in accepted.ignored]
        if self.model.id:
            accepted.model = self.model.id
        self.exchange.model = accepted.model
        return accepted

    def _envelope(self, accepted: completion_pb2.CompleteAccepted) -> Envelope:
        identity = f"{self.formatter.id_prefix}-{uuid.uuid4().hex}"
        return Envelope(identity, int(time.time()), accepted, self.formatter)

    def _output_bytes(self) -> int:
        deltas = (delta for choice in self.collector.pending.values() for delta in choice)
        runs = (run for prompt in self.collector.prompt_logprobs.values() for run in prompt)
        return sum(delta.ByteSize() for delta in deltas) + sum(run.ByteSize() for run in runs)

    def _response(
        self, accepted: completion_pb2.CompleteAccepted, usage: types_pb2.Usage
    ) -> Response:
        collector, formatter = self.collector, self.formatter
        self.exchange.prompt_tokens = usage.prompt_tokens
        self.exchange.completion_tokens = usage.completion_tokens
        choices = [
            formatter.choice(
                index,
                collector.pending.get(index, []),
                collector.finished[index],
                accepted.prompts[index // formatter.choices_per_prompt],
            )
            for index in sorted(collector.finished)
        ]
        total, more = usage_of(usage), None
        if formatter.prompt_logprobs:
            runs = collector.prompt_logprobs
            prompts = [prompt_logprobs_of(runs.get(i, ())) for i in range(len(accepted.prompts))]
            more = formatter.add_prompt_logprobs(choices, prompts)
        return Response(
            self._envelope(accepted).whole(choices, total, more),
            headers={"x-tokens-used": str(total.total_tokens)},
            media_type="application/json",
        )


async def watch_for_disconnect(receive: Receive, *collectors: OutputCollector[Any]) -> None:
    """Abandon the requests of a client when it leaves."""
    while (await receive())["type"] != "http.disconnect":
        pass
    for collector in collectors:
        collector.abandon()
