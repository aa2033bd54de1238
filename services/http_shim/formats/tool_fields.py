"""JSON types of tools, of their choice, and of their calls in a conversation."""

from typing import Annotated, Literal, TypeAlias

from msgspec import Meta, Struct

from services.http_shim.formats.constraint_fields import JsonObject

__all__ = [
    "AllowedTools",
    "CalledFunction",
    "CalledTool",
    "CustomSpec",
    "FunctionSpec",
    "GrammarInput",
    "InputGrammar",
    "MessageCall",
    "NamedToolChoice",
    "TextInput",
    "Tool",
    "ToolName",
    "ToolReference",
    "Typed",
]

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


class InputGrammar(Struct):
    """The grammar of a custom tool's input. Lark does not constrain it."""

    syntax: Literal["lark", "regex"]
    definition: str


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
