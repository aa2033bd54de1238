"""Endpoint POST /v1/completion: one prompt for one or several models at once."""

import asyncio
import time
import uuid
from contextlib import ExitStack
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from typing import Annotated

import msgspec
from msgspec import Meta, Struct
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from services.common.accounts.usage import RequestUsage
from services.common.contract import DEFAULT_MAX_TOKENS, MAX_SEQUENCES
from services.http_shim.backends.model_source import ModelSource, ServedModel
from services.http_shim.backends.output_collector import OutputCollector
from services.http_shim.dialects.bodies import body_of
from services.http_shim.dialects.choices import finish_reason_of
from services.http_shim.dialects.fields import FrequencyPenalty, PresencePenalty, Strings, about
from services.http_shim.endpoints.generation import watch_for_disconnect
from services.http_shim.errors import ClientGoneError, client_field_names
from services.http_shim.http.access import assign_model, charging, reserve
from services.http_shim.http.body import BodyReader
from services.http_shim.http.exchange import Exchange, exchange_of
from services.http_shim.http.gate import Gate
from tokenwire.errors import invalid
from tokenwire.pb.completion.v1 import completion_pb2
from tokenwire.pb.types.v1 import types_pb2

__all__ = ["MultiAnswer", "MultiCompletion", "MultiCompletionBody"]


class MultiCompletionBody(Struct):
    """The body of POST /v1/completion."""

    model: Annotated[
        str | Strings | None,
        about("One or several model names.", minItems=1, maxItems=MAX_SEQUENCES),
    ] = None
    prompt: Annotated[str | None, about("The text.")] = None
    max_tokens: Annotated[
        Annotated[int, Meta(ge=1, le=2**32 - 1)] | None,
        about("Most tokens of each choice.", default=DEFAULT_MAX_TOKENS),
    ] = None
    temperature: Annotated[
        Annotated[float, Meta(ge=0, le=1)] | None, about("Temperature; 0 = greedy.", default=1)
    ] = None
    top_p: Annotated[
        Annotated[float, Meta(ge=0, le=1)] | None, about("Nucleus mass.", default=1)
    ] = None
    stop: Annotated[
        Strings | None,
        about(
            "Strings that end a choice and are cut off: at most 16, or the server's own limit.",
            "stop",
        ),
    ] = None
    presence_penalty: PresencePenalty = None
    frequency_penalty: FrequencyPenalty = None
    stream: Annotated[
        bool | None, about("Not supported: /v1/completions streams.", const=False, default=False)
    ] = None


class TimedUsage(Struct):
    """Tokens of a model, and its time in milliseconds."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prediction_time_ms: int


class ModelChoice(Struct):
    """Completion of the prompt by one model."""

    text: str
    created: int
    model: str
    finish_reason: str
    usage: TimedUsage


class MultiAnswer(Struct):
    """Answer of /v1/completion. `usage` has the sums of the tokens, and the longest time."""

    id: str
    object: str
    created: str
    choices: list[ModelChoice]
    usage: TimedUsage


@dataclass(frozen=True, slots=True)
class _Part:
    """One model's share of a request."""

    model: ServedModel
    request: completion_pb2.GenerateRequest


class MultiCompletion:
    """The endpoint as an ASGI application, which can watch for a client that leaves."""

    def __init__(self, models: ModelSource, gate: Gate, bodies: BodyReader) -> None:
        self._models = models
        self._gate = gate
        self._bodies = bodies

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        exchange = exchange_of(scope)
        read = self._bodies.read(scope, receive, partial(body_of, MultiCompletionBody))
        body, exchange.ignored = await read
        names = _names(body)
        parts = [await self._part(exchange, name, body) for name in names]
        await self._models.require(names)
        collectors: list[OutputCollector] = [OutputCollector() for _ in parts]
        with (
            charging(exchange, await reserve(exchange, *[part.request for part in parts])),
            self._gate.admit(*collectors),
        ):
            try:
                choices = await _complete_all(parts, collectors, exchange, receive)
            finally:
                exchange.model = _one_model(parts, collectors)
            usage = _total(choices)
            exchange.prompt_tokens = usage.prompt_tokens
            exchange.completion_tokens = usage.completion_tokens
            exchange.shares = [*map(_usage_of, choices, collectors)]
            await _response(choices, usage)(scope, receive, send)

    async def _part(self, exchange: Exchange, name: str, body: MultiCompletionBody) -> _Part:
        request = _to_complete_request(body)
        return _Part(await assign_model(exchange, self._models, name, request), request)


def _names(body: MultiCompletionBody) -> list[str]:
    """Return the requested model names."""
    if body.stream:
        raise invalid("stream", "/v1/completion can't stream; use /v1/completions.")
    names = [body.model] if isinstance(body.model, str) else body.model
    if names is None:
        raise invalid("model", "model is required: a name or a list of names.")
    if not names:
        raise invalid("model", "model must have at least one name.")
    if len(names) > MAX_SEQUENCES:
        raise invalid("model", f"model has {len(names)} names; the limit is {MAX_SEQUENCES}.")
    return names


def _to_complete_request(body: MultiCompletionBody) -> completion_pb2.GenerateRequest:
    if body.prompt is None:
        raise invalid("prompt", "prompt is required: a string.")
    return completion_pb2.GenerateRequest(
        prompts=completion_pb2.Prompts(items=[completion_pb2.Prompt(text=body.prompt)]),
        sampling=types_pb2.SamplingParams(
            temperature=body.temperature,
            top_p=body.top_p,
            presence_penalty=body.presence_penalty,
            frequency_penalty=body.frequency_penalty,
        ),
        stopping=types_pb2.StoppingParams(max_tokens=body.max_tokens),
        stop=body.stop,
        delivery=completion_pb2.DELIVERY_WHOLE,
    )


def _usage_of(choice: ModelChoice, collector: OutputCollector) -> RequestUsage:
    assert collector.accepted is not None
    return RequestUsage(
        choice.model,
        choice.usage.prompt_tokens,
        choice.usage.completion_tokens,
        sum(collector.accepted.cached_tokens),
    )


def _one_model(parts: list[_Part], collectors: list[OutputCollector]) -> str:
    """Return the name of the model that took all admitted parts, "" for none or several."""
    answering = {
        part.model.id or collector.accepted.model
        for part, collector in zip(parts, collectors, strict=True)
        if collector.accepted is not None
    }
    return answering.pop() if len(answering) == 1 else ""


async def _complete_all(
    parts: list[_Part], collectors: list[OutputCollector], exchange: Exchange, receive: Receive
) -> list[ModelChoice]:
    """Run all parts at once; the first failure cancels the others and is raised."""
    watch = asyncio.ensure_future(watch_for_disconnect(receive, *collectors))
    with ExitStack() as cleanup:
        cleanup.callback(watch.cancel)
        tasks = [
            asyncio.ensure_future(_complete(part, collector, exchange))
            for part, collector in zip(parts, collectors, strict=True)
        ]
        for task in tasks:
            cleanup.callback(task.cancel)
        try:
            return await asyncio.gather(*tasks)
        except ClientGoneError:
            await asyncio.wait(tasks)  # each counts the tokens that it used
            raise


async def _complete(part: _Part, collector: OutputCollector, exchange: Exchange) -> ModelChoice:
    began = time.monotonic()
    with part.model.connection.lease() as backend:
        submission = backend.submit(
            part.request, collector, tenant=exchange.tenant, priority=exchange.priority
        )
        try:
            with client_field_names(_param_of):
                usage = await collector.completed()
        except ClientGoneError:
            cut = await submission.cancelled_usage()
            if cut is not None:
                exchange.prompt_tokens += cut.prompt_tokens
                exchange.completion_tokens += cut.completion_tokens
            raise
        finally:
            if collector.is_open():
                submission.cancel()
    assert collector.accepted is not None
    return ModelChoice(
        text="".join(delta.text for delta in collector.pending.get(0, ())),
        created=int(time.time()),
        model=part.model.id or collector.accepted.model,
        finish_reason=finish_reason_of(collector.finished[0]),
        usage=_timed(usage.prompt_tokens, usage.completion_tokens, time.monotonic() - began),
    )


def _param_of(path: str) -> str:
    """Return the client's name of a field of the request."""
    first, *rest = path.partition("[")[0].split(".")
    return "prompt" if first == "prompts" else [first, *rest][-1]


def _timed(prompt_tokens: int, completion_tokens: int, seconds: float) -> TimedUsage:
    total = prompt_tokens + completion_tokens
    return TimedUsage(prompt_tokens, completion_tokens, total, round(seconds * 1e3))


def _total(choices: list[ModelChoice]) -> TimedUsage:
    usages = [choice.usage for choice in choices]
    return TimedUsage(
        prompt_tokens=sum(usage.prompt_tokens for usage in usages),
        completion_tokens=sum(usage.completion_tokens for usage in usages),
        total_tokens=sum(usage.total_tokens for usage in usages),
        prediction_time_ms=max(usage.prediction_time_ms for usage in usages),
    )


def _response(choices: list[ModelChoice], usage: TimedUsage) -> Response:
    answer = MultiAnswer(
        id=str(uuid.uuid4()),
        object="completion",
        created=datetime.now(UTC).isoformat(timespec="seconds"),
        choices=choices,
        usage=usage,
    )
    return Response(
        msgspec.json.encode(answer),
        headers={"x-tokens-used": str(usage.total_tokens)},
        media_type="application/json",
    )
