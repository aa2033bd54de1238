"""Span of one request, from its arrival to its last token."""

from collections.abc import Mapping
from typing import TypeAlias

from services.common import tracing
from services.common.span import Attributes, Span
from services.tokenizer.completion.completion_output import CompletionOutput
from tokenwire.pb.completion.v1 import completion_pb2
from tokenwire.pb.types.v1 import types_pb2

__all__ = ["end_span", "start_span"]

TextRequest: TypeAlias = (
    completion_pb2.GenerateRequest
    | completion_pb2.EmbedRequest
    | completion_pb2.ScoreRequest
    | completion_pb2.ClassifyRequest
)
_NAMES: Mapping[type[TextRequest], tuple[str, str]] = {
    completion_pb2.GenerateRequest: ("Generate", "text_completion"),
    completion_pb2.EmbedRequest: ("Embed", "embeddings"),
    completion_pb2.ScoreRequest: ("Score", "score"),
    completion_pb2.ClassifyRequest: ("Classify", "classify"),
}
"""Method, and operation in OpenTelemetry's terms, by type of the request"""
_SERVICE = completion_pb2.DESCRIPTOR.services_by_name["CompletionService"].full_name


def start_span(
    request: TextRequest,
    parent: str,
    request_id: str,
) -> Span:
    """Start the span of a request, below the traceparent of its caller."""
    method, operation = _NAMES[type(request)]
    if isinstance(request, completion_pb2.GenerateRequest) and request.HasField("conversation"):
        operation = "chat"
    span = tracing.start(f"{_SERVICE}/{method}", parent, request_id)
    span.set({"gen_ai.operation.name": operation, "gen_ai.request.model": request.model})
    return span


def end_span(span: Span, output: CompletionOutput | None, outcome: str, **why: str) -> None:
    """End the span of a request.

    output: None = the request was never planned.
    outcome: outcome in the metrics.
    why: reason and message of the failure, as `failure` returns them.
    """
    if span.is_recording:
        span.set({"tokenwire.outcome": outcome})
        if output is not None:
            span.set(_attributes(output))
        if why:
            span.fail(**why)
    span.end()


def _attributes(output: CompletionOutput) -> Attributes:
    reasons = [
        types_pb2.FinishReason.Name(choice.outcome.reason).removeprefix("FINISH_REASON_").lower()
        for choice in output.choices
        if choice.outcome is not None
    ]
    attributes: dict[str, str | int | float | list[str]] = {
        "gen_ai.response.model": output.plan.limits.model,
        "gen_ai.response.finish_reasons": reasons,
        "gen_ai.usage.input_tokens": output.plan.prompt_tokens,
        "gen_ai.usage.output_tokens": output.choices.received,
        "tokenwire.encode_seconds": output.encode_seconds,
    }
    if output.first_token_seconds is not None:
        attributes["gen_ai.response.time_to_first_chunk"] = output.first_token_seconds
    return attributes
