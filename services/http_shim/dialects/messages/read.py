"""Reading of messages."""

from collections.abc import Iterator, Mapping

import grpc
import msgspec
from msgspec import Struct

from services.common.constraint_texts import json_text
from services.http_shim.dialects.bodies import body_of
from services.http_shim.dialects.fields import JsonObject, LeftOut
from services.http_shim.dialects.messages.types import (
    AnyChoice,
    AutoChoice,
    Block,
    CompactionBlock,
    CountTokensBody,
    DocumentBlock,
    ImageBlock,
    InputMessage,
    MessagesBody,
    NamedChoice,
    NoChoice,
    PromptBody,
    RedactedThinkingBlock,
    SearchResultBlock,
    SystemPrompt,
    TextBlock,
    ThinkingBlock,
    ToolResultBlock,
    ToolUseBlock,
)
from services.http_shim.dialects.messages.write import THREAD_NOT_FOUND, MessageWriter
from services.http_shim.dialects.reading import MessageReading, Reading
from services.http_shim.documents.request_documents import (
    RequestDocument,
    document_text,
    encoded_document,
)
from tokenwire.errors import ServiceError, invalid
from tokenwire.pb.completion.v1 import completion_pb2
from tokenwire.pb.types.v1 import types_pb2

__all__ = ["read_counted_message", "read_message"]

_OWN_TOOLS = (None, "custom")
"""Types of tools that the client runs"""
_SCHEMA = "output_config.format.schema"
_NAMES: Mapping[str, str] = {
    "stop": "stop_sequences",
    "grammar": _SCHEMA,
    "conversation.template_arguments_json": "thinking",
    "conversation.continue_last_message": "messages",
    "conversation.reasoning_effort": "output_config.effort",
}


def read_message(fields: JsonObject) -> Reading:
    """Read the body of a message. Raises INVALID_ARGUMENT with the client's name of a field."""
    body, ignored = body_of(MessagesBody, fields)
    _check(body)
    reading = _read_prompt(body, ignored)
    if body.thread is not None:
        reading.ignored.append("thread")
    choice, request = body.tool_choice, reading.request
    calls = [] if choice is None or isinstance(choice, NoChoice) else [choice]
    request.MergeFrom(
        completion_pb2.GenerateRequest(
            model=body.model or "",
            parallel_tool_calls=not any(each.disable_parallel_tool_use for each in calls),
            sampling=types_pb2.SamplingParams(
                temperature=body.temperature,
                top_p=body.top_p,
                top_k=None if body.top_k == -1 else body.top_k,
            ),
            stopping=types_pb2.StoppingParams(max_tokens=body.max_tokens),
            stop=body.stop_sequences,
            grammar=_grammar(body),
            delivery=(
                completion_pb2.DELIVERY_DELTAS if body.stream else completion_pb2.DELIVERY_WHOLE
            ),
            user=(body.metadata.user_id if body.metadata else None) or "",
        )
    )
    reading.note_text("grammar.json_schema", _SCHEMA)
    reading.is_streamed = bool(body.stream)
    reading.priority, reading.timeout = body.priority, body.timeout
    reading.writer = MessageWriter()
    return reading


def read_counted_message(fields: JsonObject) -> Reading:
    """Read a body whose tokens are counted. Raises INVALID_ARGUMENT with a client's name."""
    body, ignored = body_of(CountTokensBody, fields)
    reading = _read_prompt(body, ignored)
    reading.request.model = body.model or ""
    return reading


def _check(body: MessagesBody) -> None:
    if body.max_tokens is None:
        raise invalid("max_tokens", "max_tokens is required: the most tokens of the answer.")
    if body.compaction is not None:
        message = "compaction is not supported; ask for a summary in messages."
        raise invalid("compaction", message)
    if body.thread is not None and body.thread.type == "continue":
        raise ServiceError(
            grpc.StatusCode.NOT_FOUND,
            THREAD_NOT_FOUND,
            "This server holds no threads; send the whole conversation with the thread "
            '{"type": "create"}, or without one.',
            field="thread",
        )


def _read_prompt(body: PromptBody, ignored: list[str]) -> Reading:
    """Return a reading of what makes the prompt. Raises INVALID_ARGUMENT."""
    if not body.messages:
        raise invalid("messages", "messages is required: at least one message.")
    reading = Reading(ignored, _NAMES)
    if body.system:
        _read_system(reading, body.system)
    for index, message in enumerate(body.messages):
        _read_turn(reading, message, f"messages[{index}]")
    conversation = reading.request.conversation
    if not conversation.messages:
        raise invalid("messages", "messages has only blocks of tools that other servers run.")
    last = conversation.messages[-1]
    # an answer that the client began is continued
    is_answer = last.role == completion_pb2.ROLE_ASSISTANT
    conversation.continue_last_message = is_answer and not last.tool_calls
    conversation.template_arguments_json = _template_arguments(body)
    conversation.reasoning_effort = _effort(body)
    _read_tools(reading, body)
    return reading


def _read_system(reading: Reading, system: SystemPrompt) -> None:
    made = reading.add_message(completion_pb2.ROLE_SYSTEM, "system")
    if isinstance(system, str):
        made.add_text(system, "system")
    else:
        for index, block in enumerate(system):
            made.add_text(block.text, f"system[{index}].text")


def _read_turn(reading: Reading, message: InputMessage, name: str) -> None:
    if message.content and all(isinstance(block, LeftOut) for block in message.content):
        return
    match message.role:
        case "assistant":
            _read_assistant(reading, message, name)
        case "user":
            _read_user(reading, message, name)
        case _:
            made = reading.add_message(completion_pb2.ROLE_SYSTEM, name)
            for block, at in _blocks(message, name):
                if not isinstance(block, TextBlock):
                    raise _misplaced(block, at, "a system message")
                made.add_text(block.text, at)


def _blocks(message: InputMessage, name: str) -> Iterator[tuple[Block, str]]:
    """Yield the blocks of a message and their names."""
    if isinstance(message.content, str):
        yield TextBlock(message.content), f"{name}.content"
    else:
        for index, block in enumerate(message.content):
            if not isinstance(block, LeftOut):
                yield block, f"{name}.content[{index}]"


def _read_assistant(reading: Reading, message: InputMessage, name: str) -> None:
    made = reading.add_message(completion_pb2.ROLE_ASSISTANT, name)
    for block, at in _blocks(message, name):
        match block:
            case TextBlock() | CompactionBlock():
                _read_content(made, block, at, "an assistant's message")
            case ThinkingBlock():
                made.message.reasoning += block.thinking
            case ToolUseBlock():
                made.add_call(block.id, block.name, json_text(block.input), at)
            case RedactedThinkingBlock():
                pass
            case _:
                raise _misplaced(block, at, "an assistant's message")
    if not made.message.parts and not made.message.tool_calls:
        made.add_text("", f"{name}.content")  # an empty last message is continued, too


def _read_user(reading: Reading, message: InputMessage, name: str) -> None:
    """Read the results of tools, each as a message, and the content between them as others."""
    made: MessageReading | None = None
    is_empty = True
    for block, at in _blocks(message, name):
        is_empty = False
        if isinstance(block, ToolResultBlock):
            made = None
            _read_tool_result(reading, block, at)
        else:
            made = made or reading.add_message(completion_pb2.ROLE_USER, name)
            _read_content(made, block, at, "a user's message")
    if is_empty:
        reading.add_message(completion_pb2.ROLE_USER, name)


def _read_tool_result(reading: Reading, block: ToolResultBlock, name: str) -> None:
    made = reading.add_message(completion_pb2.ROLE_TOOL, name)
    made.message.tool_call_id = block.tool_use_id
    if isinstance(block.content, str):
        made.add_text(block.content, f"{name}.content")
    else:
        for index, inner in enumerate(block.content or ()):
            _read_content(made, inner, f"{name}.content[{index}]", "a tool's result")


def _read_content(made: MessageReading, block: Struct, name: str, where: str) -> None:
    match block:
        case TextBlock():
            made.add_text(block.text, name)
        case ImageBlock():
            _read_image(made, block, name)
        case DocumentBlock():
            _read_document(made, block, name)
        case SearchResultBlock():
            texts = (each.text for each in block.content)
            made.add_text(document_text(block.title, block.source, *texts), name)
        case CompactionBlock():
            made.add_text(block.content or "", name)
        case LeftOut():
            pass
        case _:
            raise _misplaced(block, name, where)


def _read_image(made: MessageReading, block: ImageBlock, name: str) -> None:
    source, at = block.source, f"{name}.source"
    if source.type == "url":
        made.add_image(_required(source.url, f"{at}.url"), name, f"{at}.url")
    else:
        data = _required(source.data, f"{at}.data", may_be_empty=True)
        media_type = source.media_type or "image/png"
        made.add_image(f"data:{media_type};base64,{data}", name, f"{at}.data")


def _read_document(made: MessageReading, block: DocumentBlock, name: str) -> None:
    source, at = block.source, f"{name}.source"
    head = [part for part in (block.title, block.context) if part]
    match source.type:
        case "text":
            text = _required(source.data, f"{at}.data", may_be_empty=True)
            made.add_text(document_text(*head, text), name)
        case "content":
            _read_document_content(made, source.content, head, f"{at}.content", name)
        case "base64":
            data = _required(source.data, f"{at}.data")
            media_type = source.media_type or "application/pdf"
            document = encoded_document(data, media_type, f"{at}.data")
            made.add_document(document, name, lambda text: document_text(*head, text))
        case "file":
            file_id = _required(source.file_id, f"{at}.file_id")
            document = RequestDocument(f"{at}.file_id", file_id=file_id)
            made.add_document(document, name, lambda text: document_text(*head, text))
        case _:
            raise invalid(
                f"{at}.url",
                f"{at}.url: this server fetches no documents; send the document as base64.",
            )


def _read_document_content(
    made: MessageReading,
    content: str | list[TextBlock | ImageBlock] | None,
    head: list[str],
    at: str,
    name: str,
) -> None:
    if content is None:
        raise invalid(at, f"{at} is required.")
    if isinstance(content, str):
        made.add_text(document_text(*head, content), name)
        return
    if head:
        made.add_text("\n\n".join([*head, ""]), name)
    for index, inner in enumerate(content):
        _read_content(made, inner, f"{at}[{index}]", "a document")


def _required(value: str | None, name: str, *, may_be_empty: bool = False) -> str:
    if value is None or not (value or may_be_empty):
        raise invalid(name, f"{name} is required.")
    return value


def _misplaced(block: Struct, name: str, where: str) -> Exception:
    kind = type(block).__struct_config__.tag
    return invalid(name, f"{name}: {where} can't have a block of the type {kind}.")


def _read_tools(reading: Reading, body: PromptBody) -> None:
    """Read the tools that the client runs, and the choice of them."""
    for index, tool in enumerate(body.tools or ()):
        name = f"tools[{index}]"
        if tool.type not in _OWN_TOOLS:
            reading.ignored.append(name)
            continue
        if tool.name is None:
            raise invalid(f"{name}.name", f"{name}.name is required.")
        path = f"tools[{len(reading.request.tools)}]"
        reading.rename(path, name)
        reading.note(f"{path}.parameters_json", f"{name}.input_schema")
        reading.note_text(f"{path}.parameters_json", f"{name}.input_schema")
        reading.request.tools.add(
            name=tool.name,
            description=tool.description or "",
            parameters_json="" if tool.input_schema is None else json_text(tool.input_schema),
            strict=bool(tool.strict),
        )
    if (choice := _tool_choice(body)) is not None:
        reading.request.tool_choice.CopyFrom(choice)


def _tool_choice(body: PromptBody) -> completion_pb2.ToolChoice | None:
    match body.tool_choice:
        case None:
            return None
        case NamedChoice(name=name):
            return completion_pb2.ToolChoice(name=name)
        case AutoChoice():
            mode = completion_pb2.TOOL_MODE_AUTO
        case AnyChoice():
            mode = completion_pb2.TOOL_MODE_REQUIRED
        case NoChoice():
            mode = completion_pb2.TOOL_MODE_NONE
    return completion_pb2.ToolChoice(mode=mode)


def _grammar(body: PromptBody) -> types_pb2.GrammarSpec | None:
    config = body.output_config
    wanted = body.output_format if config is None or config.format is None else config.format
    return None if wanted is None else types_pb2.GrammarSpec(json_schema=json_text(wanted.schema))


def _template_arguments(body: PromptBody) -> str:
    if body.thinking is None:
        return ""
    thinks = body.thinking.type != "disabled"
    return msgspec.json.encode({"enable_thinking": thinks}).decode()


def _effort(body: PromptBody) -> str:
    is_off = body.thinking is not None and body.thinking.type == "disabled"
    effort = None if body.output_config is None else body.output_config.effort
    return "" if is_off or effort is None else effort
