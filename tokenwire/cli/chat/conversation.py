"""Conversation of a chat, and its JSON in the form of OpenAI's API."""

import base64
import json
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, cast

from tokenwire.messages import Message, Role, ToolCall

__all__ = [
    "Conversation",
    "ConversationError",
    "image_type",
    "read_messages",
    "write_messages",
]

_ROLES = ("system", "developer", "user", "assistant", "tool")
_IMAGE_TYPES = (
    (b"\x89PNG", "image/png"),
    (b"\xff\xd8\xff", "image/jpeg"),
    (b"GIF8", "image/gif"),
    (b"RIFF", "image/webp"),
)


class ConversationError(Exception):
    """JSON that holds no conversation. The message is one sentence."""


@dataclass(slots=True)
class Conversation:
    """Messages in their order, and the system message before them."""

    system: str = ""
    messages: list[Message] = field(default_factory=list)

    @property
    def whole(self) -> list[Message]:
        """All messages, the system message first."""
        first = [Message("system", self.system)] if self.system else []
        return [*first, *self.messages]

    def replace_all(self, messages: Sequence[Message]) -> None:
        """Continue from other messages; the first may be a system message."""
        has_system = bool(messages) and messages[0].role in ("system", "developer")
        self.system = (messages[0].content or "") if has_system else ""
        self.messages = list(messages[1:] if has_system else messages)

    def drop_answer(self) -> Message | None:
        """Drop the last question with what follows it, and return it; None if there is none."""
        for index in reversed(range(len(self.messages))):
            if self.messages[index].role == "user":
                question = self.messages[index]
                del self.messages[index:]
                return question
        return None


def image_type(data: bytes) -> str | None:
    """Return the media type of an image by its first bytes; None if it is no known image."""
    return next((kind for start, kind in _IMAGE_TYPES if data.startswith(start)), None)


def write_messages(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """Return the messages as the field `messages` of a chat completion has them."""
    return [_written(message) for message in messages]


def read_messages(data: str) -> list[Message]:
    """Read a list of messages, or an object that has one as `messages`.

    Raises ConversationError.
    """
    try:
        value = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise ConversationError(f"it is not JSON: {error}") from None
    if isinstance(value, dict):
        value = value.get("messages")
    if not isinstance(value, list):
        raise ConversationError('it is neither a list of messages nor {"messages": […]}')
    return [_read(item, f"messages[{index}]") for index, item in enumerate(value)]


def _written(message: Message) -> dict[str, Any]:
    item: dict[str, Any] = {"role": message.role, "content": message.content}
    if message.images:
        parts: list[dict[str, Any]] = [
            {"type": "image_url", "image_url": {"url": _data_url(image)}}
            for image in message.images
        ]
        if message.content is not None:
            parts.append({"type": "text", "text": message.content})
        item["content"] = parts
    if message.reasoning:
        item["reasoning_content"] = message.reasoning
    if message.tool_calls:
        item["tool_calls"] = [
            {
                "id": call.id,
                "type": "function",
                "function": {"name": call.name, "arguments": call.arguments},
            }
            for call in message.tool_calls
        ]
    if message.tool_call_id:
        item["tool_call_id"] = message.tool_call_id
    if message.name:
        item["name"] = message.name
    return item


def _data_url(image: bytes) -> str:
    kind = image_type(image) or "image/png"
    return f"data:{kind};base64,{base64.b64encode(image).decode('ascii')}"


def _read(item: object, place: str) -> Message:
    if not isinstance(item, dict) or item.get("role") not in _ROLES:
        raise ConversationError(f"{place} has no role; it must be one of {', '.join(_ROLES)}")
    message = _with_content(Message(cast(Role, item["role"]), None), item.get("content"), place)
    calls = item.get("tool_calls") or []
    if not isinstance(calls, list):
        raise ConversationError(f"{place}.tool_calls must be a list")
    return replace(
        message,
        tool_calls=[_read_call(call, place) for call in calls],
        tool_call_id=_text(item, "tool_call_id", place),
        name=_text(item, "name", place),
        reasoning=_text(item, "reasoning_content", place),
    )


def _with_content(message: Message, content: object, place: str) -> Message:
    if content is None or isinstance(content, str):
        return replace(message, content=content)
    if not isinstance(content, list):
        raise ConversationError(f"{place}.content must be a text, a list of parts or null")
    texts: list[str] = []
    images: list[bytes] = []
    for part in content:
        match part:
            case {"type": "text", "text": str(text)}:
                texts.append(text)
            case {"type": "image_url", "image_url": {"url": str(url)}}:
                images.append(_image(url, place))
            case _:
                raise ConversationError(f"{place}.content has a part that is no text and no image")
    return replace(message, content="\n".join(texts) if texts else None, images=images)


def _image(url: str, place: str) -> bytes:
    head, _, data = url.partition(";base64,")
    try:
        if not head.startswith("data:"):
            raise ValueError
        return base64.b64decode(data, validate=True)
    except ValueError:
        raise ConversationError(f"{place}.content has an image that is no data URL") from None


def _read_call(call: object, place: str) -> ToolCall:
    match call:
        case {"id": str(name), "function": {"name": str(function), "arguments": str(arguments)}}:
            return ToolCall(name, function, arguments)
    raise ConversationError(f"{place}.tool_calls has a call without id, name and arguments")


def _text(item: dict[str, Any], key: str, place: str) -> str:
    value = item.get(key)
    if value is not None and not isinstance(value, str):
        raise ConversationError(f"{place}.{key} must be a text")
    return value or ""
