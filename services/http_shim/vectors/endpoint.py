"""Endpoints of embeddings, rankings, scores, classes and pooled states."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Generic, TypeVar

from msgspec import Struct
from starlette.types import Receive, Scope, Send

from services.http_shim.backends.backend import Backend
from services.http_shim.backends.model_source import ModelSource
from services.http_shim.dialects.bodies import body_of
from services.http_shim.dialects.chat.read import read_template
from services.http_shim.dialects.chat.types import TemplateBody
from services.http_shim.dialects.fields import JsonObject, read_keep_alive
from services.http_shim.dialects.reading import render_request
from services.http_shim.endpoints.stream_sender import AsgiCall, client_left
from services.http_shim.errors import ClientGoneError, client_field_names
from services.http_shim.http.access import authorized_model, charging, reserve
from services.http_shim.http.body import BodyReader, json_response
from services.http_shim.http.exchange import Exchange, exchange_of
from services.http_shim.http.gate import Gate
from services.http_shim.http.scheduling import priority_of
from services.http_shim.vectors.embeddings import (
    EmbeddingBody,
    InputBody,
    PoolingBody,
    VectorBody,
    embedding_list,
    input_param_of,
    pooling_list,
    template_body,
    to_embed_request,
    to_pooling_request,
    unused_fields,
)
from services.http_shim.vectors.rankings import (
    ClassifyBody,
    RerankBody,
    ScoreBody,
    classification,
    rerank_param_of,
    reranking,
    score_list,
    score_param_of,
    to_classify_request,
    to_rerank_request,
    to_score_request,
)
from tokenwire.errors import ServiceError, invalid
from tokenwire.pb.completion.v1 import completion_pb2
from tokenwire.pb.types.v1 import types_pb2

__all__ = ["CLASSIFY", "EMBEDDINGS", "POOLING", "RERANK", "SCORE", "VectorApi", "VectorEndpoint"]

Asked = TypeVar("Asked", bound=VectorBody)
Request = TypeVar(
    "Request",
    completion_pb2.EmbedRequest,
    completion_pb2.ScoreRequest,
    completion_pb2.ClassifyRequest,
)
Outcome = TypeVar("Outcome")
Answer = TypeVar(
    "Answer",
    completion_pb2.EmbedResponse,
    completion_pb2.ScoreResponse,
    completion_pb2.ClassifyResponse,
)


@dataclass(frozen=True, slots=True)
class VectorApi(Generic[Asked, Request, Answer]):
    """Formats of one endpoint."""

    operation: str
    """Name in traces"""
    body: type[Asked]
    to_request: Callable[[Asked], Request]
    param_of: Callable[[str], str]
    """Returns the client's name of a field of the request"""
    ask: Callable[[Backend, Request, str, int, float | None], Awaitable[Answer]]
    """Asks a backend, for a tenant, with a priority and a timeout in seconds"""
    to_answer: Callable[[Asked, Answer, Exchange], Struct]
    """Makes the JSON of an answer; the exchange has the model's name"""


EMBEDDINGS = VectorApi(
    "embeddings",
    EmbeddingBody,
    to_embed_request,
    input_param_of,
    Backend.embed,
    lambda body, answer, exchange: embedding_list(body, answer, exchange.model),
)
RERANK = VectorApi(
    "rerank",
    RerankBody,
    to_rerank_request,
    rerank_param_of,
    Backend.score,
    lambda body, answer, made: reranking(body, answer, made.model, made.request_id),
)
SCORE = VectorApi(
    "score",
    ScoreBody,
    to_score_request,
    score_param_of,
    Backend.score,
    lambda _, answer, made: score_list(answer, made.model, made.request_id),
)
CLASSIFY = VectorApi(
    "classify",
    ClassifyBody,
    to_classify_request,
    input_param_of,
    Backend.classify,
    lambda _, answer, made: classification(answer, made.model, made.request_id),
)
POOLING = VectorApi(
    "pooling",
    PoolingBody,
    to_pooling_request,
    input_param_of,
    Backend.embed,
    lambda body, answer, made: pooling_list(body, answer, made.model, made.request_id),
)


class VectorEndpoint(Generic[Asked, Request, Answer]):
    """An endpoint as an ASGI application, which can watch for a client that leaves."""

    def __init__(
        self,
        api: VectorApi[Asked, Request, Answer],
        models: ModelSource,
        gate: Gate,
        bodies: BodyReader,
    ) -> None:
        self._api: VectorApi[Asked, Request, Answer] = api
        self._models = models
        self._gate = gate
        self._bodies = bodies

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        exchange = exchange_of(scope)
        body, request, exchange.ignored = await self._bodies.read(scope, receive, self._parse)
        await self._answer(body, request, AsgiCall(scope, receive, send))

    async def _answer(self, body: Asked, request: Request, call: AsgiCall) -> None:
        """Answer a body that was read."""
        exchange, api, receive = exchange_of(call.scope), self._api, call.receive
        served = await authorized_model(exchange, self._models, body.model)
        request.model = served.backend_name
        exchange.span.set({"gen_ai.operation.name": api.operation})
        priority = priority_of(exchange, body.priority)
        keep_alive = read_keep_alive(body.keep_alive)
        if keep_alive is not None and not served.connection.on_demand:
            exchange.ignored.append("keep_alive")
        left = _SecondsLeft(body.timeout)
        template = template_body(body) if isinstance(body, InputBody) else None
        if template is not None and not isinstance(request, completion_pb2.ScoreRequest):
            waiting = _Call()
            with self._gate.admit(waiting), served.connection.lease(keep_alive) as backend:
                rendering = _rendered(template, served.backend_name, backend, left())
                ids = await waiting.result_of(rendering, receive)
            request.inputs.append(completion_pb2.Prompt(token_ids=types_pb2.TokenIds(ids=ids)))
        waiting = _Call()
        with (
            charging(exchange, await reserve(exchange, request)),
            self._gate.admit(waiting),
            served.connection.lease(keep_alive) as backend,
            client_field_names(api.param_of),
        ):
            asking = api.ask(backend, request, exchange.tenant, priority, left())
            answer = await waiting.result_of(asking, receive)
            exchange.model = served.id or answer.model
            exchange.prompt_tokens = answer.usage.prompt_tokens
        made = partial(api.to_answer, body, answer, exchange)
        # numbers of a large answer take long to write
        response = await asyncio.to_thread(lambda: json_response(made()))
        response.headers["x-tokens-used"] = str(exchange.tokens_used)
        await response(call.scope, receive, call.send)

    def _parse(self, fields: JsonObject) -> tuple[Asked, Request, list[str]]:
        body, ignored = body_of(self._api.body, fields)
        if isinstance(body, InputBody):
            ignored.extend(unused_fields(body))
        return body, self._api.to_request(body), ignored


class _SecondsLeft:
    """Seconds until the end of a request's timeout, which begins now."""

    def __init__(self, timeout: float | None) -> None:
        self._loop = asyncio.get_running_loop()
        self._deadline = None if timeout is None else self._loop.time() + timeout

    def __call__(self) -> float | None:
        """Return the seconds that are left; None = the request has no timeout."""
        return None if self._deadline is None else max(0.0, self._deadline - self._loop.time())


async def _rendered(
    template: TemplateBody, model: str, backend: Backend, timeout: float | None
) -> Sequence[int]:
    """Return the ids of a conversation's prompt. timeout: in seconds; None = none."""
    reading = read_template(template, [])
    if reading.images or reading.documents:
        raise invalid("messages", "Images and files of messages are not supported here.")
    with client_field_names(reading.field):
        return (await backend.render(render_request(reading, model), timeout)).ids


class _Call:
    """A call of a backend that ends when its client leaves, or the server stops."""

    def __init__(self) -> None:
        self._failed: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def on_error(self, error: ServiceError) -> None:
        """End the call with an error."""
        if not self._failed.done():
            self._failed.set_exception(error)

    async def result_of(self, asking: Awaitable[Outcome], receive: Receive) -> Outcome:
        """Return the answer. Raises ServiceError and ClientGoneError."""
        answering = asyncio.ensure_future(asking)
        leaving = asyncio.ensure_future(client_left(receive))
        ends = (answering, leaving, self._failed)
        try:
            await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
            if answering.done():
                return answering.result()
            if self._failed.done():
                self._failed.result()
            raise ClientGoneError
        finally:
            for each in ends:
                each.cancel()
