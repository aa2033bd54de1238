"""Messages of a chat: JSON types, and their conversion to protos.

The tokenizer service checks the fields that a role may have, for gRPC clients too.
"""

import re
from collections.abc import Iterable, Sequence
from typing import Annotated, Any, Literal

from msgspec import Meta, Struct

from services.http_shim.images.request_images import RequestImages
from tokenwire.errors import invalid
from tokenwire.pb.completion.v1 import completion_pb2

__all__ = [
    "CalledFunction",
    "Message",
    "MessageCall",
    "message_param",
    "messages_of",
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
_CLIENT_NAMES = (
    (re.compile(r"(\.tool_calls\[\d+\])\.name$"), r"\1.function.name"),
    (re.compile(r"(\.tool_calls\[\d+\])\.arguments_json$"), r"\1.function.arguments"),
    (re.compile(r"\.reasoning$"), ".reasoning_content"),
    (re.compile(r"\.parts\b"), ".content"),
)
_IMAGE = re.compile(r"messages\[(?P<message>\d+)\]\.parts\[(?P<part>\d+)\]\.image")


class TextPart(Struct, tag_field="type", tag="text"):
    """A content part with text."""

    text: str


class ImageUrl(Struct):
    """The data URL of an image, or an http(s) URL if the server fetches it. No effect: `detail`."""

    url: str
    detail: str | None = None


class ImagePart(Struct, tag_field="type", tag="image_url"):
    """A content part with an image; its URL may stand without the object around it."""

    image_url: ImageUrl | str


class CalledFunction(Struct):
    """The called function; `arguments` is JSON text."""

    name: str
    arguments: str


class MessageCall(Struct, tag_field="type", tag="function"):
    """A tool call of the assistant."""

    id: str
    function: CalledFunction


class Message(Struct):
    """One of `messages`."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | Annotated[list[TextPart | ImagePart], _BOUNDED] | None = None
    name: str | None = None
    tool_calls: Annotated[list[MessageCall], _BOUNDED] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None
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


def message_param(path: str, messages: Sequence[Message]) -> str:
    """Return the client's name of a field: "messages[0].parts" becomes "messages[0].content"."""
    if place := _IMAGE.fullmatch(path):
        i, j = int(place["message"]), int(place["part"])
        part = (messages[i].content or ())[j]
        return _image_param(part, f"messages[{i}].content[{j}]")
    for pattern, name in _CLIENT_NAMES:
        path = pattern.sub(name, path)
    return path


def _take_url(part: ImagePart) -> str:
    if isinstance(part.image_url, str):
        url, part.image_url = part.image_url, ""
    else:
        url, part.image_url.url = part.image_url.url, ""
    return url


def _image_param(part: TextPart | ImagePart | str, param: str) -> str:
    """Return the client's name of an image, in the form of `image_url` that the client chose."""
    is_object = isinstance(part, ImagePart) and isinstance(part.image_url, ImageUrl)
    return f"{param}.image_url.url" if is_object else f"{param}.image_url"


def _message(message: Message, param: str) -> completion_pb2.Message:
    if message.function_call is not None:
        raise invalid(f"{param}.function_call", "function_call is not supported; use tool_calls.")
    return completion_pb2.Message(
        role=_ROLES[message.role],
        parts=_parts(message.content),
        name=message.name or "",
        tool_calls=[_call(call) for call in message.tool_calls or ()],
        tool_call_id=message.tool_call_id or "",
        reasoning=message.reasoning_content or "",
    )


def _parts(
    content: str | Iterable[TextPart | ImagePart] | None,
) -> list[completion_pb2.ContentPart]:
    if content is None:
        return []
    if isinstance(content, str):
        return [completion_pb2.ContentPart(text=content)]
    return [
        completion_pb2.ContentPart(text=part.text)
        if isinstance(part, TextPart)
        else completion_pb2.ContentPart(image=b"")
        for part in content
    ]


def _call(call: MessageCall) -> completion_pb2.ToolCall:
    function = call.function
    return completion_pb2.ToolCall(
        id=call.id, name=function.name, arguments_json=function.arguments
    )
