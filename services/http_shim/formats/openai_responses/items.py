"""Items of a response's input, and their conversion to a chat's messages."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any, Literal, TypeAlias, TypeVar

import msgspec
from msgspec import Meta, Struct

from services.http_shim.documents.request_documents import (
    RequestDocument,
    check_count,
    document_text,
    encoded_document,
)
from services.http_shim.formats.custom_tools import arguments_of
from services.http_shim.formats.placed_messages import PlacedMessage, begun
from services.http_shim.images.request_images import RequestImages
from tokenwire.errors import invalid
from tokenwire.pb.completion.v1 import completion_pb2

__all__ = [
    "PlacedItem",
    "chat_messages",
    "ignored_items",
    "items_of",
    "placed_item",
    "take_item_documents",
    "take_item_images",
]

_BOUNDED = Meta(max_length=4_096)  # the tokenizer service has lower limits
_ROLES = {
    "user": completion_pb2.ROLE_USER,
    "system": completion_pb2.ROLE_SYSTEM,
    "developer": completion_pb2.ROLE_DEVELOPER,
    "assistant": completion_pb2.ROLE_ASSISTANT,
}
_READ = frozenset(
    {
        *("message", "reasoning", "item_reference"),
        *("function_call", "function_call_output"),
        *("custom_tool_call", "custom_tool_call_output"),
    }
)
"""Types of items that become part of the prompt, or are refused"""
_PART_LISTS = {
    "message": "content",
    "function_call_output": "output",
    "custom_tool_call_output": "output",
}


@dataclass(frozen=True, slots=True)
class PlacedItem:
    """An item, and where the client wrote it."""

    item: dict[str, Any]
    place: str

    @property
    def type(self) -> str:
        kind: str | None = self.item.get("type")
        return kind or "message"


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
_Content: TypeAlias = str | Annotated[list[Part], _BOUNDED]


class MessageItem(Struct):
    """A message."""

    role: Literal["user", "system", "developer", "assistant"]
    content: _Content


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
    output: _Content | None = None


class ReasoningText(Struct):
    """A piece of reasoning."""

    text: str


class ReasoningItem(Struct):
    """Reasoning of the model, or its summary."""

    summary: list[ReasoningText] = []
    content: list[ReasoningText] | None = None


_Item = TypeVar("_Item", bound=Struct)


def ignored_items(items: Sequence[PlacedItem]) -> list[str]:
    """Return the places of items that have no meaning here, such as calls of OpenAI's own tools."""
    return [placed.place for placed in items if placed.type not in _READ]


def take_item_images(items: Sequence[PlacedItem]) -> RequestImages:
    """Remove the images of items, and return them in the order of their places in the chat.

    Raises INVALID_ARGUMENT with the client's name of a field.
    """
    images = RequestImages()
    for part, place in _raw_parts(items, "input_image"):
        param = f"{place}.image_url"
        url = part.get("image_url")
        if not isinstance(url, str):
            raise invalid(param, f"{param} is required: a URL, or a data URL.")
        images.add(url, param)
        part["image_url"] = None
    return images


def take_item_documents(items: Sequence[PlacedItem]) -> list[RequestDocument]:
    """Return the files of items; the text of each then stands in place of its data.

    Raises INVALID_ARGUMENT with the client's name of a field.
    """
    documents: list[RequestDocument] = []
    for part, place in _raw_parts(items, "input_file"):
        check_count(documents, place)
        documents.append(_document(part, place))
    return documents


def _document(part: dict[str, Any], place: str) -> RequestDocument:
    if part.get("file_url") is not None:
        param = f"{place}.file_url"
        raise invalid(param, f"{param} is not supported; use file_data or file_id.")
    [*given] = (name for name in ("file_data", "file_id") if part.get(name) is not None)
    if len(given) != 1:
        raise invalid(place, f"{place} must have file_data or file_id, and not both.")
    param, value = f"{place}.{given[0]}", part.pop(given[0])
    if not isinstance(value, str):
        raise invalid(param, f"{param} must be a text.")
    put = partial(part.__setitem__, "file_data")
    if given[0] == "file_id":
        return RequestDocument(param, put, file_id=value)
    return encoded_document(value, "", param, put)


def _raw_parts(items: Sequence[PlacedItem], kind: str) -> Iterator[tuple[dict[str, Any], str]]:
    """Yield the parts of a type, each with its place."""
    for placed in items:
        name = _PART_LISTS.get(placed.type)
        parts = placed.item.get(name) if name else None
        for index, part in enumerate(parts if isinstance(parts, list) else ()):
            if isinstance(part, dict) and part.get("type") == kind:
                yield part, f"{placed.place}.{name}[{index}]"


def chat_messages(instructions: str | None, items: Sequence[PlacedItem]) -> list[PlacedMessage]:
    """Convert the prompt. What the assistant did in a row becomes one message.

    Raises INVALID_ARGUMENT for what a chat can't express.
    """
    messages: list[PlacedMessage] = []
    if instructions:
        first = begun(completion_pb2.ROLE_SYSTEM, "instructions")
        first.add_text(instructions, "instructions")
        messages.append(first)
    for placed in items:
        match placed.type:
            case "message":
                _add_message(messages, placed)
            case "function_call":
                _add_call(messages, placed)
            case "custom_tool_call":
                _add_custom_call(messages, placed)
            case "function_call_output" | "custom_tool_call_output":
                _add_output(messages, placed)
            case "reasoning":
                _add_reasoning(messages, placed)
            case "item_reference":
                raise invalid(
                    placed.place,
                    f"{placed.place}: item_reference is not supported; send the item itself, or "
                    "use previous_response_id.",
                )
    return messages


def _add_message(messages: list[PlacedMessage], placed: PlacedItem) -> None:
    item = _converted(placed, MessageItem)
    if item.role == "assistant":
        made = _assistant(messages, placed.place, has_text=True)
    else:
        made = begun(_ROLES[item.role], placed.place)
        messages.append(made)
    for part, at in _parts(item.content, f"{placed.place}.content"):
        if isinstance(part, InputImage) and item.role != "user":
            raise invalid(at, f"{at}: only a user's message can have images.")
        _add_part(made, part, at)


def _add_call(messages: list[PlacedMessage], placed: PlacedItem) -> None:
    item = _converted(placed, CallItem)
    made = _assistant(messages, placed.place)
    made.message.tool_calls.add(id=item.call_id, name=item.name, arguments_json=item.arguments)
    made.call_places.append(placed.place)


def _add_custom_call(messages: list[PlacedMessage], placed: PlacedItem) -> None:
    item = _converted(placed, CustomCallItem)
    made = _assistant(messages, placed.place)
    arguments = arguments_of(item.input)
    made.message.tool_calls.add(id=item.call_id, name=item.name, arguments_json=arguments)
    made.call_places.append(placed.place)


def _add_output(messages: list[PlacedMessage], placed: PlacedItem) -> None:
    item = _converted(placed, CallOutputItem)
    made = begun(completion_pb2.ROLE_TOOL, placed.place)
    made.message.tool_call_id = item.call_id
    for part, at in _parts(item.output, f"{placed.place}.output"):
        _add_part(made, part, at)
    messages.append(made)


def _add_reasoning(messages: list[PlacedMessage], placed: PlacedItem) -> None:
    item = _converted(placed, ReasoningItem)
    text = "".join(part.text for part in item.content or item.summary)
    if text:
        _assistant(messages, placed.place, has_text=True).message.reasoning += text


def _assistant(
    messages: list[PlacedMessage], place: str, *, has_text: bool = False
) -> PlacedMessage:
    """Return the assistant's message that is last, or a new one.

    has_text: whether text or reasoning follows, which can't stand after calls or other text.
    """
    if messages and messages[-1].message.role == completion_pb2.ROLE_ASSISTANT:
        last = messages[-1]
        if not has_text or not (last.message.tool_calls or last.message.parts):
            return last
    messages.append(begun(completion_pb2.ROLE_ASSISTANT, place))
    return messages[-1]


def _parts(content: _Content | None, place: str) -> Iterator[tuple[Part, str]]:
    if isinstance(content, str):
        yield PlainText(content), place
    else:
        for index, part in enumerate(content or ()):
            yield part, f"{place}[{index}]"


def _add_part(made: PlacedMessage, part: Part, place: str) -> None:
    match part:
        case InputImage():
            if part.file_id is not None:
                raise invalid(f"{place}.file_id", f"{place}.file_id is not supported; use a URL.")
            made.add_image(place)
        case InputFile():
            made.add_text(document_text(part.filename, part.file_data), place)
        case Refusal():
            made.add_text(part.refusal, place)
        case _:
            made.add_text(part.text, place)


def _converted(placed: PlacedItem, to: type[_Item]) -> _Item:
    try:
        return msgspec.convert(placed.item, to)
    except msgspec.ValidationError as error:
        message, _, path = str(error).partition(" - at `$")
        place = placed.place + path.rstrip("`")
        raise invalid(place, f"{place}: {message[:1].lower()}{message[1:]}.") from None


def placed_item(item: dict[str, Any], place: str) -> PlacedItem:
    """Return an item with its place. Raises INVALID_ARGUMENT for a type that is no text."""
    if not isinstance(item.get("type"), str | None):
        raise invalid(f"{place}.type", f"{place}.type must be a text.")
    return PlacedItem(item, place)


def items_of(value: str | list[dict[str, Any]] | None, place: str) -> list[PlacedItem]:
    """Return the items of an input; a text is a user's message.

    Raises INVALID_ARGUMENT for a type that is no text.
    """
    if isinstance(value, str):
        return [PlacedItem({"type": "message", "role": "user", "content": value}, place)]
    return [placed_item(item, f"{place}[{index}]") for index, item in enumerate(value or ())]
