"""Reading of chats, and of the conversations of other routes."""

from collections.abc import Mapping

from services.common.constraint_texts import json_text
from services.http_shim.dialects.bodies import body_of
from services.http_shim.dialects.chat.types import (
    ChatBody,
    FileData,
    FilePart,
    ImagePart,
    ImageUrl,
    Message,
    Part,
    RefusalPart,
    TemplateBody,
    TextPart,
)
from services.http_shim.dialects.chat.write import ChatWriter
from services.http_shim.dialects.choices import AnswerOptions
from services.http_shim.dialects.custom_tools import arguments_of
from services.http_shim.dialects.fields import JsonObject
from services.http_shim.dialects.foreign_fields import FOREIGN_TO_CHATS, check_foreign
from services.http_shim.dialects.generation import NAMES, read_generation
from services.http_shim.dialects.reading import MessageReading, Reading
from services.http_shim.dialects.tools import MessageCall, custom_names, read_tools
from services.http_shim.documents.request_documents import (
    RequestDocument,
    document_text,
    encoded_document,
)
from tokenwire.errors import invalid
from tokenwire.pb.completion.v1 import completion_pb2

__all__ = ["read_chat", "read_template"]

_NAMES: Mapping[str, str] = {
    **NAMES,
    "conversation.template": "chat_template",
    "conversation.template_arguments_json": "chat_template_kwargs",
    "conversation.continue_last_message": "continue_final_message",
    "drop_oldest_messages": "truncation",
}
_ROLES = {
    "system": completion_pb2.ROLE_SYSTEM,
    "developer": completion_pb2.ROLE_DEVELOPER,
    "user": completion_pb2.ROLE_USER,
    "assistant": completion_pb2.ROLE_ASSISTANT,
    "tool": completion_pb2.ROLE_TOOL,
}


def read_chat(fields: JsonObject) -> Reading:
    """Read the body of a chat. Raises INVALID_ARGUMENT with the client's name of a field."""
    body, unknown = body_of(ChatBody, fields)
    ignored = check_foreign(unknown, fields, FOREIGN_TO_CHATS)
    for name, remedy in (("functions", "tools"), ("function_call", "tool_choice")):
        if getattr(body, name) is not None:
            raise invalid(name, f"{name} is not supported; use {remedy}.")
    if body.top_logprobs is not None and not body.logprobs:
        raise invalid("top_logprobs", "top_logprobs needs logprobs: true.")
    reading = read_generation(body, ignored, _NAMES)
    _read_conversation(reading, body)
    request = reading.request
    if body.parallel_tool_calls is not None:
        request.parallel_tool_calls = body.parallel_tool_calls
    if body.logprobs:
        request.logprobs = body.top_logprobs or 0
    if body.top_logprobs is not None:
        reading.note("logprobs", "top_logprobs")
    if body.prediction is not None:
        content = body.prediction.content
        request.prediction = (
            content if isinstance(content, str) else "".join(part.text for part in content)
        )
    request.drop_oldest_messages = body.truncation == "auto"
    request.echo = bool(body.echo)
    options = AnswerOptions.of(body, logprobs=bool(body.logprobs))
    reading.writer = ChatWriter(options, custom_names(body.tools))
    return reading


def read_template(body: TemplateBody, ignored: list[str]) -> Reading:
    """Read the conversation of a body. Raises INVALID_ARGUMENT with the client's name."""
    reading = Reading(ignored, _NAMES)
    _read_conversation(reading, body)
    read_tools(reading, body.tools, body.tool_choice)
    return reading


def _read_conversation(reading: Reading, body: ChatBody | TemplateBody) -> None:
    if body.add_generation_prompt and body.continue_final_message:
        raise invalid(
            "add_generation_prompt",
            "add_generation_prompt and continue_final_message exclude each other; set one of them.",
        )
    if body.messages is None:
        raise invalid("messages", "messages is required: a list of messages.")
    conversation = reading.request.conversation
    conversation.SetInParent()
    for index, message in enumerate(body.messages):
        _read_message(reading, message, f"messages[{index}]")
    if body.chat_template:
        conversation.template = body.chat_template
    if body.chat_template_kwargs is not None:
        conversation.template_arguments_json = json_text(body.chat_template_kwargs)
    if body.add_generation_prompt is not None:
        conversation.add_generation_prompt = body.add_generation_prompt
    conversation.continue_last_message = bool(body.continue_final_message)
    conversation.reasoning_effort = body.reasoning_effort or ""


def _read_message(reading: Reading, message: Message, name: str) -> None:
    if message.function_call is not None:
        raise invalid(f"{name}.function_call", "function_call is not supported; use tool_calls.")
    made = reading.add_message(_ROLES[message.role], name, is_alike=True)
    made.note("parts", f"{name}.content")
    _read_content(made, message, f"{name}.content")
    made.message.name = message.name or ""
    made.message.tool_call_id = message.tool_call_id or ""
    made.message.reasoning = message.reasoning_content or message.reasoning or ""
    if message.reasoning and not message.reasoning_content:
        made.note("reasoning", f"{name}.reasoning")
    else:
        made.note("reasoning", f"{name}.reasoning_content")
    for index, call in enumerate(message.tool_calls or ()):
        _read_call(reading, made, call, f"{name}.tool_calls[{index}]")


def _read_content(made: MessageReading, message: Message, name: str) -> None:
    if isinstance(message.content, str):
        made.add_text(message.content, name)
    else:
        for index, part in enumerate(message.content or ()):
            _read_part(made, part, f"{name}[{index}]")
    if message.refusal is not None:
        made.add_text(message.refusal, name)


def _read_part(made: MessageReading, part: Part, name: str) -> None:
    match part:
        case TextPart():
            made.add_text(part.text, name)
        case RefusalPart():
            made.add_text(part.refusal, name)
        case ImagePart(image_url=str() as url):
            made.add_image(url, f"{name}.image_url", f"{name}.image_url")
        case ImagePart(image_url=ImageUrl() as image):
            made.add_image(image.url, f"{name}.image_url.url", f"{name}.image_url.url")
        case FilePart():
            _read_file(made, part.file, name)


def _read_file(made: MessageReading, file: FileData, name: str) -> None:
    if (file.file_data is None) == (file.file_id is None):
        raise invalid(f"{name}.file", f"{name}.file must have file_data or file_id, and not both.")
    if file.file_id == "":
        raise invalid(f"{name}.file.file_id", f"{name}.file.file_id is empty.")
    if file.file_id is not None:
        document = RequestDocument(f"{name}.file.file_id", file_id=file.file_id)
    else:
        document = encoded_document(file.file_data or "", "", f"{name}.file.file_data")
    title = file.filename  # the function below must not hold the data of `file`
    made.add_document(document, name, lambda text: document_text(title, text))


def _read_call(reading: Reading, made: MessageReading, call: MessageCall, name: str) -> None:
    called, arguments, at = "", "", f"{call.type}.arguments"
    if call.function is not None:
        called, arguments = call.function.name, call.function.arguments
    elif call.custom is not None:
        called, arguments, at = call.custom.name, arguments_of(call.custom.input), "custom.input"
    path = made.add_call(call.id, called, arguments, name)
    reading.note(f"{path}.id", f"{name}.id")
    reading.note(f"{path}.name", f"{name}.{call.type}.name")
    reading.note(f"{path}.arguments_json", f"{name}.{at}")
