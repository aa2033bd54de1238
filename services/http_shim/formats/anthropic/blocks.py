"""Content blocks and messages of a request, and their conversion to a chat's messages."""

from collections.abc import Iterator, Sequence
from typing import Annotated, Any, Literal, TypeAlias

from msgspec import Meta, Struct

from services.http_shim.formats.constraint_fields import JsonObject
from services.http_shim.formats.constraints import json_text
from services.http_shim.formats.placed_messages import PlacedMessage, begun
from services.http_shim.images.request_images import RequestImages
from tokenwire.errors import invalid
from tokenwire.pb.completion.v1 import completion_pb2

__all__ = ["InputMessage", "SystemPrompt", "chat_messages", "take_block_images"]

_BOUNDED = Meta(max_length=4_096)  # the tokenizer service has lower limits


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
    """A document as text."""

    type: Literal["text"]
    data: str
    media_type: str | None = None


class DocumentBlock(_Block, tag="document"):
    """A document, which becomes text under its title."""

    source: DocumentSource
    title: str | None = None
    context: str | None = None
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
    content: str | Annotated[list[TextBlock | ImageBlock | DocumentBlock], _BOUNDED] | None = None
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
    | ToolUseBlock
    | ToolResultBlock
    | ThinkingBlock
    | RedactedThinkingBlock
)
SystemPrompt: TypeAlias = str | Annotated[list[TextBlock], _BOUNDED]


class InputMessage(Struct):
    """One of `messages`."""

    role: Literal["user", "assistant", "system"]
    content: str | Annotated[list[Block], _BOUNDED]


def take_block_images(messages: Sequence[InputMessage] | None) -> RequestImages:
    """Return the images of the messages in the order of their places in the chat.

    Raises INVALID_ARGUMENT with the client's name of a field.
    """
    images = RequestImages()
    for image, place in _images(messages or ()):
        source = image.source
        name, value = ("url", source.url) if source.type == "url" else ("data", source.data)
        param = f"{place}.source.{name}"
        if value is None:
            raise invalid(param, f"{param} is required.")
        if source.type == "url":
            images.add(value, param)
        else:
            images.add(f"data:{source.media_type or 'image/png'};base64,{value}", param)
        source.url = source.data = None
    return images


def _images(messages: Sequence[InputMessage]) -> Iterator[tuple[ImageBlock, str]]:
    for i, message in enumerate(messages):
        blocks = message.content if isinstance(message.content, list) else []
        for j, block in enumerate(blocks):
            place = f"messages[{i}].content[{j}]"
            if isinstance(block, ImageBlock):
                yield block, place
            elif isinstance(block, ToolResultBlock) and isinstance(block.content, list):
                for k, inner in enumerate(block.content):
                    if isinstance(inner, ImageBlock):
                        yield inner, f"{place}.content[{k}]"


def chat_messages(
    system: SystemPrompt | None, messages: Sequence[InputMessage]
) -> list[PlacedMessage]:
    """Convert the prompt. A tool's result becomes a message of its own.

    Raises INVALID_ARGUMENT for what a chat can't express.
    """
    placed: list[PlacedMessage] = []
    if system:
        first = begun(completion_pb2.ROLE_SYSTEM, "system")
        blocks = [TextBlock(system)] if isinstance(system, str) else system
        for j, block in enumerate(blocks):
            first.add_text(block.text, "system" if isinstance(system, str) else f"system[{j}].text")
        placed.append(first)
    for i, message in enumerate(messages):
        place = f"messages[{i}]"
        match message.role:
            case "assistant":
                placed.append(_assistant(message, place))
            case "user":
                placed.extend(_user(message, place))
            case _:
                placed.append(_system(message, place))
    return placed


def _blocks(message: InputMessage, place: str) -> Iterator[tuple[Block, str]]:
    """Yield the blocks of a message and their places."""
    if isinstance(message.content, str):
        yield TextBlock(message.content), f"{place}.content"
    else:
        for j, block in enumerate(message.content):
            yield block, f"{place}.content[{j}]"


def _assistant(message: InputMessage, place: str) -> PlacedMessage:
    made = begun(completion_pb2.ROLE_ASSISTANT, place)
    for block, at in _blocks(message, place):
        match block:
            case TextBlock():
                made.add_text(block.text, at)
            case ThinkingBlock():
                made.message.reasoning += block.thinking
            case ToolUseBlock():
                arguments = json_text(block.input)
                made.message.tool_calls.add(id=block.id, name=block.name, arguments_json=arguments)
                made.call_places.append(at)
            case RedactedThinkingBlock():
                pass
            case _:
                raise _misplaced(block, at, "an assistant's message")
    return made


def _user(message: InputMessage, place: str) -> Iterator[PlacedMessage]:
    """Yield the results of tools, each as a message, and the content between them as others."""
    made: PlacedMessage | None = None
    is_empty = True
    for block, at in _blocks(message, place):
        if isinstance(block, ToolResultBlock):
            if made is not None:
                yield made
            made = None
            yield _tool_result(block, at)
        else:
            made = made or begun(completion_pb2.ROLE_USER, place)
            _add_content(made, block, at, "a user's message")
        is_empty = False
    if made is not None or is_empty:
        yield made or begun(completion_pb2.ROLE_USER, place)


def _system(message: InputMessage, place: str) -> PlacedMessage:
    made = begun(completion_pb2.ROLE_SYSTEM, place)
    for block, at in _blocks(message, place):
        if not isinstance(block, TextBlock):
            raise _misplaced(block, at, "a system message")
        made.add_text(block.text, at)
    return made


def _tool_result(block: ToolResultBlock, place: str) -> PlacedMessage:
    made = begun(completion_pb2.ROLE_TOOL, place)
    made.message.tool_call_id = block.tool_use_id
    if isinstance(block.content, str):
        made.add_text(block.content, f"{place}.content")
    else:
        for k, inner in enumerate(block.content or ()):
            _add_content(made, inner, f"{place}.content[{k}]", "a tool's result")
    if not made.message.parts:
        made.add_text("", f"{place}.content")
    return made


def _add_content(made: PlacedMessage, block: Block, place: str, where: str) -> None:
    match block:
        case TextBlock():
            made.add_text(block.text, place)
        case ImageBlock():
            made.add_image(place)
        case DocumentBlock():
            parts = (block.title, block.context, block.source.data)
            made.add_text("\n\n".join(part for part in parts if part), place)
        case _:
            raise _misplaced(block, place, where)


def _misplaced(block: Block, place: str, where: str) -> Exception:
    kind = type(block).__struct_config__.tag
    return invalid(place, f"{place}: {where} can't have a block of the type {kind}.")
