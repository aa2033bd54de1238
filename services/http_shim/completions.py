"""POST /v1/completions."""

import asyncio
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager

import msgspec
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from services.http_shim.access import charged, direct
from services.http_shim.body import read_json_body
from services.http_shim.errors import ClientGoneError
from services.http_shim.events import EventStream
from services.http_shim.exchange import Exchange, exchange_of
from services.http_shim.gate import Gate
from services.http_shim.requests import CompletionBody, parse
from services.http_shim.responses import Envelope, choice_of, shape_of, usage_of
from services.http_shim.running import Running
from services.http_shim.served import ModelSource, ServedModel
from services.http_shim.stream import CREDIT, send_stream
from services.http_shim.translate import param_of, to_complete_request
from tokenwire.completion.v1 import completion_pb2
from tokenwire.errors import ServiceError
from tokenwire.types.v1 import types_pb2

__all__ = ["Completions", "watch_for_leaving"]

_DECODER = msgspec.json.Decoder(CompletionBody)


class Completions:
    """The endpoint, as an ASGI application: it watches for clients that leave."""

    def __init__(self, models: ModelSource, gate: Gate, max_body_bytes: int) -> None:
        self._models = models
        self._gate = gate
        self._max_body_bytes = max_body_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        exchange = exchange_of(scope)
        encoded = await read_json_body(scope, receive, self._max_body_bytes)
        body, exchange.ignored = parse(_DECODER, encoded)
        request = to_complete_request(body)
        served = direct(exchange, self._models, body.model, request)
        with (
            self._gate.entered(),
            charged(exchange, request),
            served.connection.used() as backend,
            _params_named(body),
        ):
            running = Running()
            submission = backend.submit(
                request,
                running,
                traceparent=exchange.traceparent,
                credit=CREDIT if body.stream else None,
            )
            watch = asyncio.ensure_future(watch_for_leaving(receive, running))
            try:
                if body.stream:
                    envelope = _envelope(await running.admitted(), served)
                    events = EventStream(running, body, len(request.prompts), envelope, exchange)
                    await send_stream(send, running, submission, events)
                else:
                    usage = await running.completed()
                    response = _whole(running, usage, body, exchange, served)
                    await response(scope, receive, send)
            finally:
                watch.cancel()
                if running.is_open():
                    submission.cancel()
                if body.stream:
                    exchange.completion_tokens += _untaken_tokens(running)
        if running.gone:
            raise ClientGoneError


def _whole(
    running: Running,
    usage: types_pb2.Usage,
    body: CompletionBody,
    exchange: Exchange,
    served: ServedModel,
) -> Response:
    accepted = running.accepted
    assert accepted is not None
    exchange.prompt_tokens = usage.prompt_tokens
    exchange.completion_tokens = usage.completion_tokens
    shape = shape_of(body)
    choices = [
        choice_of(
            index,
            running.pending.get(index, []),
            running.finished[index],
            shape,
            accepted.prompts[index // shape.choices_per_prompt] if shape.token_ids else None,
        )
        for index in sorted(running.finished)
    ]
    total = usage_of(usage)
    return Response(
        _envelope(accepted, served).whole(choices, total),
        headers={"x-tokens-used": str(total.total_tokens)},
        media_type="application/json",
    )


def _envelope(accepted: completion_pb2.CompleteAccepted, served: ServedModel) -> Envelope:
    if served.id:
        accepted.model = served.id
    return Envelope(f"cmpl-{uuid.uuid4().hex}", int(time.time()), accepted)


def _untaken_tokens(running: Running) -> int:
    """Generated, and of no use to a client that left before they were sent."""
    deltas = [delta for pending in running.pending.values() for delta in pending]
    return sum(len(delta.tokens.ids) for delta in deltas if not delta.is_prompt)


async def watch_for_leaving(receive: Receive, *completions: Running) -> None:
    """Abandons completions when their client leaves."""
    while (await receive())["type"] != "http.disconnect":
        pass
    for running in completions:
        running.abandon()


@contextmanager
def _params_named(body: CompletionBody) -> Iterator[None]:
    """Gives the fields that the services blame the names that the client knows."""
    try:
        yield
    except ServiceError as error:
        if error.field:
            error.field = param_of(error.field, body)
        raise
