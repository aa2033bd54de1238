"""Messages of a chat: JSON types, and their conversion to protos.

The tokenizer service checks the fields that a role may have, for gRPC clients too.
"""

import re
from collections.abc import Sequence
from typing import Annotated, Any, Literal, TypeAlias

from msgspec import Meta, Struct

from services.http_shim.documents.request_documents import (
    RequestDocument,
    check_count,
    document_text,
    encoded_document,
)
from services.http_shim.formats.custom_tools import arguments_of
from services.http_shim.formats.tool_fields import MessageCall
from services.http_shim.images.request_images import RequestImages
from tokenwire.errors import invalid
from tokenwire.pb.completion.v1 import completion_pb2

__all__ = [
    "Message",
    "message_param",
    "messages_of",
    "take_message_documents",
    "take_message_images",
]

_ROLES = {
    "system": completion_pb2.ROLE_SYSTEM,
    "developer": completion_pb2.ROLE_DEVELOPER,
    "user": completion_pb2.ROLE_USER,
    "assistant": completion_pb2.ROLE_ASSISTANT,
    "tool": completion_pb2.ROLE_TOOL,
}
_BOUNDED = Meta(max_length=4_096)  # the tokenizer service has lower limits
_REASONING = re.compile(r"messages\[(?P<message>\d+)\]\.reasoning")
_CALL = re.compile(
    r"(?P<call>messages\[(?P<message>\d+)\]\.tool_calls\[(?P<at>\d+)\])"
    r"\.(?P<field>name|arguments_json)"
)
_IMAGE = re.compile(r"messages\[(?P<message>\d+)\]\.parts\[(?P<part>\d+)\]\.image")


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
    content: str | Annotated[list[Part], _BOUNDED] | None = None
    refusal: str | None = None
    name: str | None = None
    tool_calls: Annotated[list[MessageCall], _BOUNDED] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    function_call: Any = None


def messages_of(messages: Sequence[Message] | None) -> list[completion_pb2.Message]:
    """Convert the messages, with an empty place for each image.

    Raises INVALID_ARGUMENT for what the proto can't express.
    """
    if messages is None:
        raise invalid("messages", "messages is required: a list of messages.")
    return [_message(message, f"messages[{i}]") for i, message in enumerate(messages)]


def take_message_images(messages: Sequence[Message] | None) -> RequestImages:
    """Return the images of the messages, and leave an empty URL in place of each.

    Raises INVALID_ARGUMENT with the client's name of a field.
    """
    images = RequestImages()
    for i, message in enumerate(messages or ()):
        if isinstance(message.content, list):
            for j, part in enumerate(message.content):
                if isinstance(part, ImagePart):
                    param = _image_param(part, f"messages[{i}].content[{j}]")
                    images.add(_take_url(part), param)
    return images


def take_message_documents(messages: Sequence[Message] | None) -> list[RequestDocument]:
    """Return the files of the messages; the text of each then stands in place of its data.

    Raises INVALID_ARGUMENT with the client's name of a field.
    """
    documents: list[RequestDocument] = []
    for i, message in enumerate(messages or ()):
        for j, part in enumerate(message.content if isinstance(message.content, list) else ()):
            if isinstance(part, FilePart):
                param = f"messages[{i}].content[{j}].file"
                check_count(documents, param)
                documents.append(_document(part.file, param))
    return documents


def _document(file: FileData, param: str) -> RequestDocument:
    def put(text: str) -> None:
        file.file_data = text

    if (file.file_data is None) == (file.file_id is None):
        raise invalid(param, f"{param} must have file_data or file_id, and not both.")
    if file.file_id is not None:
        return RequestDocument(f"{param}.file_id", put, file_id=file.file_id)
    data, file.file_data = file.file_data or "", None
    return encoded_document(data, "", f"{param}.file_data", put)


def message_param(path: str, messages: Sequence[Message]) -> str:
    """Return the client's name of a field: "messages[0].parts" becomes "messages[0].content"."""
    if place := _IMAGE.fullmatch(path):
        i, j = int(place["message"]), int(place["part"])
        part = (messages[i].content or ())[j]
        return _image_param(part, f"messages[{i}].content[{j}]")
    if place := _CALL.fullmatch(path):
        calls = messages[int(place["message"])].tool_calls or ()
        return f"{place['call']}.{_call_field(calls[int(place['at'])], place['field'])}"
    if place := _REASONING.fullmatch(path):
        message = messages[int(place["message"])]
        is_short = bool(message.reasoning) and not message.reasoning_content
        return path if is_short else f"{path}_content"
    return path.replace(".parts", ".content")


def _take_url(part: ImagePart) -> str:
    if isinstance(part.image_url, str):
        url, part.image_url = part.image_url, ""
    else:
        url, part.image_url.url = part.image_url.url, ""
    return url


def _image_param(part: Part | str, param: str) -> str:
    """Return the client's name of an image, in the form of `image_url` that the client chose."""
    is_object = isinstance(part, ImagePart) and isinstance(part.image_url, ImageUrl)
    return f"{param}.image_url.url" if is_object else f"{param}.image_url"


def _message(message: Message, param: str) -> completion_pb2.Message:
    if message.function_call is not None:
        raise invalid(f"{param}.function_call", "function_call is not supported; use tool_calls.")
    return completion_pb2.Message(
        role=_ROLES[message.role],
        parts=_parts(message),
        name=message.name or "",
        tool_calls=[_call(call) for call in message.tool_calls or ()],
        tool_call_id=message.tool_call_id or "",
        reasoning=message.reasoning_content or message.reasoning or "",
    )


def _parts(message: Message) -> list[completion_pb2.ContentPart]:
    content = message.content
    parts = [TextPart(content)] if isinstance(content, str) else content or []
    converted = [_part(part) for part in parts]
    if message.refusal is not None:
        converted.append(completion_pb2.ContentPart(text=message.refusal))
    return converted


def _part(part: Part) -> completion_pb2.ContentPart:
    match part:
        case TextPart():
            return completion_pb2.ContentPart(text=part.text)
        case RefusalPart():
            return completion_pb2.ContentPart(text=part.refusal)
        case ImagePart():
            return completion_pb2.ContentPart(image=b"")
        case FilePart():
            text = document_text(part.file.filename, part.file.file_data)
            return completion_pb2.ContentPart(text=text)


def _call(call: MessageCall) -> completion_pb2.ToolCall:
    called = completion_pb2.ToolCall(id=call.id)
    if call.function is not None:
        called.name, called.arguments_json = call.function.name, call.function.arguments
    elif call.custom is not None:
        called.name, called.arguments_json = call.custom.name, arguments_of(call.custom.input)
    return called


def _call_field(call: MessageCall, field: str) -> str:
    if field == "name":
        return f"{call.type}.name"
    return "custom.input" if call.type == "custom" else "function.arguments"
