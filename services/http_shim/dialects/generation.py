"""Fields of generation that the bodies of completions and chats share, and their conversion."""

from collections.abc import Mapping
from typing import Annotated, ClassVar, Literal

from msgspec import Meta, Struct

from services.http_shim.dialects.constraints import ConstraintFields, read_constraint
from services.http_shim.dialects.fields import (
    BOUNDED,
    IDS,
    Int64,
    KeptTokens,
    Priority,
    Seconds,
    Strings,
    TopK,
    Uint32,
)
from services.http_shim.dialects.foreign_fields import ForeignFields
from services.http_shim.dialects.reading import Reading
from services.http_shim.dialects.tools import Tool, ToolChoice, read_tools
from tokenwire.errors import invalid
from tokenwire.pb.completion.v1 import completion_pb2
from tokenwire.pb.types.v1 import types_pb2

__all__ = ["NAMES", "GenerationBody", "StreamOptions", "read_generation"]

NAMES: Mapping[str, str] = {
    "include_stop_string": "include_stop_str_in_output",
    "context_overflow": "context_length_exceeded_behavior",
    "truncate_prompt": "truncate_sequence",
    "delivery": "stream",
    "sampling.bad_token_ids": "bad_words",
    "sampling.dry": "dry_multiplier",
    "sampling.dry.base": "dry_base",
    "sampling.dry.allowed_length": "dry_allowed_length",
    "sampling.dry.breaker_ids": "dry_sequence_breakers",
    "sampling.mirostat": "mirostat_target",
    "sampling.mirostat.learning_rate": "mirostat_lr",
}
"""Names of the contract's fields in completions and chats, where they differ"""
_OVERFLOWS = {
    "truncate": completion_pb2.CONTEXT_OVERFLOW_LOWER_OUTPUT,
    "error": completion_pb2.CONTEXT_OVERFLOW_ERROR,
}


class StreamOptions(Struct):
    """`stream_options`."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class GenerationBody(ConstraintFields):
    """Fields that the bodies of completions and chats share."""

    foreign: ClassVar[ForeignFields]
    """Fields of other servers, refused unless their value has no effect"""

    model: str | None = None
    max_tokens: Uint32 | None = None
    max_completion_tokens: Uint32 | None = None
    min_tokens: Uint32 | None = None
    ignore_eos: bool | None = None
    stop: str | Strings | None = None
    stop_token_ids: Annotated[list[Uint32], BOUNDED] | None = None
    include_stop_str_in_output: bool | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: TopK | None = None
    min_p: float | None = None
    seed: Int64 | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: Annotated[dict[Uint32, float], Meta(max_length=2**18)] | None = None
    dry_multiplier: float | None = None
    dry_base: float | None = None
    dry_allowed_length: Uint32 | None = None
    dry_sequence_breakers: Strings | None = None
    mirostat_target: float | None = None
    mirostat_lr: float | None = None
    n: Uint32 | None = None
    context_length_exceeded_behavior: Literal["truncate", "error"] | None = None
    tools: Annotated[list[Tool], BOUNDED] | None = None
    tool_choice: ToolChoice | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    user: str | None = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    # vLLM's fields
    skip_special_tokens: bool | None = None
    spaces_between_special_tokens: bool | None = None
    truncate_prompt_tokens: KeptTokens | None = None
    prompt_logprobs: Uint32 | None = None
    allowed_token_ids: Annotated[list[Uint32], IDS] | None = None
    bad_words: Strings | None = None
    priority: Priority | None = None
    timeout: Seconds | None = None


def read_generation(body: GenerationBody, ignored: list[str], names: Mapping[str, str]) -> Reading:
    """Return a reading of the fields that completions and chats share.

    ignored: paths of unknown fields. names: the dialect's names of the contract's fields, with
    NAMES. Raises INVALID_ARGUMENT.
    """
    _refuse_contradictions(body)
    reading = Reading(ignored, names)
    reading.is_streamed = bool(body.stream)
    reading.priority, reading.timeout = body.priority, body.timeout
    reading.request = completion_pb2.GenerateRequest(
        model=body.model or "",
        sampling=_sampling(body),
        stopping=_stopping(body),
        stop=[body.stop] if isinstance(body.stop, str) else body.stop,
        include_stop_string=bool(body.include_stop_str_in_output),
        n=body.n,
        delivery=(completion_pb2.DELIVERY_DELTAS if body.stream else completion_pb2.DELIVERY_WHOLE),
        user=body.user or "",
        dry_sequence_breakers=body.dry_sequence_breakers if body.dry_multiplier else None,
        no_dry_sequence_breakers=bool(body.dry_multiplier) and body.dry_sequence_breakers == [],
        skip_special_tokens=body.skip_special_tokens,
        truncate_prompt_tokens=body.truncate_prompt_tokens,
        prompt_logprobs=body.prompt_logprobs,
        bad_words=body.bad_words,
    )
    if body.context_length_exceeded_behavior is not None:
        reading.request.context_overflow = _OVERFLOWS[body.context_length_exceeded_behavior]
    for token in body.logit_bias or ():
        reading.note(f"sampling.logit_bias[{token}]", f"logit_bias.{token}")
    if body.max_tokens is None and body.max_completion_tokens is not None:
        reading.note("stopping.max_tokens", "max_completion_tokens")
    read_constraint(reading, body)
    read_tools(reading, body.tools, body.tool_choice)
    return reading


def _refuse_contradictions(body: GenerationBody) -> None:
    if body.stream_options is not None and not body.stream:
        raise invalid("stream_options", "stream_options needs stream: true.")
    if body.stream and body.prompt_logprobs is not None:
        raise invalid(
            "prompt_logprobs", "prompt_logprobs can't be streamed; omit prompt_logprobs or stream."
        )
    if None not in (body.max_tokens, body.max_completion_tokens) and (
        body.max_tokens != body.max_completion_tokens
    ):
        raise invalid(
            "max_completion_tokens",
            "max_tokens and max_completion_tokens must be equal if both are given.",
        )


def _sampling(body: GenerationBody) -> types_pb2.SamplingParams:
    sampling = types_pb2.SamplingParams(
        temperature=body.temperature,
        top_p=body.top_p,
        top_k=None if body.top_k == -1 else body.top_k,
        min_p=body.min_p,
        seed=body.seed,
        frequency_penalty=body.frequency_penalty,
        presence_penalty=body.presence_penalty,
        repetition_penalty=body.repetition_penalty,
        logit_bias=body.logit_bias,
    )
    if body.allowed_token_ids is not None:
        sampling.allowed_token_ids.CopyFrom(types_pb2.TokenIds(ids=body.allowed_token_ids))
    if body.dry_multiplier:  # 0 turns DRY off, whatever the other fields are
        sampling.dry.CopyFrom(
            types_pb2.DryParams(
                multiplier=body.dry_multiplier,
                base=body.dry_base,
                allowed_length=body.dry_allowed_length,
            )
        )
    if body.mirostat_target is not None or body.mirostat_lr is not None:
        sampling.mirostat.CopyFrom(
            types_pb2.MirostatParams(
                target_perplexity=body.mirostat_target, learning_rate=body.mirostat_lr
            )
        )
    return sampling


def _stopping(body: GenerationBody) -> types_pb2.StoppingParams:
    return types_pb2.StoppingParams(
        max_tokens=body.max_completion_tokens if body.max_tokens is None else body.max_tokens,
        min_tokens=body.min_tokens or 0,
        ignore_eos=bool(body.ignore_eos),
        stop_token_ids=body.stop_token_ids,
    )
