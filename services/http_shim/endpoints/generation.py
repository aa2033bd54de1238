"""What the endpoints that generate do with a request."""

import asyncio
import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, Generic, TypeVar

import msgspec
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from services.http_shim.accounts.account import GenerationRequest
from services.http_shim.backends.model_source import ModelSource, ServedModel
from services.http_shim.backends.output_collector import OutputCollector
from services.http_shim.endpoints.event_stream import EventStream
from services.http_shim.endpoints.stream_sender import CREDIT, send_stream
from services.http_shim.errors import ClientGoneError
from services.http_shim.formats.completion_requests import schema_param
from services.http_shim.formats.prompt_logprobs import prompt_logprobs_of
from services.http_shim.formats.request_bodies import GenerationBody, parse
from services.http_shim.formats.responses import ChoiceFormatter, Delta, Envelope, usage_of
from services.http_shim.http.access import assign_model, reserved_tokens
from services.http_shim.http.body import BodyReader
from services.http_shim.http.exchange import Exchange, exchange_of
from services.http_shim.http.gate import Gate
from services.http_shim.http.scheduling import priority_of
from tokenwire.errors import ServiceError
from tokenwire.pb.completion.v1 import completion_pb2
from tokenwire.pb.types.v1 import types_pb2

__all__ = ["Generation", "watch_for_disconnect"]

_INLINE = 256 * 1024  # bytes of deltas; an answer of more is put together in a thread
Body = TypeVar("Body", bound=GenerationBody)


class Generation(ABC, Generic[Body, Delta]):
    """Such an endpoint, as an ASGI application: it watches for clients that leave."""

    _decoder: msgspec.json.Decoder[Body]

    def __init__(
        self, models: ModelSource, gate: Gate, bodies: BodyReader, stall_seconds: float
    ) -> None:
        self._models = models
        self._gate = gate
        self._bodies = bodies
        self._stall_seconds = stall_seconds

    @abstractmethod
    def _translate(self, body: Body) -> GenerationRequest:
        """Raises INVALID_ARGUMENT for what the proto can't say."""

    @abstractmethod
    def _param_of(self, path: str, body: Body) -> str:
        """The client's name for a field of the request."""

    @abstractmethod
    def _formatter_of(self, body: Body) -> ChoiceFormatter[Delta]:
        """How the client wants to see its choices."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        exchange = exchange_of(scope)
        body, exchange.ignored, request = await self._bodies.read(scope, receive, self._read)
        served = await assign_model(exchange, self._models, body.model, request)
        collector: OutputCollector[Delta] = OutputCollector()
        with (
            self._gate.entered(collector),
            reserved_tokens(exchange, request),
            served.connection.used() as backend,
            self._params_named(body),
        ):
            submission = backend.submit(
                request,
                collector,
                tenant=exchange.tenant,
                priority=priority_of(exchange, body.priority),
                credit=CREDIT if body.stream else None,
            )
            formatter = self._formatter_of(body)
            watch = asyncio.ensure_future(watch_for_disconnect(receive, collector))
            try:
                if body.stream:
                    accepted = await collector.admitted()
                    _note_ignored(accepted, body, exchange)
                    envelope = _envelope(accepted, served, formatter)
                    events = EventStream(
                        collector, formatter, body.stream_options, envelope, exchange
                    )
                    stall = self._stall_seconds
                    await send_stream(
                        scope, send, collector, submission, events, stall_seconds=stall
                    )
                else:
                    usage = await collector.completed()
                    _note_ignored(await collector.admitted(), body, exchange)
                    whole = partial(_whole, collector, usage, formatter, exchange, served)
                    held = sum(d.ByteSize() for ds in collector.pending.values() for d in ds)
                    runs = collector.prompt_logprobs.values()
                    held += sum(run.ByteSize() for prompt in runs for run in prompt)
                    response = whole() if held < _INLINE else await asyncio.to_thread(whole)
                    await response(scope, receive, send)
            finally:
                watch.cancel()
                if collector.is_open():
                    submission.cancel()
                if body.stream:
                    exchange.completion_tokens += _untaken_tokens(collector, formatter)
        if collector.gone:
            raise ClientGoneError

    def _read(self, encoded: bytes) -> tuple[Body, list[str], GenerationRequest]:
        body, ignored = parse(self._decoder, encoded)
        return body, ignored, self._translate(body)

    @contextmanager
    def _params_named(self, body: Body) -> Iterator[None]:
        """Gives the fields that the services blame the names that the client knows."""
        try:
            yield
        except ServiceError as error:
            if error.field:
                error.field = self._param_of(error.field, body)
            raise


def _whole(
    collector: OutputCollector[Delta],
    usage: types_pb2.Usage,
    formatter: ChoiceFormatter[Delta],
    exchange: Exchange,
    served: ServedModel,
) -> Response:
    accepted = collector.accepted
    assert accepted is not None
    exchange.prompt_tokens = usage.prompt_tokens
    exchange.completion_tokens = usage.completion_tokens
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
        _envelope(accepted, served, formatter).whole(choices, total, more),
        headers={"x-tokens-used": str(total.total_tokens)},
        media_type="application/json",
    )


def _note_ignored(
    accepted: completion_pb2.CompleteAccepted, body: GenerationBody, exchange: Exchange
) -> None:
    """For the answer's header, which is not sent yet."""
    exchange.ignored += [schema_param(path, body) for path in accepted.ignored]


def _envelope(
    accepted: completion_pb2.CompleteAccepted,
    served: ServedModel,
    formatter: ChoiceFormatter[Delta],
) -> Envelope:
    if served.id:
        accepted.model = served.id
    return Envelope(
        f"{formatter.id_prefix}-{uuid.uuid4().hex}", int(time.time()), accepted, formatter
    )


def _untaken_tokens(collector: OutputCollector[Delta], formatter: ChoiceFormatter[Delta]) -> int:
    """Generated, and of no use to a client that left before they were sent."""
    return sum(map(formatter.tokens_in, collector.pending.values()))


async def watch_for_disconnect(receive: Receive, *collector: OutputCollector[Any]) -> None:
    """Abandons what runs for a client when it leaves."""
    while (await receive())["type"] != "http.disconnect":
        pass
    for each in collector:
        each.abandon()
