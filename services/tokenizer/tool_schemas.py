"""Tools of a request: validation, and the JSON Schemas of their calls."""

import json
from collections.abc import Sequence
from typing import Any, TypeAlias

from services.common.annotations import LITERAL_KEYWORDS, NAMED_SCHEMAS, unenforced
from services.common.json_values import Json
from services.tokenizer.text.strict_json import parse_strictly
from tokenwire.errors import invalid
from tokenwire.pb.completion.v1 import completion_pb2
from tokenwire.pb.types.v1 import types_pb2

__all__ = [
    "IndexedTool",
    "arguments_schema",
    "arguments_schemas",
    "check_tools",
    "constrained_tools",
    "rebase_references",
    "shown_tools",
    "template_tools",
    "tool_call_grammar",
    "unenforced_in_tools",
    "without_unique_items",
]

IndexedTool: TypeAlias = tuple[int, completion_pb2.Tool]
"""A tool and its index in the request"""

_MAX_SCHEMA_LENGTH = 1024 * 1024  # characters of all schemas; json.loads blocks the event loop
_MAX_DEPTH = 100  # levels of a schema; the grammar service allows few more
_OPEN_KEYWORDS = frozenset({
    "$dynamicRef", "$ref", "additionalProperties", "allOf", "anyOf", "dependencies",
    "dependentRequired", "dependentSchemas", "else", "if", "maxProperties", "minProperties", "not",
    "oneOf", "patternProperties", "propertyNames", "then", "unevaluatedProperties",
})  # fmt: skip
"""The keywords that apply to members without a name in "properties" """
_NO_ARGUMENTS = '{"properties":{},"additionalProperties":false}'
_NO_PARAMETERS = '{"type":"object","properties":{}}'


def check_tools(tools: Sequence[completion_pb2.Tool], choice: completion_pb2.ToolChoice) -> None:
    """Raise INVALID_ARGUMENT for an invalid tool, or a choice that does not fit the tools.

    All fields are within their bounds.
    """
    if sum(len(tool.parameters_json) for tool in tools) > _MAX_SCHEMA_LENGTH:
        raise invalid(
            "tools",
            f"The parameters of all tools must have at most {_MAX_SCHEMA_LENGTH:,} characters.",
        )
    names: set[str] = set()
    for index, tool in enumerate(tools):
        field = f"tools[{index}]"
        if tool.name in names:
            raise invalid(f"{field}.name", f"Two tools have the name {tool.name}.")
        names.add(tool.name)
        arguments_schema(tool, field)
    kind = choice.WhichOneof("choice")
    if kind == "name" and choice.name not in names:
        raise invalid("tool_choice", f"tool_choice must name one of tools, got {choice.name!r}.")
    if not tools and choice.mode == completion_pb2.TOOL_MODE_REQUIRED:
        raise invalid("tool_choice", "tool_choice forces a call: add tools.")


def tool_call_grammar(
    tools: Sequence[completion_pb2.Tool], choice: completion_pb2.ToolChoice
) -> types_pb2.GrammarSpec | None:
    """Return the grammar of one call, {"name": …, "arguments": {…}}; None for free text.

    The output is a call if the choice forces one, or if a tool is strict and the choice is not
    "none": text alone does not show whether the model decided on a call or writes about one. Tools
    and choice are valid.
    """
    indexed = constrained_tools(tools, choice)
    if not indexed:
        return None
    schema = {
        "anyOf": [_call(tool.name) for _, tool in indexed],
        "$defs": {
            tool.name: rebase_references(
                arguments_schema(tool, f"tools[{index}]"), f"#/$defs/{tool.name}"
            )
            for index, tool in indexed
        },
    }
    return types_pb2.GrammarSpec(json_schema=json.dumps(schema))


def constrained_tools(
    tools: Sequence[completion_pb2.Tool], choice: completion_pb2.ToolChoice
) -> list[IndexedTool]:
    """Return the tools that `tool_call_grammar` allows to be called."""
    indexed = list(enumerate(tools))
    if choice.WhichOneof("choice") == "name":
        return [(index, tool) for index, tool in indexed if tool.name == choice.name]
    is_forced = choice.mode == completion_pb2.TOOL_MODE_REQUIRED or any(t.strict for t in tools)
    return indexed if is_forced and choice.mode != completion_pb2.TOOL_MODE_NONE else []


def unenforced_in_tools(tools: Sequence[IndexedTool]) -> list[str]:
    """Return the paths of the keywords in valid tools' schemas that no grammar enforces."""
    return [
        path
        for index, tool in tools
        for path in unenforced(
            arguments_schema(tool, f"tools[{index}]"), f"tools[{index}].parameters_json"
        )
    ]


def shown_tools(
    tools: Sequence[completion_pb2.Tool], choice: completion_pb2.ToolChoice
) -> Sequence[completion_pb2.Tool]:
    """Return the tools that a chat's prompt shows: none if the model must not call any."""
    return () if choice.mode == completion_pb2.TOOL_MODE_NONE else tools


def template_tools(tools: Sequence[completion_pb2.Tool]) -> list[Json]:
    """Return valid tools in OpenAI's form, which chat templates take."""
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


def arguments_schema(tool: completion_pb2.Tool, field: str) -> dict[str, Any]:
    """Return the schema of a tool's arguments, always an object's. Raises INVALID_ARGUMENT.

    Without keywords about unnamed members, the schema allows only named ones: models invent
    arguments where they may, and no function takes them.
    """
    field = f"{field}.parameters_json"
    try:
        schema = parse_strictly(tool.parameters_json or _NO_ARGUMENTS)
        rebase_references(schema, "#")  # raises RecursionError if the schema is too deep
    except RecursionError:
        raise invalid(field, f"The parameters of {tool.name} are nested too deeply.") from None
    except ValueError as error:
        raise invalid(field, f"The parameters of {tool.name} are not JSON: {error}.") from None
    if not isinstance(schema, dict) or schema.setdefault("type", "object") != "object":
        raise invalid(field, f"The parameters of {tool.name} must be a schema of an object.")
    if _names_all_members(schema):
        schema["additionalProperties"] = False
    return {key: value for key, value in schema.items() if key not in ("$id", "$schema")}


def _names_all_members(schema: dict[str, Any]) -> bool:
    """Return whether no keyword of an object's schema applies to unnamed members."""
    properties, required = schema.get("properties"), schema.get("required", [])
    return (
        isinstance(properties, dict)
        and isinstance(required, list)
        and all(name in properties for name in required)
        and not schema.keys() & _OPEN_KEYWORDS
    )


def arguments_schemas(tools: Sequence[completion_pb2.Tool]) -> dict[str, dict[str, Any]]:
    """Return the schemas of valid tools' arguments by name."""
    return {
        tool.name: arguments_schema(tool, f"tools[{index}]") for index, tool in enumerate(tools)
    }


def without_unique_items(indexed: IndexedTool) -> tuple[IndexedTool, list[str]]:
    """Return a valid tool whose schema lacks uniqueItems, and the paths of the removed keywords.

    Grammars detect repeated items only in arguments that are one JSON object. A strict tool stays
    as it is: the grammar service refuses it.
    """
    index, tool = indexed
    if tool.strict or "uniqueItems" not in tool.parameters_json:
        return indexed, []
    left_out: list[str] = []
    schema = _without_unique_items(
        json.loads(tool.parameters_json), f"tools[{index}].parameters_json", left_out
    )
    shown = completion_pb2.Tool()
    shown.CopyFrom(tool)
    shown.parameters_json = json.dumps(schema)
    return (index, shown), left_out


def _without_unique_items(schema: Any, path: str, left_out: list[str]) -> Any:
    if isinstance(schema, list):
        parts = enumerate(schema)
        return [_without_unique_items(part, f"{path}[{i}]", left_out) for i, part in parts]
    if not isinstance(schema, dict):
        return schema
    kept = {}
    for key, value in schema.items():
        place = f"{path}.{key}"
        if key == "uniqueItems" and value is True:
            left_out.append(place)
        elif key in NAMED_SCHEMAS and isinstance(value, dict):
            kept[key] = {
                name: _without_unique_items(part, f"{place}.{name}", left_out)
                for name, part in value.items()
            }
        elif key in LITERAL_KEYWORDS:
            kept[key] = value
        else:
            kept[key] = _without_unique_items(value, place, left_out)
    return kept


def rebase_references(schema: Any, base: str, depth: int = 0) -> Any:
    """Return the schema with references that hold at `base`. Raises RecursionError if too deep."""
    if depth > _MAX_DEPTH:
        raise RecursionError
    if isinstance(schema, list):
        return [rebase_references(part, base, depth + 1) for part in schema]
    if not isinstance(schema, dict):
        return schema
    rebased = {}
    for key, value in schema.items():
        if key in NAMED_SCHEMAS and isinstance(value, dict):
            rebased[key] = {
                name: rebase_references(part, base, depth + 1) for name, part in value.items()
            }
        elif key == "$ref" and (value == "#" or str(value).startswith("#/")):
            rebased[key] = base + value[1:]
        else:
            inner_base = "#" if key in LITERAL_KEYWORDS else base
            rebased[key] = rebase_references(value, inner_base, depth + 1)
    return rebased


def _call(name: str) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": {"name": {"const": name}, "arguments": {"$ref": f"#/$defs/{name}"}},
        "required": ["name", "arguments"],
        "additionalProperties": False,
    }
