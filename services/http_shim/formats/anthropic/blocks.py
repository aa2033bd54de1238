"""Content blocks and messages of a request, and their conversion to a chat's messages."""

from collections.abc import Iterator, Sequence
from typing import Annotated, Any, Literal, TypeAlias

from msgspec import Meta, Struct

from services.http_shim.documents.request_documents import (
    RequestDocument,
    check_count,
    document_text,
    encoded_document,
)
from services.http_shim.formats.anthropic.server_blocks import ServerBlock, ServerResultBlock
from services.http_shim.formats.constraint_fields import JsonObject
from services.http_shim.formats.constraints import json_text
from services.http_shim.formats.placed_messages import PlacedMessage, begun
from services.http_shim.formats.request_bodies import LeftOut
from services.http_shim.images.request_images import RequestImages
from tokenwire.errors import invalid
from tokenwire.pb.completion.v1 import completion_pb2

__all__ = [
    "InputMessage",
    "SystemPrompt",
    "chat_messages",
    "take_block_documents",
    "take_block_images",
]

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
    """A document: text, a PDF in base64, a file of /v1/files, or blocks of text and images."""

    type: Literal["text", "base64", "file", "content", "url"]
    data: str | None = None
    media_type: str | None = None
    file_id: str | None = None
    content: str | Annotated[list[TextBlock | ImageBlock], _BOUNDED] | None = None
    url: str | None = None


class DocumentBlock(_Block, tag="document"):
    """A document, which becomes text under its title."""

    source: DocumentSource
    title: str | None = None
    context: str | None = None
    cache_control: Any = None


class SearchResultBlock(_Block, tag="search_result"):
    """What a search of the client found, which becomes text under its title and source."""

    title: str
    source: str
    content: Annotated[list[TextBlock], _BOUNDED]
    cache_control: Any = None


class CompactionBlock(_Block, tag="compaction"):
    """A summary, which becomes text, of messages that were left out."""

    content: str | None = None
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
    content: (
        str
        | Annotated[
            list[TextBlock | ImageBlock | DocumentBlock | SearchResultBlock | ServerResultBlock],
            _BOUNDED,
        ]
        | None
    ) = None
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
    | SearchResultBlock
    | CompactionBlock
    | ToolUseBlock
    | ToolResultBlock
    | ThinkingBlock
    | RedactedThinkingBlock
    | ServerBlock
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
    for image, place in _content(messages or ()):
        if not isinstance(image, ImageBlock):
            continue
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


def take_block_documents(messages: Sequence[InputMessage] | None) -> list[RequestDocument]:
    """Return the documents of the messages that must be read; their text then stands in place.

    Raises INVALID_ARGUMENT with the client's name of a field.
    """
    documents: list[RequestDocument] = []
    for block, place in _content(messages or ()):
        if not isinstance(block, DocumentBlock) or block.source.type in ("text", "content"):
            continue
        check_count(documents, place)
        documents.append(_document(block.source, f"{place}.source"))
    return documents


def _document(source: DocumentSource, place: str) -> RequestDocument:
    def put(text: str) -> None:
        source.type, source.data = "text", text

    match source.type:
        case "base64":
            data, source.data = _required(source.data, f"{place}.data"), None
            media_type = source.media_type or "application/pdf"
            return encoded_document(data, media_type, f"{place}.data", put)
        case "file":
            param = f"{place}.file_id"
            return RequestDocument(param, put, file_id=_required(source.file_id, param))
        case _:
            raise invalid(
                f"{place}.url",
                f"{place}.url: this server fetches no documents; send the document as base64.",
            )


def _required(value: str | None, param: str) -> str:
    if not value:
        raise invalid(param, f"{param} is required.")
    return value


def _content(messages: Sequence[InputMessage]) -> Iterator[tuple[_Block, str]]:
    """Yield the blocks of all messages and those within them, in the order of the chat."""
    for i, message in enumerate(messages):
        if isinstance(message.content, list):
            yield from _nested(message.content, f"messages[{i}].content")


def _nested(blocks: Sequence[Struct], place: str) -> Iterator[tuple[_Block, str]]:
    for index, block in enumerate(blocks):
        at = f"{place}[{index}]"
        if isinstance(block, _Block):
            yield block, at
        if isinstance(block, ToolResultBlock) and isinstance(block.content, list):
            yield from _nested(block.content, f"{at}.content")
        elif isinstance(block, DocumentBlock) and block.source.type == "content":
            parts = block.source.content
            if isinstance(parts, list):
                yield from _nested(parts, f"{at}.source.content")


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
        if message.content and all(isinstance(block, LeftOut) for block in message.content):
            continue
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
            if not isinstance(block, LeftOut):
                yield block, f"{place}.content[{j}]"


def _assistant(message: InputMessage, place: str) -> PlacedMessage:
    made = begun(completion_pb2.ROLE_ASSISTANT, place)
    for block, at in _blocks(message, place):
        match block:
            case TextBlock() | CompactionBlock():
                _add_content(made, block, at, "an assistant's message")
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
    if not made.message.parts and not made.message.tool_calls:
        made.add_text("", f"{place}.content")  # an empty last message is continued, too
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
    return made


def _add_content(
    made: PlacedMessage, block: Block | ServerResultBlock, place: str, where: str
) -> None:
    match block:
        case TextBlock():
            made.add_text(block.text, place)
        case ImageBlock():
            made.add_image(place)
        case DocumentBlock():
            _add_document(made, block, place)
        case SearchResultBlock():
            texts = (each.text for each in block.content)
            made.add_text(document_text(block.title, block.source, *texts), place)
        case CompactionBlock():
            made.add_text(block.content or "", place)
        case LeftOut():
            pass
        case _:
            raise _misplaced(block, place, where)


def _add_document(made: PlacedMessage, block: DocumentBlock, place: str) -> None:
    source = block.source
    head = [part for part in (block.title, block.context) if part]
    name = "content" if source.type == "content" else "data"
    match source.content if source.type == "content" else source.data:
        case None:
            raise invalid(f"{place}.source.{name}", f"{place}.source.{name} is required.")
        case str() as text:
            made.add_text(document_text(*head, text), place)
        case blocks:
            if head:
                made.add_text("\n\n".join([*head, ""]), place)
            for k, inner in enumerate(blocks):
                _add_content(made, inner, f"{place}.source.content[{k}]", "a document")


def _misplaced(block: Struct, place: str, where: str) -> Exception:
    kind = type(block).__struct_config__.tag
    return invalid(place, f"{place}: {where} can't have a block of the type {kind}.")
