"""JSON types of chats: POST /v1/chat/completions, and the conversations of other routes."""

from typing import Annotated, Any, Literal, TypeAlias

from msgspec import UNSET, Struct, UnsetType

from services.http_shim.dialects.choices import PromptLogprobs
from services.http_shim.dialects.content_logprobs import ContentLogprob
from services.http_shim.dialects.fields import (
    BOUNDED,
    Continuation,
    GenerationPrompt,
    ModelName,
    ParallelCalls,
    ReasoningEffort,
    TemplateArguments,
    TemplateName,
    Uint32,
    about,
)
from services.http_shim.dialects.foreign_fields import FOREIGN_TO_CHATS
from services.http_shim.dialects.generation import GenerationBody
from services.http_shim.dialects.tools import MessageCall, Tool, ToolChoice
from tokenwire.pb.completion.v1 import completion_pb2

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
    "Prediction",
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
    content: Annotated[
        str | Annotated[list[Part], BOUNDED] | None,
        about("A text, or parts.", "parts", completion_pb2.Message),
    ] = None
    refusal: str | None = None
    name: str | None = None
    tool_calls: Annotated[
        Annotated[list[MessageCall], BOUNDED] | None,
        about("Calls of the assistant.", "tool_calls", completion_pb2.Message),
    ] = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    function_call: Annotated[
        Any, about("Not supported: use tool_calls.", anyOf=[{"type": "null"}])
    ] = None


class Prediction(Struct, tag_field="type", tag="content"):
    """The answer that a client expects."""

    content: Annotated[
        str | Annotated[list[TextPart], BOUNDED], about("The text, or its parts.", "prediction")
    ]


class ChatBody(GenerationBody):
    """The body of POST /v1/chat/completions."""

    foreign = FOREIGN_TO_CHATS

    max_tokens: Annotated[
        Uint32 | None,
        about("Most tokens of each choice; absent = the rest of the context.", minimum=1),
    ] = None
    max_completion_tokens: Annotated[
        Uint32 | None, about("Another name of max_tokens.", minimum=1)
    ] = None
    messages: Annotated[
        Annotated[list[Message], BOUNDED] | None,
        about("The conversation.", "conversation.messages"),
    ] = None
    parallel_tool_calls: ParallelCalls = None
    logprobs: Annotated[
        bool | None,
        about("Return the log probability of each token of the content.", default=False),
    ] = None
    top_logprobs: Annotated[
        Uint32 | None, about("Candidates for each token; needs logprobs.", "logprobs")
    ] = None
    chat_template: TemplateName = None
    chat_template_kwargs: TemplateArguments = None
    add_generation_prompt: GenerationPrompt = None
    continue_final_message: Continuation = None
    reasoning_effort: ReasoningEffort = None
    truncation: Annotated[
        Literal["auto", "disabled"] | None,
        about(
            "`auto` leaves out the oldest messages of a prompt that is too long, `disabled` "
            "refuses it.",
            default="disabled",
        ),
    ] = None
    echo: Annotated[
        bool | None,
        about("Start the answer with the last message if it is the assistant's.", default=False),
    ] = None
    prediction: Annotated[
        Prediction | None,
        about(
            "The answer that is expected, such as a file that it edits: the answer comes faster "
            "where it is right, and is the same otherwise. Needs n = 1."
        ),
    ] = None
    functions: Annotated[Any, about("Not supported: use tools.", anyOf=[{"type": "null"}])] = None
    function_call: Annotated[
        Any, about("Not supported: use tool_choice.", anyOf=[{"type": "null"}])
    ] = None


class TemplateBody(Struct):
    """The body of POST /apply-template."""

    model: ModelName = None
    messages: Annotated[
        Annotated[list[Message], BOUNDED] | None,
        about("A conversation in place of the text.", "conversation.messages"),
    ] = None
    tools: Annotated[
        Annotated[list[Tool], BOUNDED] | None, about("Tools that the prompt names.", "tools")
    ] = None
    tool_choice: Annotated[
        ToolChoice | None,
        about("Tool to call, or tools to choose from; `required` = any, `none` = no call."),
    ] = None
    chat_template: TemplateName = None
    chat_template_kwargs: TemplateArguments = None
    add_generation_prompt: GenerationPrompt = None
    continue_final_message: Continuation = None
    reasoning_effort: ReasoningEffort = None


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
