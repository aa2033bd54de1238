"""JSON types of responses: POST /v1/responses and /v1/responses/input_tokens."""

from typing import Annotated, Any, Literal, TypeAlias

from msgspec import Struct, field

from services.http_shim.dialects.content_logprobs import ContentLogprob
from services.http_shim.dialects.fields import (
    BOUNDED,
    AnswerTokens,
    IsStreamed,
    JsonObject,
    ModelName,
    ParallelCalls,
    Priority,
    Strings,
    Temperature,
    Timeout,
    TopP,
    Uint32,
    UserLabel,
    about,
)

__all__ = [
    "AnswerReasoning",
    "AnswerText",
    "CallItem",
    "CallOutput",
    "CallOutputItem",
    "Content",
    "CustomCallItem",
    "CustomCallOutput",
    "IncompleteDetails",
    "InputFile",
    "InputImage",
    "InputTokenCount",
    "InputTokens",
    "MessageItem",
    "MessageOutput",
    "OutputItem",
    "OutputTokens",
    "Part",
    "PlainText",
    "ReasoningConfig",
    "ReasoningItem",
    "ReasoningOutput",
    "Refusal",
    "ResponseBody",
    "ResponseFailure",
    "ResponseObject",
    "ResponseUsage",
]


class _Part(Struct, tag_field="type"):
    """A part of a message."""


class InputText(_Part, tag="input_text"):
    """Text of a message."""

    text: str


class OutputText(_Part, tag="output_text"):
    """Text that the model wrote."""

    text: str


class PlainText(_Part, tag="text"):
    """Text."""

    text: str


class Refusal(_Part, tag="refusal"):
    """A refusal that the model wrote."""

    refusal: str


class InputImage(_Part, tag="input_image"):
    """An image as a data URL, or its URL if the server fetches images."""

    image_url: str | None = None
    file_id: str | None = None
    detail: str | None = None


class InputFile(_Part, tag="input_file"):
    """A file, which becomes text: its data as base64 or a data URL, or its id in /v1/files."""

    file_data: str | None = None
    file_id: str | None = None
    file_url: str | None = None
    filename: str | None = None
    detail: str | None = None


Part: TypeAlias = InputText | OutputText | PlainText | Refusal | InputImage | InputFile
Content: TypeAlias = str | Annotated[list[Part], BOUNDED]


class MessageItem(Struct):
    """A message."""

    role: Literal["user", "system", "developer", "assistant"]
    content: Content


class CallItem(Struct):
    """A call of a function that the model made."""

    call_id: str
    name: str
    arguments: str


class CustomCallItem(Struct):
    """A call of a custom tool that the model made."""

    call_id: str
    name: str
    input: str


class CallOutputItem(Struct):
    """The result of a function or a custom tool."""

    call_id: str
    output: Content | None = None


class ReasoningText(Struct):
    """A piece of reasoning."""

    text: str


class ReasoningItem(Struct):
    """Reasoning of the model, or its summary."""

    summary: list[ReasoningText] = []
    content: list[ReasoningText] | None = None


class TextFormat(Struct):
    """`text.format`: free text, JSON, or JSON that matches a schema."""

    type: Literal["text", "json_object", "json_schema"]
    name: str | None = None
    schema: JsonObject | None = None
    strict: bool | None = None
    description: str | None = None


class TextConfig(Struct):
    """`text`."""

    format: TextFormat | None = None


class ReasoningConfig(Struct):
    """`reasoning`. Its summaries are not made: answers have the reasoning itself."""

    effort: str | None = None
    summary: str | None = None
    generate_summary: str | None = None


class ResponseBody(Struct):
    """The body of POST /v1/responses."""

    model: ModelName = None
    input: Annotated[
        str | Annotated[list[JsonObject], BOUNDED] | None,
        about("A text, or items: messages, calls of functions and their results."),
    ] = None
    instructions: Annotated[
        str | None, about("A system message before the others; it is not passed on.")
    ] = None
    previous_response_id: Annotated[
        str | None, about("Id of the kept response that this one continues.")
    ] = None
    store: Annotated[bool | None, about("Keep the response. Default: true.", default=True)] = None
    stream: IsStreamed = None
    background: Annotated[
        bool | None,
        about(
            "Run without the client, which reads or cancels the response later; needs store.",
            default=False,
        ),
    ] = None
    max_output_tokens: AnswerTokens = None
    temperature: Temperature = None
    top_p: TopP = None
    top_logprobs: Annotated[
        Uint32 | None, about("Candidates for each token of the text.", "logprobs")
    ] = None
    include: Annotated[
        Strings | None, about("`message.output_text.logprobs` adds log probabilities.")
    ] = None
    tools: Annotated[
        Annotated[list[JsonObject], BOUNDED] | None,
        about(
            "Functions and custom tools. Tools that only OpenAI's servers run are left out.",
            "tools",
        ),
    ] = None
    tool_choice: Annotated[
        str | JsonObject | None, about("`auto`, `none`, `required`, or a tool.")
    ] = None
    parallel_tool_calls: ParallelCalls = None
    text: Annotated[
        TextConfig | None, about("`format` constrains the answer: JSON, or a schema.")
    ] = None
    reasoning: Annotated[ReasoningConfig | None, about("`effort`, for the chat template.")] = None
    truncation: Annotated[
        Literal["auto", "disabled"] | None,
        about(
            "`auto` leaves out the oldest items of a prompt that is too long; `disabled` "
            "(default) refuses it.",
            default="disabled",
        ),
    ] = None
    metadata: Annotated[dict[str, str] | None, about("Returned with the response.")] = None
    user: UserLabel = None
    safety_identifier: Annotated[str | None, about("A label for logs.")] = None
    prompt_cache_key: Annotated[str | None, about("No effect: all prefixes are cached.")] = None
    conversation: Annotated[Any, about("Not supported: use previous_response_id.")] = None
    prompt: Annotated[Any, about("Not supported: send the text as input.")] = None
    # our own
    priority: Priority = None
    timeout: Timeout = None


class AnswerText(Struct, tag_field="type", tag="output_text"):
    """Text of an answer."""

    text: str
    annotations: list[None] = []
    logprobs: list[ContentLogprob] = []


class MessageOutput(Struct, tag_field="type", tag="message"):
    """A message of an answer."""

    id: str
    status: str
    content: list[AnswerText]
    role: str = "assistant"


class AnswerReasoning(Struct, tag_field="type", tag="reasoning_text"):
    """Reasoning of an answer."""

    text: str


class ReasoningOutput(Struct, tag_field="type", tag="reasoning"):
    """Reasoning of an answer; it has no summary."""

    id: str
    status: str
    content: list[AnswerReasoning]
    summary: list[None] = []


class CallOutput(Struct, tag_field="type", tag="function_call"):
    """A call of a function; `arguments` is JSON text."""

    id: str
    call_id: str
    name: str
    arguments: str
    status: str


class CustomCallOutput(Struct, tag_field="type", tag="custom_tool_call"):
    """A call of a custom tool."""

    id: str
    call_id: str
    name: str
    input: str
    status: str


OutputItem: TypeAlias = MessageOutput | ReasoningOutput | CallOutput | CustomCallOutput


class InputTokens(Struct):
    """Tokens of the prompt."""

    cached_tokens: int = 0


class OutputTokens(Struct):
    """Tokens of the answer, of which some are reasoning."""

    reasoning_tokens: int = 0


class ResponseUsage(Struct):
    """Tokens of a response."""

    input_tokens: int
    input_tokens_details: InputTokens
    output_tokens: int
    output_tokens_details: OutputTokens
    total_tokens: int


class ResponseFailure(Struct):
    """The failure of a response."""

    code: str
    message: str


class IncompleteDetails(Struct):
    """Reason for which a response is incomplete."""

    reason: str


class ResponseObject(Struct):
    """A response."""

    id: str
    created_at: int
    status: str
    model: str
    output: list[OutputItem]
    object: str = "response"
    background: bool = False
    completed_at: int | None = None
    error: ResponseFailure | None = None
    incomplete_details: IncompleteDetails | None = None
    instructions: str | None = None
    max_output_tokens: int | None = None
    metadata: dict[str, str] = field(default_factory=dict)
    parallel_tool_calls: bool = True
    previous_response_id: str | None = None
    reasoning: dict[str, Any] = field(default_factory=dict)
    service_tier: str = "default"
    store: bool = True
    temperature: float | None = None
    text: dict[str, Any] = field(default_factory=dict)
    tool_choice: str | dict[str, Any] = "auto"
    tools: list[dict[str, Any]] = field(default_factory=list)
    top_logprobs: int = 0
    top_p: float | None = None
    truncation: str = "disabled"
    usage: ResponseUsage | None = None
    user: str | None = None


class InputTokenCount(Struct):
    """Answer of /v1/responses/input_tokens."""

    input_tokens: int
    object: str = "response.input_tokens"
