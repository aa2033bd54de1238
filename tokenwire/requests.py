"""Options of the client's requests, and their conversion to start commands."""

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypedDict, TypeVar, cast

from tokenwire.errors import ServiceError, invalid
from tokenwire.messages import Message
from tokenwire.pb.completion.v1 import completion_pb2
from tokenwire.pb.completion.v1.completion_pb2 import Tool, ToolChoice
from tokenwire.pb.engine.v1 import engine_pb2
from tokenwire.pb.types.v1 import types_pb2
from tokenwire.pb.types.v1.types_pb2 import BeamSearch, DryParams, GrammarSpec, MirostatParams

__all__ = [
    "GenerateOptions",
    "Input",
    "Prompt",
    "TokenOptions",
    "build",
    "text_start",
    "token_start",
    "with_image_marks",
]

Prompt = str | Sequence[int]
Input = Prompt | Sequence[Prompt] | Message | Sequence[Message]
"""Prompts to complete, each a text or token ids; or the messages of a conversation to answer"""
Built = TypeVar("Built")
_IMAGE_MARK = "<image>"


class _RequestOptions(TypedDict, total=False):
    """Options of both levels. protos/tokenwire/types/v1/types.proto has ranges and defaults."""

    model: str
    max_tokens: int
    min_tokens: int
    ignore_eos: bool
    stop_token_ids: Sequence[int]
    temperature: float
    top_p: float
    top_k: int
    min_p: float
    seed: int
    frequency_penalty: float
    presence_penalty: float
    repetition_penalty: float
    penalty_window: int
    logit_bias: Mapping[int, float]
    allowed_token_ids: Sequence[int]
    bad_token_ids: Sequence[Sequence[int]]
    dry: DryParams
    mirostat: MirostatParams
    n: int
    logprobs: int
    prompt_logprobs: int
    grammar: GrammarSpec
    request_id: str
    """Id of the request in every service's log"""
    tenant: str
    """Salt of the prefix cache"""
    priority: int
    timeout_seconds: float


class GenerateOptions(_RequestOptions, total=False):
    """Options of a request at text level besides its input; see protos/tokenwire/completion/v1.

    Options of the second group need prompts, and options of the third group need a conversation.
    """

    stop: Sequence[str]
    include_stop_string: bool
    context_overflow: completion_pb2.ContextOverflow
    dry_sequence_breakers: Sequence[str]
    no_dry_sequence_breakers: bool
    bad_words: Sequence[str]
    skip_special_tokens: bool
    truncate_prompt_tokens: int
    tools: Sequence[Tool]
    tool_choice: ToolChoice
    echo: bool
    user: str

    suffix: str
    best_of: int
    beam_search: BeamSearch
    truncate_prompt: bool
    images: Sequence[bytes]
    """Encoded images (PNG, JPEG, WebP or GIF), one for each "<image>" of the prompts, in order"""

    parallel_tool_calls: bool
    template: str
    template_arguments: Mapping[str, Any]
    """Additional variables of the template"""
    add_generation_prompt: bool
    continue_last_message: bool
    reasoning_effort: str
    drop_oldest_messages: bool


class TokenOptions(_RequestOptions, total=False):
    """Options of a request at token level besides its prompts; see protos/tokenwire/engine/v1."""

    beam_search: BeamSearch


def text_start(
    given: Input, options: dict[str, Any], delivery: completion_pb2.Delivery.ValueType
) -> completion_pb2.SessionStart:
    """Return the command that starts a request at text level. Raises the errors of `build`."""
    context = _pop_context(options)
    messages = _messages(given)
    source: dict[str, Any]
    if messages is None:
        source = {"prompts": _prompts(cast(Prompt | Sequence[Prompt], given), options)}
    else:
        source = {"conversation": _conversation(messages, options)}
    request = build(
        completion_pb2.GenerateRequest,
        **source,
        delivery=delivery,
        **_pop_nested(options),
        **options,
    )
    return completion_pb2.SessionStart(request=request, context=context)


def with_image_marks(prompt: str, images: int) -> str:
    """Return the prompt with a mark for each image in front, unless it has marks itself."""
    return prompt if _IMAGE_MARK in prompt else _IMAGE_MARK * images + prompt


def token_start(
    prompt_ids: Sequence[int] | Sequence[Sequence[int]], options: dict[str, Any]
) -> engine_pb2.SessionStart:
    """Return the command that starts a request at token level. Raises the errors of `build`."""
    prompts = cast(Sequence[Sequence[int]], [prompt_ids] if _is_one(prompt_ids) else prompt_ids)
    context = _pop_fields(options, engine_pb2.SessionStart)
    request = build(
        engine_pb2.GenerateRequest,
        prompts=[build(types_pb2.TokenIds, "prompts.", ids=ids) for ids in prompts],
        **_pop_nested(options),
        **options,
    )
    return build(engine_pb2.SessionStart, request=request, **context)


def build(message: Callable[..., Built], path: str = "", /, **fields: Any) -> Built:
    """Return a protobuf message; `path` prefixes the field names in errors.

    Raises ServiceError (INVALID_ARGUMENT) for a value that its field can't hold, and ValueError for
    a field that the message does not have.
    """
    try:
        return message(**fields)
    except ValueError:
        known = cast(Any, message).DESCRIPTOR.fields_by_name
        for name in filter(known.__contains__, fields):
            try:
                message(**{name: fields[name]})
            except ValueError as error:
                raise _unfit(path + name, error) from None
        raise


def _is_one(prompt: Prompt | Sequence[Prompt]) -> bool:
    return isinstance(prompt, str) or (len(prompt) > 0 and isinstance(prompt[0], int))


def _messages(given: Input) -> Sequence[Message] | None:
    """Return the messages of a conversation; None for prompts."""
    if isinstance(given, Message):
        return [given]
    is_conversation = not isinstance(given, str) and given and isinstance(given[0], Message)
    return cast(Sequence[Message], given) if is_conversation else None


def _prompts(given: Prompt | Sequence[Prompt], options: dict[str, Any]) -> completion_pb2.Prompts:
    prompts = cast(Sequence[Prompt], [given] if _is_one(given) else given)
    items = [_prompt(prompt, f"prompts.items[{index}]") for index, prompt in enumerate(prompts)]
    fields = _pop_fields(options, completion_pb2.Prompts)
    return build(completion_pb2.Prompts, "prompts.", items=items, **fields)


def _prompt(prompt: Prompt, path: str) -> completion_pb2.Prompt:
    if isinstance(prompt, str):
        return build(completion_pb2.Prompt, f"{path}.", text=prompt)
    ids = build(types_pb2.TokenIds, f"{path}.token_ids.", ids=prompt)
    return completion_pb2.Prompt(token_ids=ids)


def _conversation(
    messages: Sequence[Message], options: dict[str, Any]
) -> completion_pb2.Conversation:
    path = "conversation."
    arguments = options.pop("template_arguments", None)
    return build(
        completion_pb2.Conversation,
        path,
        messages=[_message(each, f"{path}messages[{i}]") for i, each in enumerate(messages)],
        template_arguments_json="" if arguments is None else json.dumps(arguments),
        **_pop_fields(options, completion_pb2.Conversation),
    )


def _message(message: Message, path: str) -> completion_pb2.Message:
    """Return the protobuf message. Raises INVALID_ARGUMENT for text that is not Unicode."""
    try:
        return message.write()
    except UnicodeError as error:
        raise _unfit(path, error) from None


def _pop_context(options: dict[str, Any]) -> completion_pb2.RequestContext:
    fields = _pop_fields(options, completion_pb2.RequestContext)
    return build(completion_pb2.RequestContext, "context.", **fields)


def _pop_nested(options: dict[str, Any]) -> dict[str, Any]:
    """Take the sampling and stopping options; return the messages that hold them, by field."""
    sampling = _pop_fields(options, types_pb2.SamplingParams)
    path = "sampling."
    if (allowed := sampling.pop("allowed_token_ids", None)) is not None:
        ids = build(types_pb2.TokenIds, f"{path}allowed_token_ids.", ids=allowed)
        sampling["allowed_token_ids"] = ids
    if (words := sampling.pop("bad_token_ids", None)) is not None:
        sampling["bad_token_ids"] = [
            build(types_pb2.TokenIds, f"{path}bad_token_ids[{index}].", ids=ids)
            for index, ids in enumerate(words)
        ]
    stopping = _pop_fields(options, types_pb2.StoppingParams)
    return {
        "sampling": build(types_pb2.SamplingParams, path, **sampling),
        "stopping": build(types_pb2.StoppingParams, "stopping.", **stopping),
    }


def _pop_fields(options: dict[str, Any], message: Any) -> dict[str, Any]:
    """Take the options that are fields of a message type."""
    names = message.DESCRIPTOR.fields_by_name
    return {name: options.pop(name) for name in list(options) if name in names}


def _unfit(path: str, error: ValueError) -> ServiceError:
    return invalid(path, f"The value of {path} can't be sent: {error}.")
