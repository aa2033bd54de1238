"""Fields of generation that the bodies of completions and chats share, and their conversion."""

from collections.abc import Mapping
from typing import Annotated, ClassVar, Literal

from msgspec import Meta, Struct

from services.common.contract import (
    DEFAULT_MAX_TOKENS,
    DRY_ALLOWED_LENGTH,
    DRY_BASE,
    MAX_SEQUENCES,
    MAX_STOP_TOKEN_IDS,
)
from services.http_shim.dialects.constraints import ConstraintFields, read_constraint
from services.http_shim.dialects.fields import (
    BOUNDED,
    IDS,
    FrequencyPenalty,
    Int64,
    IsStreamed,
    KeepAlive,
    KeptTokens,
    MinP,
    ModelName,
    PresencePenalty,
    Priority,
    RepetitionPenalty,
    StopStrings,
    Strings,
    Temperature,
    Timeout,
    TopK,
    TopP,
    Uint32,
    UserLabel,
    about,
    read_keep_alive,
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

    model: ModelName = None
    max_tokens: Annotated[
        Uint32 | None,
        about(
            "Most tokens of each choice; 0 only with echo.", minimum=0, default=DEFAULT_MAX_TOKENS
        ),
    ] = None
    max_completion_tokens: Annotated[
        Uint32 | None, about("Another name of max_tokens.", minimum=0)
    ] = None
    min_tokens: Annotated[
        Uint32 | None, about("Fewest tokens of each choice.", "stopping.min_tokens", default=0)
    ] = None
    ignore_eos: Annotated[
        bool | None, about("Continue a choice after the end-of-sequence token.", default=False)
    ] = None
    stop: StopStrings = None
    stop_token_ids: Annotated[
        Annotated[list[Uint32], BOUNDED] | None,
        about("Token ids that end a choice.", maxItems=MAX_STOP_TOKEN_IDS),
    ] = None
    include_stop_str_in_output: Annotated[
        bool | None, about("Keep the stop string that ended a choice.", default=False)
    ] = None
    temperature: Temperature = None
    top_p: TopP = None
    top_k: TopK = None
    min_p: MinP = None
    seed: Annotated[Int64 | None, about("Seed of the sampling; equal seeds give equal text.")] = (
        None
    )
    frequency_penalty: FrequencyPenalty = None
    presence_penalty: PresencePenalty = None
    repetition_penalty: RepetitionPenalty = None
    logit_bias: Annotated[
        Annotated[dict[Uint32, float], Meta(max_length=2**18)] | None,
        about(
            "Values added to the logits of token ids.",
            "sampling.logit_bias",
            propertyNames={"pattern": "^(0|[1-9][0-9]*)$"},
        ),
    ] = None
    dry_multiplier: Annotated[
        float | None,
        about("Multiplier of the DRY penalty; 0 = off.", "sampling.dry.multiplier", default=0),
    ] = None
    dry_base: Annotated[
        float | None, about("Base of the DRY penalty.", "sampling.dry.base", default=DRY_BASE)
    ] = None
    dry_allowed_length: Annotated[
        Uint32 | None,
        about("Longest repetition without a DRY penalty, in tokens.", default=DRY_ALLOWED_LENGTH),
    ] = None
    dry_sequence_breakers: Annotated[
        Strings | None,
        about("Texts that end a repetition for DRY; [] = none.", "dry_sequence_breakers"),
    ] = None
    mirostat_target: Annotated[
        float | None,
        about("Target perplexity of Mirostat 2.", "sampling.mirostat.target_perplexity"),
    ] = None
    mirostat_lr: Annotated[
        float | None, about("Learning rate of Mirostat 2.", "sampling.mirostat.learning_rate")
    ] = None
    n: Annotated[
        Uint32 | None,
        about(f"Choices of each prompt; prompts x n is at most {MAX_SEQUENCES}.", "n"),
    ] = None
    context_length_exceeded_behavior: Annotated[
        Literal["truncate", "error"] | None,
        about(
            "Lower max_tokens, or refuse the request, if prompt and max_tokens exceed the context.",
            default="truncate",
        ),
    ] = None
    tools: Annotated[
        Annotated[list[Tool], BOUNDED] | None,
        about("Functions and custom tools that the model may call.", "tools"),
    ] = None
    tool_choice: Annotated[
        ToolChoice | None,
        about(
            "Tool to call, or tools to choose from; `required` = any, `none` = no call, `auto` = "
            "the model decides, as in a chat with tools by default."
        ),
    ] = None
    stream: IsStreamed = None
    stream_options: Annotated[
        StreamOptions | None, about("Events of the stream that have the usage.")
    ] = None
    user: UserLabel = None
    return_token_ids: Annotated[
        bool | None, about("Return the token ids of prompts and choices.", default=False)
    ] = None
    return_tokens_as_token_ids: Annotated[
        bool | None, about("Return `token_id:N` in place of token texts.", default=False)
    ] = None
    # vLLM's fields
    skip_special_tokens: Annotated[
        bool | None,
        about(
            "Omit special tokens from the text. The one that ends a choice is omitted in "
            "any case unless include_stop_str_in_output is true.",
            default=True,
        ),
    ] = None
    spaces_between_special_tokens: Annotated[
        bool | None,
        about("No effect: no decoder here puts spaces between special tokens.", default=True),
    ] = None
    truncate_prompt_tokens: Annotated[
        KeptTokens | None,
        about(
            "Number of last tokens of the prompt to keep; -1 = all that leave room for max_tokens.",
            "truncate_prompt_tokens",
            **{"not": {"const": 0}},
        ),
    ] = None
    prompt_logprobs: Annotated[
        Uint32 | None,
        about("Candidates for each token of the prompt; not with stream.", "prompt_logprobs"),
    ] = None
    allowed_token_ids: Annotated[
        Annotated[list[Uint32], IDS] | None,
        about(
            "The only token ids to generate. The end of sequence must be among them to be "
            "generated.",
            "sampling.allowed_token_ids",
        ),
    ] = None
    bad_words: Annotated[
        Strings | None, about("Strings that are never generated.", "bad_words")
    ] = None
    priority: Priority = None
    timeout: Timeout = None
    keep_alive: KeepAlive = None


def read_generation(body: GenerationBody, ignored: list[str], names: Mapping[str, str]) -> Reading:
    """Return a reading of the fields that completions and chats share.

    ignored: paths of unknown fields. names: the dialect's names of the contract's fields, with
    NAMES. Raises INVALID_ARGUMENT.
    """
    _refuse_contradictions(body)
    reading = Reading(ignored, names)
    reading.is_streamed = bool(body.stream)
    reading.priority, reading.timeout = body.priority, body.timeout
    reading.keep_alive = read_keep_alive(body.keep_alive)
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
    reading.note_entries("sampling.logit_bias", "logit_bias")
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
