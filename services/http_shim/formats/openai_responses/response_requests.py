"""Bodies of the Responses API, and their conversion to a chat's request."""

import re
from collections.abc import Iterator
from typing import Annotated, Any, Literal, TypeAlias

import msgspec
from msgspec import Meta, Struct

from services.http_shim.formats.constraint_fields import JsonObject
from services.http_shim.formats.constraints import json_text
from services.http_shim.formats.custom_tools import custom_tool
from services.http_shim.formats.openai_responses.items import (
    PlacedItem,
    chat_messages,
    ignored_items,
    items_of,
    placed_item,
)
from services.http_shim.formats.placed_messages import PlacedMessage, place_of, tool_place
from services.http_shim.formats.request_bodies import Priority, Seconds, Uint32
from services.http_shim.formats.tool_fields import InputGrammar
from services.http_shim.formats.tools import TOOL_MODES
from tokenwire.errors import invalid
from tokenwire.pb.completion.v1 import completion_pb2
from tokenwire.pb.tokenizer.v1 import tokenizer_pb2
from tokenwire.pb.types.v1 import types_pb2

__all__ = [
    "PreparedResponse",
    "ResponseBody",
    "ignored_in_count",
    "ignored_parts",
    "prepare",
    "previous_response",
    "response_param_of",
    "response_schema_param",
    "to_input_count_request",
    "to_response_request",
]

_Object: TypeAlias = dict[str, Any]
_BOUNDED = Meta(max_length=4_096)  # the services have lower limits
_LOGPROBS = "message.output_text.logprobs"
_SERVED = ("function", "custom")
"""Types of tools that a client runs"""
_PARAMS = {
    "stopping.max_tokens": "max_output_tokens",
    "logprobs": "top_logprobs",
    "grammar": "text.format",
    "reasoning_effort": "reasoning.effort",
    "drop_oldest_messages": "truncation",
}
_PARAMETERS = re.compile(r"tools\[(?P<index>\d+)\]\.parameters")


class TextFormat(Struct):
    """`text.format`: free text, JSON, or JSON that matches a schema."""

    type: Literal["text", "json_object", "json_schema"]
    name: str | None = None
    schema: JsonObject | None = None
    strict: bool | None = None
    description: str | None = None


class TextConfig(Struct):
    """`text`."""

    format: TextFormat | None = None


class ReasoningConfig(Struct):
    """`reasoning`. Its summaries are not made: answers have the reasoning itself."""

    effort: str | None = None
    summary: str | None = None
    generate_summary: str | None = None


class ResponseBody(Struct):
    """The body of POST /v1/responses."""

    model: str | None = None
    input: str | Annotated[list[_Object], _BOUNDED] | None = None
    instructions: str | None = None
    previous_response_id: str | None = None
    store: bool | None = None
    stream: bool | None = None
    background: bool | None = None
    max_output_tokens: Uint32 | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_logprobs: Uint32 | None = None
    include: Annotated[list[str], _BOUNDED] | None = None
    tools: Annotated[list[_Object], _BOUNDED] | None = None
    tool_choice: str | _Object | None = None
    parallel_tool_calls: bool | None = None
    text: TextConfig | None = None
    reasoning: ReasoningConfig | None = None
    truncation: Literal["auto", "disabled"] | None = None
    metadata: dict[str, str] | None = None
    user: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    conversation: Any = None
    prompt: Any = None
    # our own
    priority: Priority | None = None
    timeout: Seconds | None = None


class PreparedResponse(Struct):
    """A body with what came before it."""

    body: ResponseBody
    context: list[PlacedItem]
    """Items of the responses that it continues"""
    owner: str
    """Owner: the API key, or the tenant on a server without keys"""
    original_input: bytes
    """JSON array of the input's items, with their images"""
    original_context: bytes
    """JSON array of `context`, likewise"""

    @property
    def model(self) -> str | None:
        return self.body.model

    @property
    def stream(self) -> bool | None:
        return self.body.stream

    @property
    def priority(self) -> int | None:
        return self.body.priority

    @property
    def timeout(self) -> float | None:
        return self.body.timeout

    @property
    def items(self) -> list[PlacedItem]:
        """All items of the prompt."""
        return self.context + items_of(self.body.input, "input")

    @property
    def custom_tools(self) -> frozenset[str]:
        """Names of the custom tools."""
        tools = self.body.tools or ()
        return frozenset(tool["name"] for tool in tools if tool.get("type") == "custom")

    @property
    def has_logprobs(self) -> bool:
        return self.body.top_logprobs is not None or _LOGPROBS in (self.body.include or ())


class _Previous(Struct):
    """The part of a body that says what it continues."""

    previous_response_id: str | None = None


def previous_response(encoded: bytes) -> str | None:
    """Return the id of the response that an encoded body continues; None if it is wrong."""
    try:
        return msgspec.json.decode(encoded, type=_Previous).previous_response_id
    except (msgspec.DecodeError, ValueError, RecursionError):
        return None  # the whole body will be refused


def prepare(body: ResponseBody, owner: str, context: bytes) -> PreparedResponse:
    """Put a body together with the items that it continues, a JSON array.

    Raises INVALID_ARGUMENT for what is not served.
    """
    _check(body)
    place = "previous_response_id"
    before = [placed_item(item, place) for item in msgspec.json.decode(context)]
    asked = [placed.item for placed in items_of(body.input, "input")]
    return PreparedResponse(body, before, owner, msgspec.json.encode(asked), context)


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


def ignored_parts(prepared: PreparedResponse) -> list[str]:
    """Return the paths of parts without effect, such as tools that only OpenAI's servers run."""
    tools = prepared.body.tools or ()
    paths = [f"tools[{i}]" for i, tool in enumerate(tools) if tool.get("type") not in _SERVED]
    for index, tool in enumerate(tools):
        form = tool.get("format") if tool.get("type") == "custom" else None
        if isinstance(form, dict) and form.get("syntax") == "lark":
            paths.append(f"tools[{index}].format")
    paths += ignored_items(items_of(prepared.body.input, "input"))
    includes = prepared.body.include or ()
    paths += [f"include[{i}]" for i, each in enumerate(includes) if each != _LOGPROBS]
    reasoning = prepared.body.reasoning or ReasoningConfig()
    for name in ("summary", "generate_summary"):
        if getattr(reasoning, name) is not None:
            paths.append(f"reasoning.{name}")
    return paths


def ignored_in_count(prepared: PreparedResponse) -> list[str]:
    """Return the paths of parts without effect on the number of a prompt's tokens."""
    truncates = prepared.body.truncation == "auto"
    return [*ignored_parts(prepared), *(("truncation",) if truncates else ())]


def to_response_request(prepared: PreparedResponse) -> completion_pb2.GenerateRequest:
    """Convert a body to the request. Raises INVALID_ARGUMENT with the client's name of a field."""
    body = prepared.body
    return completion_pb2.GenerateRequest(
        **_prompt_fields(prepared),
        model=body.model or "",
        parallel_tool_calls=body.parallel_tool_calls is not False,
        sampling=types_pb2.SamplingParams(temperature=body.temperature, top_p=body.top_p),
        stopping=types_pb2.StoppingParams(max_tokens=body.max_output_tokens),
        logprobs=(body.top_logprobs or 0) if prepared.has_logprobs else None,
        grammar=_grammar(body),
        delivery=(
            completion_pb2.DELIVERY_DELTAS
            if body.stream or body.background
            else completion_pb2.DELIVERY_WHOLE
        ),
        user=body.user or body.safety_identifier or "",
        drop_oldest_messages=body.truncation == "auto",
    )


def to_input_count_request(prepared: PreparedResponse) -> tokenizer_pb2.RenderChatRequest:
    """Convert a body to the request that renders its prompt. Raises INVALID_ARGUMENT."""
    return tokenizer_pb2.RenderChatRequest(**_prompt_fields(prepared))


def _prompt_fields(prepared: PreparedResponse) -> dict[str, Any]:
    """Return the fields of a chat that make its prompt. Raises INVALID_ARGUMENT."""
    body = prepared.body
    conversation = completion_pb2.Conversation(
        messages=[placed.message for placed in _prompt(prepared)],
        reasoning_effort=(body.reasoning.effort or "") if body.reasoning else "",
    )
    return {
        "conversation": conversation,
        "tools": [tool for _, tool in _tools(body)],
        "tool_choice": _tool_choice(body),
    }


def response_param_of(path: str, prepared: PreparedResponse) -> str:
    """Return the client's name of a field of the request."""
    if path.startswith("messages["):
        return place_of(path, _prompt(prepared)) or "input"
    if (tool := _tool_place(path, prepared.body)) is not None:
        return tool[0]
    if path == "messages":
        return "input"
    if path in _PARAMS:
        return _PARAMS[path]
    first, _, rest = path.partition(".")
    if first in ("sampling", "stopping") and rest:
        first = rest.split(".")[0]
    return _PARAMS.get(first, first)


def response_schema_param(path: str, prepared: PreparedResponse) -> str:
    """Return the client's name of a path into a schema or a message."""
    if (place := place_of(path, _prompt(prepared))) is not None:
        return place
    if (tool := _tool_place(path, prepared.body)) is not None:
        return "".join(tool)
    _, _, rest = path.split(".", 2)  # after "grammar" and its kind
    return f"text.format.schema.{rest}"


def _tool_place(path: str, body: ResponseBody) -> tuple[str, str] | None:
    if not path.startswith("tools["):
        return None
    place = tool_place(path, [index for index, _ in _tools(body)], "parameters")
    if place is not None and (found := _PARAMETERS.fullmatch(place[0])) is not None:
        tools = body.tools or []
        if tools[int(found["index"])].get("type") == "custom":
            return f"tools[{found['index']}].format.definition", ""
    return place


def _prompt(prepared: PreparedResponse) -> list[PlacedMessage]:
    messages = chat_messages(prepared.body.instructions, prepared.items)
    if not messages:
        raise invalid("input", "input has no message.")
    return messages


def _tools(body: ResponseBody) -> Iterator[tuple[int, completion_pb2.Tool]]:
    """Yield the functions and custom tools, with their indices in the body."""
    allowed = _allowed(body)
    for index, tool in enumerate(body.tools or ()):
        if tool.get("type") not in _SERVED:
            continue
        name, description = tool.get("name"), tool.get("description")
        parameters = tool.get("parameters")
        if not isinstance(name, str):
            raise invalid(f"tools[{index}].name", f"tools[{index}].name is required: a text.")
        if allowed and name not in allowed:
            continue
        description = description if isinstance(description, str) else ""
        if tool["type"] == "custom":
            grammar = _input_grammar(tool.get("format"), f"tools[{index}].format")
            yield index, custom_tool(name, description, grammar)
            continue
        if parameters is not None and not isinstance(parameters, dict):
            field = f"tools[{index}].parameters"
            raise invalid(field, f"{field} must be a JSON Schema.")
        yield (
            index,
            completion_pb2.Tool(
                name=name,
                description=description,
                parameters_json="" if parameters is None else json_text(parameters),
                strict=tool.get("strict") is True,
            ),
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
