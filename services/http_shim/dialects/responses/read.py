"""Reading of responses: a request's items, after those of the response that it continues."""

from collections.abc import Iterator, Mapping
from typing import TypeVar

import msgspec
from msgspec import Struct

from services.common.constraint_texts import json_text
from services.http_shim.dialects.bodies import body_of
from services.http_shim.dialects.custom_tools import InputGrammar, arguments_of, custom_tool
from services.http_shim.dialects.field_errors import field_error
from services.http_shim.dialects.fields import JsonObject
from services.http_shim.dialects.reading import MessageReading, Reading
from services.http_shim.dialects.responses.types import (
    CallItem,
    CallOutputItem,
    Content,
    CustomCallItem,
    InputFile,
    InputImage,
    MessageItem,
    Part,
    PlainText,
    ReasoningConfig,
    ReasoningItem,
    Refusal,
    ResponseBody,
)
from services.http_shim.dialects.responses.write import Keep, ResponseWriter
from services.http_shim.dialects.tools import TOOL_MODES
from services.http_shim.documents.request_documents import (
    RequestDocument,
    document_text,
    encoded_document,
)
from tokenwire.errors import invalid
from tokenwire.pb.completion.v1 import completion_pb2
from tokenwire.pb.types.v1 import types_pb2

__all__ = ["NO_ITEMS", "read_counted_response", "read_response"]

NO_ITEMS = b"[]"
"""Items of a response that continues none"""
_LOGPROBS = "message.output_text.logprobs"
_SERVED = ("function", "custom")
"""Types of tools that a client runs"""
_NAMES: Mapping[str, str] = {
    "stopping.max_tokens": "max_output_tokens",
    "logprobs": "top_logprobs",
    "grammar": "text.format",
    "conversation.messages": "input",
    "conversation.reasoning_effort": "reasoning.effort",
    "drop_oldest_messages": "truncation",
}
_ROLES = {
    "user": completion_pb2.ROLE_USER,
    "system": completion_pb2.ROLE_SYSTEM,
    "developer": completion_pb2.ROLE_DEVELOPER,
    "assistant": completion_pb2.ROLE_ASSISTANT,
}
_Item = TypeVar("_Item", bound=Struct)


def read_response(fields: JsonObject, context: bytes, keep: Keep) -> Reading:
    """Read the body of a response.

    context: JSON array of the items of the responses that it continues. keep: stores the answer.
    Raises INVALID_ARGUMENT with the client's name of a field.
    """
    body, ignored = body_of(ResponseBody, fields)
    reading = _read_prompt(body, ignored, context)
    if body.truncation == "auto":
        reading.request.drop_oldest_messages = True
    has_logprobs = body.top_logprobs is not None or _LOGPROBS in (body.include or ())
    is_streamed = bool(body.stream or body.background)
    reading.request.MergeFrom(
        completion_pb2.GenerateRequest(
            model=body.model or "",
            parallel_tool_calls=body.parallel_tool_calls is not False,
            sampling=types_pb2.SamplingParams(temperature=body.temperature, top_p=body.top_p),
            stopping=types_pb2.StoppingParams(max_tokens=body.max_output_tokens),
            logprobs=(body.top_logprobs or 0) if has_logprobs else None,
            grammar=_grammar(body),
            delivery=(
                completion_pb2.DELIVERY_DELTAS if is_streamed else completion_pb2.DELIVERY_WHOLE
            ),
            user=body.user or body.safety_identifier or "",
        )
    )
    reading.note_text("grammar.json_schema", "text.format.schema")
    reading.is_streamed = is_streamed
    reading.priority, reading.timeout = body.priority, body.timeout
    is_kept = body.store is not False
    items = msgspec.json.encode(_items(body.input)) if is_kept else NO_ITEMS
    reading.writer = ResponseWriter(body, items, context, keep, has_logprobs=has_logprobs)
    return reading


def read_counted_response(fields: JsonObject, context: bytes) -> Reading:
    """Read a body whose prompt's tokens are counted. Raises as `read_response` does."""
    body, ignored = body_of(ResponseBody, fields)
    reading = _read_prompt(body, ignored, context)
    reading.request.model = body.model or ""
    if body.truncation == "auto":
        reading.ignored.append("truncation")
    return reading


def _read_prompt(body: ResponseBody, ignored: list[str], context: bytes) -> Reading:
    """Return a reading of what makes the prompt. Raises INVALID_ARGUMENT."""
    _check(body)
    reading = Reading(ignored, _NAMES)
    _read_tools(reading, body)
    if body.instructions:
        made = reading.add_message(completion_pb2.ROLE_SYSTEM, "instructions")
        made.add_text(body.instructions, "instructions")
    conversation = _ItemReading(reading)
    for item in msgspec.json.decode(context):
        conversation.add(item, "previous_response_id")
    for index, item in enumerate(_items(body.input)):
        is_text = isinstance(body.input, str)
        conversation.add(item, "input" if is_text else f"input[{index}]", is_new=True)
    if not reading.request.conversation.messages:
        raise invalid("input", "input has no message.")
    if body.reasoning is not None:
        reading.request.conversation.reasoning_effort = body.reasoning.effort or ""
    includes = body.include or ()
    reading.ignored += [f"include[{i}]" for i, each in enumerate(includes) if each != _LOGPROBS]
    reasoning = body.reasoning or ReasoningConfig()
    for name in ("summary", "generate_summary"):
        if getattr(reasoning, name) is not None:
            reading.ignored.append(f"reasoning.{name}")
    return reading


def _check(body: ResponseBody) -> None:
    """Raise INVALID_ARGUMENT for what is not served."""
    if body.input is None and body.previous_response_id is None:
        raise invalid("input", "input is required: a text, or a list of items.")
    for name, remedy in (
        ("conversation", "use previous_response_id"),
        ("prompt", "send the prompt's text as input"),
    ):
        if getattr(body, name):
            raise invalid(name, f"{name} is not supported; {remedy}.")
    if body.background and body.store is False:
        raise invalid("background", "background needs store: its response is read later.")


def _items(given: str | list[JsonObject] | None) -> list[JsonObject]:
    """Return the items of an input; a text is a user's message."""
    if isinstance(given, str):
        return [{"type": "message", "role": "user", "content": given}]
    return given or []


class _ItemReading:
    """Reading of items. What the assistant did in a row becomes one message."""

    def __init__(self, reading: Reading) -> None:
        self._reading = reading
        self._last: MessageReading | None = None

    def add(self, item: JsonObject, name: str, *, is_new: bool = False) -> None:
        """Add an item. is_new: whether this request has it, so that it may count as ignored.

        Raises INVALID_ARGUMENT for what a conversation can't express.
        """
        kind = item.get("type")
        if not isinstance(kind, str | None):
            raise invalid(f"{name}.type", f"{name}.type must be a text.")
        match kind or "message":
            case "message":
                self._add_message(_converted(item, MessageItem, name), name)
            case "function_call":
                call = _converted(item, CallItem, name)
                self._assistant(name).add_call(call.call_id, call.name, call.arguments, name)
            case "custom_tool_call":
                custom = _converted(item, CustomCallItem, name)
                arguments = arguments_of(custom.input)
                self._assistant(name).add_call(custom.call_id, custom.name, arguments, name)
            case "function_call_output" | "custom_tool_call_output":
                self._add_output(_converted(item, CallOutputItem, name), name)
            case "reasoning":
                thought = _converted(item, ReasoningItem, name)
                text = "".join(part.text for part in thought.content or thought.summary)
                if text:
                    self._assistant(name, has_text=True).message.reasoning += text
            case "item_reference":
                raise invalid(
                    name,
                    f"{name}: item_reference is not supported; send the item itself, or use "
                    "previous_response_id.",
                )
            case _ if is_new:  # such as a call of one of OpenAI's own tools
                self._reading.ignored.append(name)

    def _add_message(self, item: MessageItem, name: str) -> None:
        if item.role == "assistant":
            made = self._assistant(name, has_text=True)
        else:
            made = self._last = self._reading.add_message(_ROLES[item.role], name)
        for part, at in _parts(item.content, f"{name}.content"):
            if isinstance(part, InputImage) and item.role != "user":
                raise invalid(at, f"{at}: only a user's message can have images.")
            _read_part(made, part, at)

    def _add_output(self, item: CallOutputItem, name: str) -> None:
        made = self._last = self._reading.add_message(completion_pb2.ROLE_TOOL, name)
        made.message.tool_call_id = item.call_id
        for part, at in _parts(item.output, f"{name}.output"):
            _read_part(made, part, at)

    def _assistant(self, name: str, *, has_text: bool = False) -> MessageReading:
        """Return the assistant's message that is last, or a new one.

        has_text: whether text or reasoning follows, which can't stand after calls or other text.
        """
        last = self._last
        if (
            last is not None
            and last.message.role == completion_pb2.ROLE_ASSISTANT
            and not (has_text and (last.message.tool_calls or last.message.parts))
        ):
            return last
        self._last = self._reading.add_message(completion_pb2.ROLE_ASSISTANT, name)
        return self._last


def _parts(content: Content | None, name: str) -> Iterator[tuple[Part, str]]:
    if isinstance(content, str):
        yield PlainText(content), name
    else:
        for index, part in enumerate(content or ()):
            yield part, f"{name}[{index}]"


def _read_part(made: MessageReading, part: Part, name: str) -> None:
    match part:
        case InputImage():
            if part.file_id is not None:
                raise invalid(f"{name}.file_id", f"{name}.file_id is not supported; use a URL.")
            if part.image_url is None:
                at = f"{name}.image_url"
                raise invalid(at, f"{at} is required: a URL, or a data URL.")
            made.add_image(part.image_url, name, f"{name}.image_url")
        case InputFile():
            _read_file(made, part, name)
        case Refusal():
            made.add_text(part.refusal, name)
        case _:
            made.add_text(part.text, name)


def _read_file(made: MessageReading, file: InputFile, name: str) -> None:
    if file.file_url is not None:
        at = f"{name}.file_url"
        raise invalid(at, f"{at} is not supported; use file_data or file_id.")
    if (file.file_data is None) == (file.file_id is None):
        raise invalid(name, f"{name} must have file_data or file_id, and not both.")
    if file.file_id == "":
        raise invalid(f"{name}.file_id", f"{name}.file_id is empty.")
    if file.file_id is not None:
        document = RequestDocument(f"{name}.file_id", file_id=file.file_id)
    else:
        document = encoded_document(file.file_data or "", "", f"{name}.file_data")
    title = file.filename  # the function below must not hold the data of `file`
    made.add_document(document, name, lambda text: document_text(title, text))


def _converted(item: JsonObject, kind: type[_Item], name: str) -> _Item:
    try:
        return msgspec.convert(item, kind)
    except msgspec.ValidationError as error:
        raise field_error(str(error), kind, item, name) from None


def _read_tools(reading: Reading, body: ResponseBody) -> None:
    """Read the functions and custom tools, and the choice of them."""
    allowed = _allowed(body)
    for index, tool in enumerate(body.tools or ()):
        name = f"tools[{index}]"
        if tool.get("type") not in _SERVED:
            reading.ignored.append(name)
            continue
        called = tool.get("name")
        if not isinstance(called, str):
            raise invalid(f"{name}.name", f"{name}.name is required: a text.")
        if allowed and called not in allowed:
            continue
        path = f"tools[{len(reading.request.tools)}]"
        reading.rename(path, name)
        if tool["type"] == "custom":
            reading.note(f"{path}.parameters_json", f"{name}.format.definition")
        else:
            reading.note(f"{path}.parameters_json", f"{name}.parameters")
            reading.note_text(f"{path}.parameters_json", f"{name}.parameters")
        reading.request.tools.append(_tool(tool, name))
    for index, tool in enumerate(body.tools or ()):
        form = tool.get("format") if tool.get("type") == "custom" else None
        if isinstance(form, dict) and form.get("syntax") == "lark":
            reading.ignored.append(f"tools[{index}].format")
    if (choice := _tool_choice(body)) is not None:
        reading.request.tool_choice.CopyFrom(choice)


def _tool(tool: JsonObject, name: str) -> completion_pb2.Tool:
    description = tool.get("description")
    description = description if isinstance(description, str) else ""
    if tool["type"] == "custom":
        return custom_tool(
            tool["name"], description, _input_grammar(tool.get("format"), f"{name}.format")
        )
    parameters = tool.get("parameters")
    if parameters is not None and not isinstance(parameters, dict):
        raise invalid(f"{name}.parameters", f"{name}.parameters must be a JSON Schema.")
    return completion_pb2.Tool(
        name=tool["name"],
        description=description,
        parameters_json="" if parameters is None else json_text(parameters),
        strict=tool.get("strict") is True,
    )


def _input_grammar(form: object, param: str) -> InputGrammar | None:
    match form:
        case None | {"type": "text"}:
            return None
        case {
            "type": "grammar",
            "syntax": "lark" | "regex" as syntax,
            "definition": str() as definition,
        }:
            return InputGrammar(syntax, definition)
        case _:
            raise invalid(
                param,
                f"{param} must be text, or a grammar with a syntax, lark or regex, and a "
                "definition.",
            )


def _allowed(body: ResponseBody) -> set[str]:
    """Return the names of the functions that may be called; none = all."""
    match body.tool_choice:
        case {"type": "allowed_tools", "tools": list() as tools}:
            named = [tool.get("name") for tool in tools if isinstance(tool, dict)]
            return {name for name in named if isinstance(name, str)}
        case _:
            return set()


def _tool_choice(body: ResponseBody) -> completion_pb2.ToolChoice | None:
    match body.tool_choice:
        case None:
            return None
        case str() as mode if mode in TOOL_MODES:
            return completion_pb2.ToolChoice(mode=TOOL_MODES[mode])
        case {"type": "function" | "custom", "name": str() as name}:
            return completion_pb2.ToolChoice(name=name)
        case {"type": "allowed_tools", "mode": str() as mode} if mode in TOOL_MODES:
            return completion_pb2.ToolChoice(mode=TOOL_MODES[mode])
        case _:
            raise invalid(
                "tool_choice", "tool_choice must be auto, none, required, or name a function."
            )


def _grammar(body: ResponseBody) -> types_pb2.GrammarSpec | None:
    wanted = None if body.text is None else body.text.format
    if wanted is None or wanted.type == "text":
        return None
    if wanted.type == "json_object":
        return types_pb2.GrammarSpec(json_object=types_pb2.JsonObject())
    if wanted.schema is None:
        raise invalid("text.format.schema", "text.format.schema is required with json_schema.")
    return types_pb2.GrammarSpec(json_schema=json_text(wanted.schema))
