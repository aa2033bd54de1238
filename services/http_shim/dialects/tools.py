"""Tools of completions and chats: JSON types, and their conversion to protos."""

from collections.abc import Sequence
from typing import Annotated, Literal, TypeAlias

from msgspec import Meta, Struct

from services.common.constraint_texts import json_text
from services.http_shim.dialects.custom_tools import InputGrammar, custom_tool
from services.http_shim.dialects.fields import JsonObject
from services.http_shim.dialects.reading import Reading
from tokenwire.errors import invalid
from tokenwire.pb.completion.v1 import completion_pb2

__all__ = [
    "TOOL_MODES",
    "AllowedTools",
    "CalledFunction",
    "CalledTool",
    "CustomSpec",
    "FunctionSpec",
    "GrammarInput",
    "MessageCall",
    "NamedToolChoice",
    "TextInput",
    "Tool",
    "ToolChoice",
    "ToolName",
    "ToolReference",
    "Typed",
    "custom_names",
    "read_tools",
]

TOOL_MODES = {
    "none": completion_pb2.TOOL_MODE_NONE,
    "auto": completion_pb2.TOOL_MODE_AUTO,
    "required": completion_pb2.TOOL_MODE_REQUIRED,
}
ToolKind: TypeAlias = Literal["function", "custom"]


class Typed(Struct):
    """An object whose `type` names one of its other fields: of these, it has this one alone.

    msgspec's own tagged types would need the `type` of functions, which clients may leave out.
    """

    def __post_init__(self) -> None:
        """Check the fields. msgspec adds the path of the object to the message."""
        given = self.type  # type: ignore[attr-defined]  # each subtype has its own literals
        for name in ("function", "custom", "allowed_tools"):
            value = getattr(self, name, None)
            if name == given and value is None:
                raise ValueError(f"Object missing required field `{name}`")
            if name != given and value is not None:
                raise ValueError(f"Object of type `{given}` has a field `{name}`")


class FunctionSpec(Struct):
    """`function` of a tool."""

    name: str
    description: str | None = None
    parameters: JsonObject | None = None
    strict: bool | None = None


class TextInput(Struct, tag_field="type", tag="text"):
    """`format` of a custom tool: any text."""


class GrammarInput(Struct, tag_field="type", tag="grammar"):
    """`format` of a custom tool: text that matches a grammar."""

    grammar: InputGrammar


class CustomSpec(Struct):
    """`custom` of a tool, whose input is text."""

    name: str
    description: str | None = None
    format: TextInput | GrammarInput | None = None


class Tool(Typed):
    """One of `tools`."""

    type: ToolKind = "function"
    function: FunctionSpec | None = None
    custom: CustomSpec | None = None


class ToolName(Struct):
    """`function` or `custom` of a tool that is named."""

    name: str


class ToolReference(Typed):
    """One of the allowed tools."""

    type: ToolKind = "function"
    function: ToolName | None = None
    custom: ToolName | None = None


class AllowedTools(Struct):
    """`allowed_tools` of a `tool_choice`: the model sees these tools alone."""

    mode: Literal["auto", "required"]
    tools: Annotated[list[ToolReference], Meta(min_length=1, max_length=4_096)]


class NamedToolChoice(Typed):
    """`tool_choice` by name."""

    type: Literal["function", "custom", "allowed_tools"] = "function"
    function: ToolName | None = None
    custom: ToolName | None = None
    allowed_tools: AllowedTools | None = None


ToolChoice: TypeAlias = Literal["none", "auto", "required"] | NamedToolChoice


class CalledFunction(Struct):
    """The called function; `arguments` is JSON text."""

    name: str
    arguments: str


class CalledTool(Struct):
    """The called custom tool."""

    name: str
    input: str


class MessageCall(Typed):
    """A tool call of the assistant."""

    id: str
    type: ToolKind = "function"
    function: CalledFunction | None = None
    custom: CalledTool | None = None


def read_tools(reading: Reading, tools: Sequence[Tool] | None, choice: ToolChoice | None) -> None:
    """Read the tools that the choice allows, and the choice.

    Formats that do not constrain the input of their tools count as ignored. Raises
    INVALID_ARGUMENT for an allowed tool that is not there.
    """
    allowed = choice.allowed_tools if isinstance(choice, NamedToolChoice) else None
    names = None if allowed is None else {_name(tool) for tool in allowed.tools}
    for index, tool in enumerate(tools or ()):
        if names is None or _name(tool) in names:
            _read_tool(reading, tool, f"tools[{index}]")
        if (grammar := _grammar(tool.custom)) is not None and grammar.syntax == "lark":
            reading.ignored.append(f"tools[{index}].custom.format")
    if choice is None:
        return
    if isinstance(choice, str):
        reading.request.tool_choice.mode = TOOL_MODES[choice]
    elif allowed is None:
        reading.request.tool_choice.name = _name(choice)
    else:
        unknown = {_name(tool) for tool in allowed.tools} - {_name(tool) for tool in tools or ()}
        if unknown:
            raise invalid("tool_choice", f"tool_choice allows {min(unknown)!r}, which tools lacks.")
        reading.request.tool_choice.mode = TOOL_MODES[allowed.mode]


def custom_names(tools: Sequence[Tool] | None) -> frozenset[str]:
    """Return the names of the custom tools."""
    return frozenset(tool.custom.name for tool in tools or () if tool.custom is not None)


def _read_tool(reading: Reading, tool: Tool, name: str) -> None:
    path = f"tools[{len(reading.request.tools)}]"
    reading.note(path, name)
    for field in ("name", "description", "strict"):
        reading.note(f"{path}.{field}", f"{name}.{tool.type}.{field}")
    if tool.custom is not None:
        reading.note(f"{path}.parameters_json", f"{name}.custom.format.grammar.definition")
        spec, grammar = tool.custom, _grammar(tool.custom)
        reading.request.tools.append(custom_tool(spec.name, spec.description, grammar))
        return
    reading.note(f"{path}.parameters_json", f"{name}.function.parameters")
    reading.note_text(f"{path}.parameters_json", f"{name}.function.parameters")
    function = tool.function
    assert function is not None
    reading.request.tools.add(
        name=function.name,
        description=function.description or "",
        parameters_json="" if function.parameters is None else json_text(function.parameters),
        strict=bool(function.strict),
    )


def _name(named: Tool | ToolReference | NamedToolChoice) -> str:
    spec = named.function if named.custom is None else named.custom
    return "" if spec is None else spec.name


def _grammar(custom: CustomSpec | None) -> InputGrammar | None:
    form = None if custom is None else custom.format
    return form.grammar if isinstance(form, GrammarInput) else None
