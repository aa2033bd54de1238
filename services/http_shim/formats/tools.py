"""Conversion of tools to protos, and of proto field paths to the client's names."""

import re
from collections.abc import Sequence
from typing import TypeAlias

from services.http_shim.formats.constraints import json_text
from services.http_shim.formats.custom_tools import custom_tool
from services.http_shim.formats.tool_fields import (
    AllowedTools,
    CustomSpec,
    GrammarInput,
    InputGrammar,
    NamedToolChoice,
    Tool,
    ToolReference,
)
from tokenwire.errors import invalid
from tokenwire.pb.completion.v1 import completion_pb2

__all__ = [
    "TOOL_MODES",
    "custom_names",
    "tool_choice_of",
    "tool_param",
    "tool_schema_param",
    "tools_of",
    "unenforced_formats",
]

_Choice: TypeAlias = str | NamedToolChoice | None
TOOL_MODES = {
    "none": completion_pb2.TOOL_MODE_NONE,
    "auto": completion_pb2.TOOL_MODE_AUTO,
    "required": completion_pb2.TOOL_MODE_REQUIRED,
}
_FIELD = re.compile(r"tools\[(?P<index>\d+)\](?:\.(?P<field>\w+)(?P<rest>.*))?")


def tools_of(tools: Sequence[Tool] | None, choice: _Choice = None) -> list[completion_pb2.Tool]:
    """Convert the tools that the choice allows."""
    return [_tool(tool) for _, tool in _shown(tools, choice)]


def tool_choice_of(
    tools: Sequence[Tool] | None, choice: _Choice
) -> completion_pb2.ToolChoice | None:
    """Convert the choice. Raises INVALID_ARGUMENT for an allowed tool that is not there."""
    if choice is None:
        return None
    if isinstance(choice, str):
        return completion_pb2.ToolChoice(mode=TOOL_MODES[choice])
    if (allowed := choice.allowed_tools) is None:
        return completion_pb2.ToolChoice(name=_name(choice))
    unknown = _allowed_names(allowed) - {_name(tool) for tool in tools or ()}
    if unknown:
        raise invalid("tool_choice", f"tool_choice allows {min(unknown)!r}, which tools lacks.")
    return completion_pb2.ToolChoice(mode=TOOL_MODES[allowed.mode])


def custom_names(tools: Sequence[Tool] | None) -> frozenset[str]:
    """Return the names of the custom tools."""
    return frozenset(tool.custom.name for tool in tools or () if tool.custom is not None)


def unenforced_formats(tools: Sequence[Tool] | None) -> list[str]:
    """Return the paths of formats that do not constrain the input of their tools."""
    return [
        f"tools[{index}].custom.format"
        for index, tool in enumerate(tools or ())
        if (grammar := _grammar(tool.custom)) is not None and grammar.syntax == "lark"
    ]


def tool_param(path: str, tools: Sequence[Tool] | None, choice: _Choice = None) -> str:
    """Return the client's name of a field of a tool: "tools[0].function.name"."""
    return _place(path, tools, choice)[0]


def tool_schema_param(path: str, tools: Sequence[Tool] | None, choice: _Choice) -> str:
    """Return the client's name of a path into the schema of a tool's parameters."""
    return "".join(_place(path, tools, choice))


def _place(path: str, tools: Sequence[Tool] | None, choice: _Choice) -> tuple[str, str]:
    """Return the client's name of a field of a tool, and the rest of the path."""
    if (found := _FIELD.fullmatch(path)) is None:
        return path, ""
    index, tool = _shown(tools, choice)[int(found["index"])]
    if found["field"] is None:
        return f"tools[{index}]", ""
    if tool.type == "custom" and found["field"] == "parameters_json":
        return f"tools[{index}].custom.format.grammar.definition", ""
    field = found["field"].removesuffix("_json")
    return f"tools[{index}].{tool.type}.{field}", found["rest"]


def _shown(tools: Sequence[Tool] | None, choice: _Choice) -> list[tuple[int, Tool]]:
    """Return the tools that the model sees, with their indices."""
    shown = list(enumerate(tools or ()))
    if not isinstance(choice, NamedToolChoice) or choice.allowed_tools is None:
        return shown
    allowed = _allowed_names(choice.allowed_tools)
    return [(index, tool) for index, tool in shown if _name(tool) in allowed]


def _allowed_names(allowed: AllowedTools) -> set[str]:
    return {_name(tool) for tool in allowed.tools}


def _name(named: Tool | ToolReference | NamedToolChoice) -> str:
    spec = named.function if named.custom is None else named.custom
    return "" if spec is None else spec.name


def _tool(tool: Tool) -> completion_pb2.Tool:
    if tool.custom is not None:
        return custom_tool(tool.custom.name, tool.custom.description, _grammar(tool.custom))
    function = tool.function
    assert function is not None
    return completion_pb2.Tool(
        name=function.name,
        description=function.description or "",
        parameters_json="" if function.parameters is None else json_text(function.parameters),
        strict=bool(function.strict),
    )


def _grammar(custom: CustomSpec | None) -> InputGrammar | None:
    form = None if custom is None else custom.format
    return form.grammar if isinstance(form, GrammarInput) else None
