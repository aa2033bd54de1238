"""JSON types of chats: POST /v1/chat/completions, and the conversations of other routes."""

from typing import Annotated, Any, Literal, TypeAlias

from msgspec import UNSET, Struct, UnsetType

from services.http_shim.dialects.choices import PromptLogprobs
from services.http_shim.dialects.content_logprobs import ContentLogprob
from services.http_shim.dialects.fields import BOUNDED, JsonObject, Uint32
from services.http_shim.dialects.foreign_fields import FOREIGN_TO_CHATS
from services.http_shim.dialects.generation import GenerationBody
from services.http_shim.dialects.tools import MessageCall, Tool, ToolChoice

__all__ = [
    "AnswerCall",
    "AnswerCustomTool",
    "AnswerFunction",
    "AnswerMessage",
    "CallDelta",
    "ChatBody",
    "ChatChoice",
    "ChatChunkChoice",
    "ChatLogprobs",
    "ChatPromptLogprobs",
    "CustomDelta",
    "FileData",
    "FilePart",
    "FunctionDelta",
    "ImagePart",
    "ImageUrl",
    "Message",
    "MessageDelta",
    "Part",
    "RefusalPart",
    "TemplateBody",
    "TextPart",
]


class TextPart(Struct, tag_field="type", tag="text"):
    """A content part with text."""

    text: str


class RefusalPart(Struct, tag_field="type", tag="refusal"):
    """A content part with a refusal that the model wrote, which is text like any other."""

    refusal: str


class ImageUrl(Struct):
    """The data URL of an image, or an http(s) URL if the server fetches it. No effect: `detail`."""

    url: str
    detail: str | None = None


class ImagePart(Struct, tag_field="type", tag="image_url"):
    """A content part with an image; its URL may stand without the object around it."""

    image_url: ImageUrl | str


class FileData(Struct):
    """A PDF or text as a data URL, or the id of a file of /v1/files; `filename` is its title."""

    file_data: str | None = None
    file_id: str | None = None
    filename: str | None = None


class FilePart(Struct, tag_field="type", tag="file"):
    """A content part with a file, which becomes text."""

    file: FileData


Part: TypeAlias = TextPart | RefusalPart | ImagePart | FilePart


class Message(Struct):
    """One of `messages`. `reasoning` is another name of `reasoning_content`."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | Annotated[list[Part], BOUNDED] | None = None
    refusal: str | None = None
    name: str | None = None
    tool_calls: Annotated[list[MessageCall], BOUNDED] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    function_call: Any = None


class ChatBody(GenerationBody):
    """The body of POST /v1/chat/completions."""

    foreign = FOREIGN_TO_CHATS

    messages: Annotated[list[Message], BOUNDED] | None = None
    parallel_tool_calls: bool | None = None
    logprobs: bool | None = None
    top_logprobs: Uint32 | None = None
    chat_template: str | None = None
    chat_template_kwargs: JsonObject | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    reasoning_effort: str | None = None
    truncation: Literal["auto", "disabled"] | None = None
    echo: bool | None = None
    functions: Any = None
    function_call: Any = None


class TemplateBody(Struct):
    """The body of POST /apply-template."""

    model: str | None = None
    messages: Annotated[list[Message], BOUNDED] | None = None
    tools: Annotated[list[Tool], BOUNDED] | None = None
    tool_choice: ToolChoice | None = None
    chat_template: str | None = None
    chat_template_kwargs: JsonObject | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    reasoning_effort: str | None = None


class ChatLogprobs(Struct):
    """Log probabilities, one entry for each token of the content."""

    content: list[ContentLogprob]
    refusal: None = None


class AnswerFunction(Struct):
    """The called function; `arguments` is JSON text."""

    name: str
    arguments: str


class AnswerCustomTool(Struct):
    """The called custom tool."""

    name: str
    input: str


class AnswerCall(Struct):
    """A tool call, with the field that its type names."""

    id: str
    type: str
    function: AnswerFunction | UnsetType = UNSET
    custom: AnswerCustomTool | UnsetType = UNSET


class AnswerMessage(Struct):
    """The assistant's message. `reasoning` and `reasoning_content` are the same text."""

    role: str
    content: str | None
    refusal: None = None
    reasoning: str | UnsetType = UNSET
    reasoning_content: str | UnsetType = UNSET
    tool_calls: list[AnswerCall] | UnsetType = UNSET


class ChatChoice(Struct):
    """A choice of a whole answer."""

    index: int
    message: AnswerMessage
    logprobs: ChatLogprobs | None
    finish_reason: str
    stop_reason: str | int | None
    matched_stop: str | int | None
    prompt_token_ids: list[int] | UnsetType = UNSET
    token_ids: list[int] | UnsetType = UNSET


class FunctionDelta(Struct):
    """The start of a call, with its name, or a further part of its arguments."""

    name: str | UnsetType = UNSET
    arguments: str = ""


class CustomDelta(Struct):
    """The start of a call of a custom tool, with its name, or a further part of its input."""

    name: str | UnsetType = UNSET
    input: str = ""


class CallDelta(Struct):
    """A part of a tool call."""

    index: int
    id: str | UnsetType = UNSET
    type: str | UnsetType = UNSET
    function: FunctionDelta | UnsetType = UNSET
    custom: CustomDelta | UnsetType = UNSET


class MessageDelta(Struct):
    """A part of a message; the first part has the role."""

    role: str | UnsetType = UNSET
    content: str | UnsetType | None = UNSET
    reasoning: str | UnsetType = UNSET
    reasoning_content: str | UnsetType = UNSET
    tool_calls: list[CallDelta] | UnsetType = UNSET


class ChatChunkChoice(Struct):
    """A part of a choice in a chunk."""

    index: int
    delta: MessageDelta
    logprobs: ChatLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    matched_stop: str | int | UnsetType | None = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET
    token_ids: list[int] | UnsetType = UNSET


class ChatPromptLogprobs(Struct):
    """Scores of the prompt, beside the choices."""

    prompt_logprobs: PromptLogprobs
