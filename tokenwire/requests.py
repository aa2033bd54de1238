"""Options of the client's requests, and the start commands that they become."""

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypedDict, TypeVar, cast

from tokenwire.chat import Message
from tokenwire.errors import ServiceError, invalid
from tokenwire.pb.completion.v1 import completion_pb2
from tokenwire.pb.completion.v1.completion_pb2 import Tool, ToolChoice
from tokenwire.pb.engine.v1 import engine_pb2
from tokenwire.pb.types.v1 import types_pb2
from tokenwire.pb.types.v1.types_pb2 import BeamSearch, DryParams, GrammarSpec, MirostatParams

__all__ = [
    "ChatOptions",
    "CompleteOptions",
    "GenerateOptions",
    "Prompt",
    "build",
    "chat_start",
    "complete_start",
    "generate_start",
    "with_image_marks",
]

Prompt = str | Sequence[int]
Built = TypeVar("Built")
_IMAGE_MARK = "<image>"


class _RequestOptions(TypedDict, total=False):
    """Options of both levels. Ranges and defaults: protos/tokenwire/types/v1/types.proto."""

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


class _TextOptions(_RequestOptions, total=False):
    """Options of completions and chats: protos/tokenwire/completion/v1."""

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
    user: str


class CompleteOptions(_TextOptions, total=False):
    """Options of a completion besides its prompt."""

    suffix: str
    best_of: int
    beam_search: BeamSearch
    echo: bool
    truncate_prompt: bool
    images: Sequence[bytes]
    """Encoded images (PNG, JPEG, WebP or GIF), one for each "<image>" of the prompts, in order"""


class ChatOptions(_TextOptions, total=False):
    """Options of a chat besides its messages."""

    parallel_tool_calls: bool
    template: str
    template_arguments: Mapping[str, Any]
    """Additional variables of the template"""
    add_generation_prompt: bool
    continue_last_message: bool
    reasoning_effort: str
    echo: bool
    drop_oldest_messages: bool


class GenerateOptions(_RequestOptions, total=False):
    """Options of a request at token level besides its prompts: protos/tokenwire/engine/v1."""

    beam_search: BeamSearch


def complete_start(
    prompt: Prompt | Sequence[Prompt],
    options: dict[str, Any],
    delivery: completion_pb2.Delivery.ValueType,
) -> completion_pb2.StartComplete:
    """Return the command that starts a completion. Raises as `build` does."""
    prompts = [prompt] if _is_one(prompt) else prompt
    context = _pop_context(options)
    request = build(
        completion_pb2.CompleteRequest,
        prompts=[_prompt(one) for one in cast(Sequence[Prompt], prompts)],
        delivery=delivery,
        **_pop_nested(options),
        **options,
    )
    return completion_pb2.StartComplete(request=request, context=context)


def with_image_marks(prompt: str, images: int) -> str:
    """Return the prompt with a mark for each image in front, unless it has marks itself."""
    return prompt if _IMAGE_MARK in prompt else _IMAGE_MARK * images + prompt


def chat_start(
    messages: str | Sequence[Message],
    options: dict[str, Any],
    delivery: completion_pb2.Delivery.ValueType,
) -> completion_pb2.StartChat:
    """Return the command that starts a chat. Raises as `build` does."""
    conversation = [Message("user", messages)] if isinstance(messages, str) else messages
    context = _pop_context(options)
    arguments = options.pop("template_arguments", None)
    request = build(
        completion_pb2.ChatRequest,
        messages=[_message(message, f"messages[{i}]") for i, message in enumerate(conversation)],
        template_arguments_json="" if arguments is None else json.dumps(arguments),
        delivery=delivery,
        **_pop_nested(options),
        **options,
    )
    return completion_pb2.StartChat(request=request, context=context)


def generate_start(
    prompt_ids: Sequence[int] | Sequence[Sequence[int]], options: dict[str, Any]
) -> engine_pb2.SessionStart:
    """Return the command that starts a request at token level. Raises as `build` does."""
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


def _prompt(prompt: Prompt) -> completion_pb2.Prompt:
    if isinstance(prompt, str):
        return build(completion_pb2.Prompt, "prompts.", text=prompt)
    return completion_pb2.Prompt(token_ids=build(types_pb2.TokenIds, "prompts.", ids=prompt))


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
    """Take the sampling and stopping options; return them as the messages that hold them."""
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
