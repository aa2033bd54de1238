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
from services.http_shim.backends.running import Running
from services.http_shim.backends.served import ModelSource, ServedModel
from services.http_shim.endpoints.events import EventStream
from services.http_shim.endpoints.stream import CREDIT, send_stream
from services.http_shim.errors import ClientGoneError
from services.http_shim.formats.prompt_logprobs import prompt_logprobs_of
from services.http_shim.formats.requests import GenerationBody, parse
from services.http_shim.formats.responses import Delta, Envelope, Shape, usage_of
from services.http_shim.formats.translate import schema_param
from services.http_shim.http.access import charged, direct
from services.http_shim.http.body import BodyReader
from services.http_shim.http.exchange import Exchange, exchange_of
from services.http_shim.http.gate import Gate
from services.http_shim.http.scheduling import priority_of
from tokenwire.errors import ServiceError
from tokenwire.pb.completion.v1 import completion_pb2
from tokenwire.pb.types.v1 import types_pb2

__all__ = ["Generation", "watch_for_leaving"]

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
    def _shape_of(self, body: Body) -> Shape[Delta]:
        """How the client wants to see its choices."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        exchange = exchange_of(scope)
        body, exchange.ignored, request = await self._bodies.read(scope, receive, self._read)
        served = await direct(exchange, self._models, body.model, request)
        running: Running[Delta] = Running()
        with (
            self._gate.entered(running),
            charged(exchange, request),
            served.connection.used() as backend,
            self._params_named(body),
        ):
            submission = backend.submit(
                request,
                running,
                tenant=exchange.tenant,
                priority=priority_of(exchange, body.priority),
                credit=CREDIT if body.stream else None,
            )
            shape = self._shape_of(body)
            watch = asyncio.ensure_future(watch_for_leaving(receive, running))
            try:
                if body.stream:
                    accepted = await running.admitted()
                    _note_ignored(accepted, body, exchange)
                    envelope = _envelope(accepted, served, shape)
                    events = EventStream(running, shape, body.stream_options, envelope, exchange)
                    stall = self._stall_seconds
                    await send_stream(scope, send, running, submission, events, stall_seconds=stall)
                else:
                    usage = await running.completed()
                    _note_ignored(await running.admitted(), body, exchange)
                    whole = partial(_whole, running, usage, shape, exchange, served)
                    held = sum(d.ByteSize() for ds in running.pending.values() for d in ds)
                    runs = running.prompt_logprobs.values()
                    held += sum(run.ByteSize() for prompt in runs for run in prompt)
                    response = whole() if held < _INLINE else await asyncio.to_thread(whole)
                    await response(scope, receive, send)
            finally:
                watch.cancel()
                if running.is_open():
                    submission.cancel()
                if body.stream:
                    exchange.completion_tokens += _untaken_tokens(running, shape)
        if running.gone:
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
    running: Running[Delta],
    usage: types_pb2.Usage,
    shape: Shape[Delta],
    exchange: Exchange,
    served: ServedModel,
) -> Response:
    accepted = running.accepted
    assert accepted is not None
    exchange.prompt_tokens = usage.prompt_tokens
    exchange.completion_tokens = usage.completion_tokens
    choices = [
        shape.choice(
            index,
            running.pending.get(index, []),
            running.finished[index],
            accepted.prompts[index // shape.choices_per_prompt],
        )
        for index in sorted(running.finished)
    ]
    total, more = usage_of(usage), None
    if shape.prompt_logprobs:
        runs = running.prompt_logprobs
        prompts = [prompt_logprobs_of(runs.get(i, ())) for i in range(len(accepted.prompts))]
        more = shape.add_prompt_logprobs(choices, prompts)
    return Response(
        _envelope(accepted, served, shape).whole(choices, total, more),
        headers={"x-tokens-used": str(total.total_tokens)},
        media_type="application/json",
    )


def _note_ignored(
    accepted: completion_pb2.CompleteAccepted, body: GenerationBody, exchange: Exchange
) -> None:
    """For the answer's header, which is not sent yet."""
    exchange.ignored += [schema_param(path, body) for path in accepted.ignored]


def _envelope(
    accepted: completion_pb2.CompleteAccepted, served: ServedModel, shape: Shape[Delta]
) -> Envelope:
    if served.id:
        accepted.model = served.id
    return Envelope(f"{shape.id_prefix}-{uuid.uuid4().hex}", int(time.time()), accepted, shape)


def _untaken_tokens(running: Running[Delta], shape: Shape[Delta]) -> int:
    """Generated, and of no use to a client that left before they were sent."""
    return sum(map(shape.tokens_in, running.pending.values()))


async def watch_for_leaving(receive: Receive, *running: Running[Any]) -> None:
    """Abandons what runs for a client when it leaves."""
    while (await receive())["type"] != "http.disconnect":
        pass
    for each in running:
        each.abandon()
