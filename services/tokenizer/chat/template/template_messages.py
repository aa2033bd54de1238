"""Messages of a conversation: validation, and the form that a chat template takes."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum

from services.common.json_values import Json
from services.tokenizer.chat.template.arguments import lenient_arguments, read_arguments
from tokenwire.errors import ServiceError, invalid
from tokenwire.pb.completion.v1 import completion_pb2

__all__ = ["EmptyContent", "TemplateFacts", "check_messages", "template_messages"]

_MESSAGES = "conversation.messages"  # path in a request
_SHORT_ID = 9  # characters of a call's id in Mistral's templates
_ROLES: Mapping["completion_pb2.Role.ValueType", str] = {
    completion_pb2.ROLE_SYSTEM: "system",
    completion_pb2.ROLE_DEVELOPER: "developer",
    completion_pb2.ROLE_USER: "user",
    completion_pb2.ROLE_ASSISTANT: "assistant",
    completion_pb2.ROLE_TOOL: "tool",
}


class EmptyContent(Enum):
    """Forms of a content without text."""

    ABSENT = "absent"
    """Absence of a field: transformers leaves out fields that are null"""
    TEXT = "text"
    NULL = "null"


@dataclass(frozen=True, slots=True)
class TemplateFacts:
    """Expectations that differ between templates."""

    knows_developer: bool = False
    """True if there is a role for developers; otherwise their role is "system\""""
    names_thinking: bool = False
    """True if the field of reasoning is "thinking", not "reasoning_content": gpt-oss, LFM2.5"""
    takes_parts: bool = False
    """True if a content is a list of parts instead of a string"""
    takes_image_parts: bool = False
    """True if parts that are images become marks; otherwise texts must contain the marks"""
    empty_content: EmptyContent = EmptyContent.TEXT
    """Content of a message that only calls tools; other empty messages have the content \"\""""
    arguments_are_text: bool = False
    """True if arguments of calls are JSON text instead of objects"""
    keeps_broken_arguments: bool = False
    """True if arguments that are not an object are written as their text"""
    thinks_or_speaks: bool = False
    """True if a message with calls may have content or `thinking`, which then takes both"""
    thinks_in_parts: bool = False
    """True if reasoning is a part of the content: Ministral 3"""
    short_ids: bool = False
    """True if the id of a call must have nine letters and digits"""
    shows_tools: bool = True
    """True if the prompt has the names of the tools"""
    shows_calls: bool = True
    """True if the prompt has earlier calls and their results"""
    call_example: str = ""
    """Call as the template writes it, with its control tokens, if it shows calls but no tools"""
    takes_call_pair: bool = True
    """True if the prompt has both calls of a message with two"""
    shows_results: bool = True
    """True if the prompt has the messages of tools"""
    takes_system: bool = True
    """True if the first message may be the system's"""
    takes_system_pair: bool = True
    """True if two messages of the system may begin the conversation"""
    takes_late_system: bool = True
    """True if the system may speak after the user and the assistant"""
    takes_user_pair: bool = True
    """True if the user may speak twice in a row"""


def check_messages(messages: Sequence[completion_pb2.Message], *, continues_last: bool) -> None:
    """Raise INVALID_ARGUMENT for the first field that does not fit its message's role.

    All fields are within their bounds.
    """
    for index, message in enumerate(messages):
        _check_message(message, f"{_MESSAGES}[{index}]")
    last = messages[-1]
    if continues_last and (
        last.role != completion_pb2.ROLE_ASSISTANT or last.tool_calls or not last.parts
    ):
        raise invalid(
            "conversation.continue_last_message",
            "The last message must be the assistant's, with content and without tool calls.",
        )


def template_messages(
    messages: Sequence[completion_pb2.Message], facts: TemplateFacts, image_text: str = ""
) -> list[Json]:
    """Return valid messages in the form of transformers' templates.

    image_text: placeholder of an image for templates that take no image parts.
    """
    callers: dict[str, str] = {}  # names of tools by the ids of their calls
    written: list[Json] = []
    for message in messages:
        for call in message.tool_calls:
            callers[call.id] = call.name
        written.append(_written(message, facts, callers, image_text))
    return written


def _check_message(message: completion_pb2.Message, field: str) -> None:
    role = _ROLES[message.role]
    if not message.parts and role not in ("assistant", "tool"):
        raise invalid(f"{field}.parts", "A message must have content.")
    if message.tool_calls and role != "assistant":
        raise invalid(f"{field}.tool_calls", "Only the assistant can call tools.")
    if message.reasoning and role != "assistant":
        raise invalid(f"{field}.reasoning", "Only the assistant can have reasoning.")
    if role == "tool" and not message.tool_call_id:
        raise invalid(f"{field}.tool_call_id", "A tool's answer must have the id of its call.")
    if role != "tool" and message.tool_call_id:
        raise invalid(f"{field}.tool_call_id", "Only a tool can answer a call.")


def _written(
    message: completion_pb2.Message,
    facts: TemplateFacts,
    callers: Mapping[str, str],
    image_text: str,
) -> Json:
    role = _ROLES[message.role]
    if role == "developer" and not facts.knows_developer:
        role = "system"
    written: dict[str, Json] = {"role": role}
    if message.parts or not message.tool_calls:
        written["content"] = _content(message, facts, image_text)
    elif facts.empty_content is not EmptyContent.ABSENT:
        written["content"] = None if facts.empty_content is EmptyContent.NULL else ""
    if message.name:
        written["name"] = message.name
    if message.reasoning and facts.names_thinking:
        written["thinking"] = message.reasoning
        if (
            facts.thinks_or_speaks
            and message.tool_calls
            and (content := written.pop("content", ""))
        ):
            written["thinking"] = f"{message.reasoning}\n{content}"
    elif message.reasoning and facts.thinks_in_parts:
        written["content"] = [
            {"type": "thinking", "thinking": message.reasoning},
            *({"type": "text", "text": part.text} for part in message.parts),
        ]
    elif message.reasoning:
        written["reasoning_content"] = written["thinking"] = message.reasoning
    if role == "tool":
        written["tool_call_id"] = _call_id(message.tool_call_id, facts)
        if name := message.name or callers.get(message.tool_call_id):
            written["name"] = name
    if message.tool_calls:
        written["tool_calls"] = [
            {
                "id": _call_id(call.id, facts),
                "type": "function",
                "function": {"name": call.name, "arguments": _arguments(call, facts)},
            }
            for call in message.tool_calls
        ]
    return written


def _content(message: completion_pb2.Message, facts: TemplateFacts, image_text: str) -> Json:
    has_images = any(part.HasField("image") for part in message.parts)
    if facts.takes_parts or (has_images and facts.takes_image_parts):
        return [
            {"type": "image"}
            if part.HasField("image") and facts.takes_image_parts
            else {"type": "text", "text": _part_text(part, image_text)}
            for part in message.parts or _empty_parts(message)
        ]
    return "\n".join(_part_text(part, image_text) for part in message.parts)


def _empty_parts(message: completion_pb2.Message) -> Sequence[completion_pb2.ContentPart]:
    """Return the parts of a message without content. Templates read the first part of a tool's."""
    is_result = message.role == completion_pb2.ROLE_TOOL
    return (completion_pb2.ContentPart(text=""),) if is_result else ()


def _part_text(part: completion_pb2.ContentPart, image_text: str) -> str:
    return image_text if part.HasField("image") else part.text


def _arguments(call: completion_pb2.ToolCall, facts: TemplateFacts) -> Json:
    """Return the arguments in the template's form. Broken arguments stay text if it takes them."""
    text = call.arguments_json
    if facts.arguments_are_text:
        return text or "{}"
    if not facts.keeps_broken_arguments:
        return lenient_arguments(text)
    try:
        return read_arguments(text, "")
    except ServiceError:
        return text


def _call_id(call_id: str, facts: TemplateFacts) -> str:
    """Return the id, cut and padded if the template needs short ids."""
    if not facts.short_ids:
        return call_id
    return re.sub(r"[^A-Za-z0-9]", "", call_id)[-_SHORT_ID:].rjust(_SHORT_ID, "0")
