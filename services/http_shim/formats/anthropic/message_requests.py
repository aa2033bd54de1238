"""Bodies of the Messages API, and their conversion to a chat's request."""

from collections.abc import Iterator
from typing import Annotated, Any, Literal

import grpc
import msgspec
from msgspec import Meta, Struct

from services.http_shim.formats.anthropic.blocks import (
    InputMessage,
    SystemPrompt,
    chat_messages,
)
from services.http_shim.formats.anthropic.message_responses import THREAD_NOT_FOUND
from services.http_shim.formats.constraint_fields import JsonObject
from services.http_shim.formats.constraints import json_text
from services.http_shim.formats.placed_messages import PlacedMessage, place_of, tool_place
from services.http_shim.formats.request_bodies import Priority, Seconds, Uint32
from tokenwire.errors import ServiceError, invalid
from tokenwire.pb.completion.v1 import completion_pb2
from tokenwire.pb.tokenizer.v1 import tokenizer_pb2
from tokenwire.pb.types.v1 import types_pb2

__all__ = [
    "CountTokensBody",
    "MessagesBody",
    "ignored_in_message",
    "ignored_tools",
    "message_param_of",
    "message_schema_param",
    "to_count_request",
    "to_message_request",
]

_BOUNDED = Meta(max_length=4_096)  # the services have lower limits
_OWN_TOOLS = (None, "custom")
"""Types of tools that the client runs"""
_PARAMS = {
    "stop": "stop_sequences",
    "grammar": "output_config.format.schema",
    "template_arguments_json": "thinking",
    "continue_last_message": "messages",
}


class ToolDefinition(Struct):
    """One of `tools`. Those with a type of Anthropic's own servers are left out."""

    name: str | None = None
    type: str | None = None
    description: str | None = None
    input_schema: JsonObject | None = None
    strict: bool | None = None
    cache_control: Any = None


class AutoChoice(Struct, tag_field="type", tag="auto"):
    """`tool_choice`: the model decides."""

    disable_parallel_tool_use: bool | None = None


class AnyChoice(Struct, tag_field="type", tag="any"):
    """`tool_choice`: at least one call."""

    disable_parallel_tool_use: bool | None = None


class NamedChoice(Struct, tag_field="type", tag="tool"):
    """`tool_choice`: a call of one tool."""

    name: str
    disable_parallel_tool_use: bool | None = None


class NoChoice(Struct, tag_field="type", tag="none"):
    """`tool_choice`: no calls."""


class Thinking(Struct):
    """`thinking`. The budget has no effect: `max_tokens` limits reasoning too."""

    type: Literal["enabled", "disabled", "adaptive", "between_tools"]
    budget_tokens: int | None = None


class OutputFormat(Struct, tag_field="type", tag="json_schema"):
    """`output_config.format`: JSON that matches a schema."""

    schema: JsonObject


class OutputConfig(Struct):
    """`output_config`."""

    format: OutputFormat | None = None
    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None


class Metadata(Struct):
    """`metadata`."""

    user_id: str | None = None


class Thread(Struct):
    """`thread`. The server holds no conversations: each request has its whole conversation."""

    type: Literal["create", "continue"]
    previous_message_id: str | None = None


class PromptBody(Struct):
    """Fields that make the prompt."""

    model: str | None = None
    messages: Annotated[list[InputMessage], _BOUNDED] | None = None
    system: SystemPrompt | None = None
    tools: Annotated[list[ToolDefinition], _BOUNDED] | None = None
    tool_choice: AutoChoice | AnyChoice | NamedChoice | NoChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    output_format: OutputFormat | None = None
    cache_control: Any = None


class CountTokensBody(PromptBody):
    """The body of POST /v1/messages/count_tokens."""


class MessagesBody(PromptBody):
    """The body of POST /v1/messages."""

    max_tokens: Uint32 | None = None
    stop_sequences: Annotated[list[str], _BOUNDED] | None = None
    stream: bool | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: Annotated[int, Meta(ge=-1, le=2**32 - 1)] | None = None
    metadata: Metadata | None = None
    thread: Thread | None = None
    compaction: Any = None
    # our own
    priority: Priority | None = None
    timeout: Seconds | None = None


def ignored_tools(body: PromptBody) -> list[str]:
    """Return the paths of tools that only Anthropic's servers run."""
    return [f"tools[{i}]" for i, tool in enumerate(body.tools or ()) if tool.type not in _OWN_TOOLS]


def ignored_in_message(body: MessagesBody) -> list[str]:
    """Return the paths of parts without effect."""
    return [*ignored_tools(body), *(() if body.thread is None else ("thread",))]


def to_message_request(body: MessagesBody) -> completion_pb2.GenerateRequest:
    """Convert a body to the request. Raises INVALID_ARGUMENT with the client's name of a field."""
    if body.max_tokens is None:
        raise invalid("max_tokens", "max_tokens is required: the most tokens of the answer.")
    if body.compaction is not None:
        message = "compaction is not supported; ask for a summary in messages."
        raise invalid("compaction", message)
    if body.thread is not None and body.thread.type == "continue":
        raise ServiceError(
            grpc.StatusCode.NOT_FOUND,
            THREAD_NOT_FOUND,
            "This server holds no threads; send the whole conversation with the thread "
            '{"type": "create"}, or without one.',
            field="thread",
        )
    choice = body.tool_choice
    calls = [] if choice is None or isinstance(choice, NoChoice) else [choice]
    return completion_pb2.GenerateRequest(
        **_prompt_fields(body),
        model=body.model or "",
        parallel_tool_calls=not any(each.disable_parallel_tool_use for each in calls),
        sampling=types_pb2.SamplingParams(
            temperature=body.temperature,
            top_p=body.top_p,
            top_k=None if body.top_k == -1 else body.top_k,
        ),
        stopping=types_pb2.StoppingParams(max_tokens=body.max_tokens),
        stop=body.stop_sequences,
        grammar=_grammar(body),
        delivery=(completion_pb2.DELIVERY_DELTAS if body.stream else completion_pb2.DELIVERY_WHOLE),
        user=(body.metadata.user_id if body.metadata else None) or "",
    )


def to_count_request(body: CountTokensBody) -> tokenizer_pb2.RenderChatRequest:
    """Convert a body to the request that renders its prompt. Raises INVALID_ARGUMENT."""
    return tokenizer_pb2.RenderChatRequest(**_prompt_fields(body))


def _prompt_fields(body: PromptBody) -> dict[str, Any]:
    """Return the fields of a chat that make its prompt. Raises INVALID_ARGUMENT."""
    prompt = _prompt(body)
    conversation = completion_pb2.Conversation(
        messages=[placed.message for placed in prompt],
        template_arguments_json=_template_arguments(body),
        continue_last_message=_continues(prompt),
        reasoning_effort=_effort(body),
    )
    return {
        "conversation": conversation,
        "tools": [tool for _, tool in _tools(body)],
        "tool_choice": _tool_choice(body),
    }


def message_param_of(path: str, body: PromptBody) -> str:
    """Return the client's name of a field of the request."""
    if path.startswith("messages[") and (name := place_of(path, _prompt(body))) is not None:
        return name
    if (tool := _tool_place(path, body)) is not None:
        return tool[0]
    first, _, rest = path.partition(".")
    if first in ("sampling", "stopping") and rest:
        first = rest.split(".")[0]
    first = first.split("[")[0]
    return _PARAMS.get(first, first)


def message_schema_param(path: str, body: PromptBody) -> str:
    """Return the client's name of a path into a schema or a message."""
    if (place := place_of(path, _prompt(body))) is not None:
        return place
    if (tool := _tool_place(path, body)) is not None:
        return "".join(tool)
    _, _, rest = path.split(".", 2)  # after "grammar" and its kind
    return f"{_PARAMS['grammar']}.{rest}"


def _tool_place(path: str, body: PromptBody) -> tuple[str, str] | None:
    if not path.startswith("tools["):
        return None
    return tool_place(path, [index for index, _ in _tools(body)], "input_schema")


def _prompt(body: PromptBody) -> list[PlacedMessage]:
    if not body.messages:
        raise invalid("messages", "messages is required: at least one message.")
    prompt = chat_messages(body.system, body.messages)
    if not prompt:
        raise invalid("messages", "messages has only blocks of tools that other servers run.")
    return prompt


def _continues(prompt: list[PlacedMessage]) -> bool:
    """Return whether the answer continues the last message, which the client began."""
    last = prompt[-1].message
    return last.role == completion_pb2.ROLE_ASSISTANT and not last.tool_calls


def _tools(body: PromptBody) -> Iterator[tuple[int, completion_pb2.Tool]]:
    """Yield the tools that the client runs, with their indices in the body."""
    for index, tool in enumerate(body.tools or ()):
        if tool.type in _OWN_TOOLS:
            if tool.name is None:
                raise invalid(f"tools[{index}].name", f"tools[{index}].name is required.")
            schema = "" if tool.input_schema is None else json_text(tool.input_schema)
            yield (
                index,
                completion_pb2.Tool(
                    name=tool.name,
                    description=tool.description or "",
                    parameters_json=schema,
                    strict=bool(tool.strict),
                ),
            )


def _tool_choice(body: PromptBody) -> completion_pb2.ToolChoice | None:
    match body.tool_choice:
        case None:
            return None
        case NamedChoice(name=name):
            return completion_pb2.ToolChoice(name=name)
        case AutoChoice():
            mode = completion_pb2.TOOL_MODE_AUTO
        case AnyChoice():
            mode = completion_pb2.TOOL_MODE_REQUIRED
        case NoChoice():
            mode = completion_pb2.TOOL_MODE_NONE
    return completion_pb2.ToolChoice(mode=mode)


def _grammar(body: PromptBody) -> types_pb2.GrammarSpec | None:
    config = body.output_config
    wanted = body.output_format if config is None or config.format is None else config.format
    return None if wanted is None else types_pb2.GrammarSpec(json_schema=json_text(wanted.schema))


def _template_arguments(body: PromptBody) -> str:
    if body.thinking is None:
        return ""
    thinks = body.thinking.type != "disabled"
    return msgspec.json.encode({"enable_thinking": thinks}).decode()


def _effort(body: PromptBody) -> str:
    is_off = body.thinking is not None and body.thinking.type == "disabled"
    effort = None if body.output_config is None else body.output_config.effort
    return "" if is_off or effort is None else effort
