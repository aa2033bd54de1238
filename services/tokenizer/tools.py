"""Tools: the JSON of a call, as a schema that the output is constrained to."""

import json
import re
from collections.abc import Sequence
from typing import Any, TypeAlias

from services.common.annotations import unenforced
from services.common.contract import FUNCTION_NAME, MAX_TOOLS
from services.common.json_values import Json, parse_json
from tokenwire.errors import invalid
from tokenwire.pb.completion.v1 import completion_pb2
from tokenwire.pb.types.v1 import types_pb2

__all__ = [
    "PlacedTool",
    "arguments_schema",
    "arguments_schemas",
    "call_grammar",
    "check_tools",
    "forced_tools",
    "moved_schema",
    "template_tools",
    "unenforced_in_tools",
]

PlacedTool: TypeAlias = tuple[int, completion_pb2.Tool]
"""A tool that may be called, and its place in the request."""

_NAME = re.compile(FUNCTION_NAME)
_MAX_JSON = 1024 * 1024  # characters of all schemas: json.loads lets nobody else run
_MAX_DEPTH = 100  # levels of a schema; the grammar service takes few more
_NO_ARGUMENTS = '{"properties":{},"additionalProperties":false}'
_NO_PARAMETERS = '{"type":"object","properties":{}}'
_LITERAL = frozenset({"const", "default", "enum", "examples"})  # keywords that hold no schemas
_NAMED = frozenset({"$defs", "definitions", "patternProperties", "properties"})  # schemas by name


def check_tools(tools: Sequence[completion_pb2.Tool], choice: completion_pb2.ToolChoice) -> None:
    """Raises INVALID_ARGUMENT for what is no tool, and for a choice that names none of them."""
    if len(tools) > MAX_TOOLS:
        raise invalid("tools", f"At most {MAX_TOOLS} tools are taken.")
    if sum(len(tool.parameters_json) for tool in tools) > _MAX_JSON:
        raise invalid(
            "tools", f"The parameters of all tools have at most {_MAX_JSON:,} characters."
        )
    names: set[str] = set()
    for index, tool in enumerate(tools):
        field = f"tools[{index}]"
        if not _NAME.fullmatch(tool.name):
            raise invalid(f"{field}.name", "A tool's name has 1 to 64 of A-Z, a-z, 0-9, _ and -.")
        if tool.name in names:
            raise invalid(f"{field}.name", f"There are two tools named {tool.name}.")
        names.add(tool.name)
        arguments_schema(tool, field)
    kind = choice.WhichOneof("choice")
    if kind == "name" and choice.name not in names:
        raise invalid("tool_choice", f"tool_choice names {choice.name!r}, which is none of tools.")
    if kind == "mode" and choice.mode not in completion_pb2.ToolMode.values():
        raise invalid("tool_choice", "tool_choice is none of the known modes.")
    if not tools and choice.mode == completion_pb2.TOOL_MODE_REQUIRED:
        raise invalid("tool_choice", "tool_choice forces a call: it needs tools.")


def call_grammar(
    tools: Sequence[completion_pb2.Tool], choice: completion_pb2.ToolChoice
) -> types_pb2.GrammarSpec | None:
    """What constrains the output to one call, {"name": …, "arguments": {…}}; None for free text.

    There is a call where the choice forces one, or a tool is strict and the choice is not "none":
    text alone can't tell a call that the model decided on from one that it only writes about.
    The tools and the choice were checked.
    """
    placed = forced_tools(tools, choice)
    if not placed:
        return None
    schema = {
        "anyOf": [_call(tool.name) for _, tool in placed],
        "$defs": {
            tool.name: moved_schema(
                arguments_schema(tool, f"tools[{index}]"), f"#/$defs/{tool.name}"
            )
            for index, tool in placed
        },
    }
    return types_pb2.GrammarSpec(json_schema=json.dumps(schema))


def forced_tools(
    tools: Sequence[completion_pb2.Tool], choice: completion_pb2.ToolChoice
) -> list[PlacedTool]:
    """Those of which `call_grammar` makes the output one call."""
    placed = list(enumerate(tools))
    if choice.WhichOneof("choice") == "name":
        return [(index, tool) for index, tool in placed if tool.name == choice.name]
    is_forced = choice.mode == completion_pb2.TOOL_MODE_REQUIRED or any(t.strict for t in tools)
    return placed if is_forced and choice.mode != completion_pb2.TOOL_MODE_NONE else []


def unenforced_in_tools(tools: Sequence[PlacedTool]) -> list[str]:
    """As `unenforced`, of the schemas of tools, which were checked: paths from the request."""
    return [
        path
        for index, tool in tools
        for path in unenforced(
            arguments_schema(tool, f"tools[{index}]"), f"tools[{index}].parameters_json"
        )
    ]


def template_tools(tools: Sequence[completion_pb2.Tool]) -> list[Json]:
    """The tools as chat templates take them, which is OpenAI's form. They were checked."""
    return [
        {
            "type": "function",
            "function": {
                "name": tool.name,
                **({"description": tool.description} if tool.description else {}),
                "parameters": json.loads(tool.parameters_json or _NO_PARAMETERS),
            },
        }
        for tool in tools
    ]


def _call(name: str) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": {"name": {"const": name}, "arguments": {"$ref": f"#/$defs/{name}"}},
        "required": ["name", "arguments"],
        "additionalProperties": False,
    }


def arguments_schema(tool: completion_pb2.Tool, field: str) -> dict[str, Any]:
    """The schema of the arguments, which are an object in any case; `field` is the tool's."""
    field = f"{field}.parameters_json"
    try:
        schema = parse_json(tool.parameters_json or _NO_ARGUMENTS)
        moved_schema(schema, "#")  # not too deep for that
        if "\\u" in tool.parameters_json:
            json.dumps(schema, ensure_ascii=False).encode()  # half a surrogate pair is no text
    except RecursionError:
        raise invalid(field, f"The parameters of {tool.name} are nested too deeply.") from None
    except ValueError as error:
        raise invalid(field, f"The parameters of {tool.name} are not JSON: {error}.") from None
    if not isinstance(schema, dict) or schema.setdefault("type", "object") != "object":
        raise invalid(field, f"The parameters of {tool.name} must be a schema of an object.")
    return {key: value for key, value in schema.items() if key not in ("$id", "$schema")}


def arguments_schemas(tools: Sequence[completion_pb2.Tool]) -> dict[str, dict[str, Any]]:
    """The schemas of the tools' arguments by the tools' names. They were checked."""
    return {
        tool.name: arguments_schema(tool, f"tools[{index}]") for index, tool in enumerate(tools)
    }


def moved_schema(schema: Any, place: str, depth: int = 0) -> Any:
    """The schema, with references that still hold where it is put into another one."""
    if depth > _MAX_DEPTH:
        raise RecursionError
    if isinstance(schema, list):
        return [moved_schema(part, place, depth + 1) for part in schema]
    if not isinstance(schema, dict):
        return schema
    moved = {}
    for key, value in schema.items():
        if key in _NAMED and isinstance(value, dict):
            moved[key] = {
                name: moved_schema(part, place, depth + 1) for name, part in value.items()
            }
        elif key == "$ref" and (value == "#" or str(value).startswith("#/")):
            moved[key] = place + value[1:]
        else:
            moved[key] = moved_schema(value, "#" if key in _LITERAL else place, depth + 1)
    return moved
