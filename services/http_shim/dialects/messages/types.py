"""JSON types of messages: POST /v1/messages and /v1/messages/count_tokens."""

from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeAlias

import msgspec
from msgspec import UNSET, Raw, Struct, UnsetType

from services.http_shim.dialects.fields import (
    BOUNDED,
    JsonObject,
    LeftOut,
    Priority,
    Seconds,
    Strings,
    TopK,
    Uint32,
    about,
)

__all__ = [
    "AnswerBlock",
    "AnswerText",
    "AnswerThinking",
    "AnswerToolUse",
    "AnyChoice",
    "AutoChoice",
    "Block",
    "CompactionBlock",
    "CountTokensBody",
    "DocumentBlock",
    "ErrorCode",
    "ErrorDetail",
    "ImageBlock",
    "InputMessage",
    "MessageAnswer",
    "MessageError",
    "MessageUsage",
    "MessagesBody",
    "NamedChoice",
    "NoChoice",
    "PromptBody",
    "RedactedThinkingBlock",
    "SearchResultBlock",
    "ServerResultBlock",
    "SystemPrompt",
    "TextBlock",
    "ThinkingBlock",
    "TokenCount",
    "ToolResultBlock",
    "ToolUseBlock",
]


class _ServerBlock(LeftOut, tag_field="type"):
    """A block that only Anthropic's servers make or read, in a history that comes from there.

    It is left out of the prompt. What the assistant said about it stays.
    """


def _server_blocks(*tags: str) -> Any:
    """Return a union of the types of such blocks."""
    kinds = [
        msgspec.defstruct(
            "".join(word.capitalize() for word in tag.split("_")) + "Block",
            [],
            bases=(_ServerBlock,),
            namespace={"__doc__": _ServerBlock.__doc__, "__module__": __name__},
            tag=tag,
        )
        for tag in tags
    ]
    union: Any = kinds[0]
    for kind in kinds[1:]:
        union |= kind
    return union


if TYPE_CHECKING:
    ServerBlock: TypeAlias = _ServerBlock
    ServerResultBlock: TypeAlias = _ServerBlock
else:
    ServerResultBlock = _server_blocks("tool_reference", "browser_state")
    ServerBlock = _server_blocks(
        "server_tool_use",
        "web_search_tool_result",
        "web_fetch_tool_result",
        "code_execution_tool_result",
        "bash_code_execution_tool_result",
        "text_editor_code_execution_tool_result",
        "tool_search_tool_result",
        "advisor_tool_result",
        "mcp_tool_use",
        "mcp_tool_result",
        "mcp_tool_listing",
        "container_upload",
        "tool_addition",
        "tool_removal",
        "fallback",
    )


class _Block(Struct, tag_field="type"):
    """A block. `cache_control` has no effect: all prefixes are cached."""


class TextBlock(_Block, tag="text"):
    """Text."""

    text: str
    cache_control: Any = None


class ImageSource(Struct):
    """An image in base64, or its URL if the server fetches images."""

    type: Literal["base64", "url"]
    media_type: str | None = None
    data: str | None = None
    url: str | None = None


class ImageBlock(_Block, tag="image"):
    """An image."""

    source: ImageSource
    cache_control: Any = None


class DocumentSource(Struct):
    """A document: text, a PDF in base64, a file of /v1/files, or blocks of text and images."""

    type: Literal["text", "base64", "file", "content", "url"]
    data: str | None = None
    media_type: str | None = None
    file_id: str | None = None
    content: str | Annotated[list[TextBlock | ImageBlock], BOUNDED] | None = None
    url: str | None = None


class DocumentBlock(_Block, tag="document"):
    """A document, which becomes text under its title."""

    source: DocumentSource
    title: str | None = None
    context: str | None = None
    cache_control: Any = None


class SearchResultBlock(_Block, tag="search_result"):
    """Result of a search of the client, which becomes text under its title and source."""

    title: str
    source: str
    content: Annotated[list[TextBlock], BOUNDED]
    cache_control: Any = None


class CompactionBlock(_Block, tag="compaction"):
    """A summary, which becomes text, of messages that were left out."""

    content: str | None = None
    cache_control: Any = None


class ToolUseBlock(_Block, tag="tool_use"):
    """A call that the assistant made."""

    id: str
    name: str
    input: JsonObject
    cache_control: Any = None


class ToolResultBlock(_Block, tag="tool_result"):
    """The answer of a tool."""

    tool_use_id: str
    content: (
        str
        | Annotated[
            list[TextBlock | ImageBlock | DocumentBlock | SearchResultBlock | ServerResultBlock],
            BOUNDED,
        ]
        | None
    ) = None
    is_error: bool | None = None
    cache_control: Any = None


class ThinkingBlock(_Block, tag="thinking"):
    """Reasoning of the assistant. The signature has no effect."""

    thinking: str
    signature: str | None = None


class RedactedThinkingBlock(_Block, tag="redacted_thinking"):
    """Reasoning that only its author can read, and that is left out."""

    data: str


Block: TypeAlias = (
    TextBlock
    | ImageBlock
    | DocumentBlock
    | SearchResultBlock
    | CompactionBlock
    | ToolUseBlock
    | ToolResultBlock
    | ThinkingBlock
    | RedactedThinkingBlock
    | ServerBlock
)
SystemPrompt: TypeAlias = str | Annotated[list[TextBlock], BOUNDED]


class InputMessage(Struct):
    """One of `messages`."""

    role: Literal["user", "assistant", "system"]
    content: str | Annotated[list[Block], BOUNDED]


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

    model: Annotated[
        str | None, about("Id, alias, or id:variant; absent or `default` = the only model.")
    ] = None
    messages: Annotated[
        Annotated[list[InputMessage], BOUNDED] | None,
        about("The conversation. A last message of the assistant is continued."),
    ] = None
    system: Annotated[SystemPrompt | None, about("Instructions.")] = None
    tools: Annotated[
        Annotated[list[ToolDefinition], BOUNDED] | None,
        about(
            "Tools that the client runs. Those of Anthropic's own servers are left out, and "
            "named in x-tokenwire-ignored."
        ),
    ] = None
    tool_choice: Annotated[
        AutoChoice | AnyChoice | NamedChoice | NoChoice | None,
        about("Whether a tool must be called; default auto."),
    ] = None
    thinking: Annotated[
        Thinking | None,
        about(
            "Whether the model reasons first, for templates with that choice. The budget "
            "has no effect."
        ),
    ] = None
    output_config: Annotated[
        OutputConfig | None, about("A schema for the answer, and the amount of reasoning.")
    ] = None
    output_format: Annotated[OutputFormat | None, about("A schema for the answer.")] = None
    cache_control: Annotated[Any, about("No effect: all prefixes are cached.")] = None


class CountTokensBody(PromptBody):
    """The body of POST /v1/messages/count_tokens."""


class MessagesBody(PromptBody):
    """The body of POST /v1/messages."""

    max_tokens: Annotated[
        Uint32 | None, about("Most tokens of the answer, with its reasoning.")
    ] = None
    stop_sequences: Annotated[Strings | None, about("Strings that end the answer.")] = None
    stream: Annotated[
        bool | None,
        about("Answer with server-sent events; the last one is `data: [DONE]`.", default=False),
    ] = None
    temperature: Annotated[float | None, about("Temperature; 0 = greedy.", default=1)] = None
    top_p: Annotated[float | None, about("Nucleus mass.", default=1)] = None
    top_k: Annotated[
        TopK | None, about("Number of likeliest tokens to sample from; -1 and 0 = all.")
    ] = None
    metadata: Annotated[Metadata | None, about("`user_id` is a label for logs.")] = None
    thread: Annotated[
        Thread | None, about("`create` has no effect; `continue` is refused: no threads are held.")
    ] = None
    compaction: Annotated[
        Any, about("Not supported: ask for a summary in messages.", anyOf=[{"type": "null"}])
    ] = None
    # our own
    priority: Annotated[
        Priority | None, about("Priority, lower first; at least 0 with API keys.", default=0)
    ] = None
    timeout: Annotated[
        Seconds | None, about("Seconds after which the request fails with 504; absent = none.")
    ] = None


class MessageUsage(Struct):
    """Tokens of an answer; `input_tokens` are those that were not cached."""

    input_tokens: int
    output_tokens: int
    cache_read_input_tokens: int = 0
    cache_creation_input_tokens: int = 0


class AnswerText(Struct, tag_field="type", tag="text"):
    """Text of an answer."""

    text: str


class AnswerThinking(Struct, tag_field="type", tag="thinking"):
    """Reasoning of an answer, without a signature."""

    thinking: str
    signature: str = ""


class AnswerToolUse(Struct, tag_field="type", tag="tool_use"):
    """A call of a tool."""

    id: str
    name: str
    input: Raw


AnswerBlock: TypeAlias = AnswerText | AnswerThinking | AnswerToolUse


class MessageAnswer(Struct):
    """A whole answer."""

    id: str
    type: str
    role: str
    model: str
    content: list[AnswerBlock]
    stop_reason: str | None
    stop_sequence: str | None
    usage: MessageUsage


class ErrorCode(Struct):
    """The code of a failure for which clients have a remedy."""

    error_code: str


class ErrorDetail(Struct):
    """The failure."""

    type: str
    message: str
    details: ErrorCode | UnsetType = UNSET


class MessageError(Struct, tag_field="type", tag="error"):
    """The JSON body of an error."""

    error: ErrorDetail
    request_id: str


class TokenCount(Struct):
    """Answer of /v1/messages/count_tokens."""

    input_tokens: int
