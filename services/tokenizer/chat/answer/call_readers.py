"""Readers of tool calls in generated text, by family of models.

A reader starts where a call may begin. It settles nothing until the call is certain: a known tool's
name was read, and its arguments begin. It returns false if it settled nothing. Arguments are passed
on as they arrive. Text from the first character that can't belong to them is left as content.
"""

import ast
import json
from collections.abc import Callable, Generator, Mapping
from typing import Any, TypeAlias

from services.tokenizer.chat.answer.json_scanner import JsonScanner
from services.tokenizer.chat.answer.message_parser import SegmentKind
from services.tokenizer.chat.answer.text_reader import Reading, TextReader

__all__ = [
    "CallReader",
    "Parameters",
    "json_types",
    "named_values",
    "object_of",
    "properties_of",
    "read_json_calls",
    "read_mistral_calls",
    "read_pythonic_calls",
    "read_tagged_json_call",
    "read_xml_call",
]

Parameters: TypeAlias = Mapping[str, Mapping[str, Any]]
"""Schemas of the tools' arguments by name"""
CallReader: TypeAlias = Callable[[TextReader, Parameters], Reading]

_DECODER = json.JSONDecoder()
_ARGUMENTS = frozenset({"arguments", "parameters"})
_KEYS = _ARGUMENTS | {"id", "name", "type"}
_MAX_REFERENCES = 8  # in a chain
_TYPE_OF = {
    bool: "boolean", int: "integer", float: "number", type(None): "null", list: "array",
    dict: "object",
}  # fmt: skip
_CONSTANTS = {"true": True, "false": False, "null": None}
_PYTHON_CONSTANTS = {"True": True, "False": False, "None": None}


def read_tagged_json_call(reader: TextReader, tools: Parameters) -> Reading:
    """Read a call of Hermes or Qwen: <tool_call>{"name": …, "arguments": {…}}</tool_call>."""
    if not (yield from reader.literal("<tool_call>")):
        return False
    yield from reader.space()
    if not (yield from _call_object(reader, tools)):
        return False
    yield from _closing(reader, "</tool_call>")
    return True


def read_json_calls(reader: TextReader, tools: Parameters) -> Reading:
    """Read calls of Llama 3: {"name": …, "parameters": {…}}; …, behind <|python_tag|> or alone."""
    yield from reader.literal("<|python_tag|>")
    yield from reader.space()
    if not (yield from _call_object(reader, tools)):
        return False
    while (yield from _separator(reader, ";")):
        if not (yield from _call_object(reader, tools)):
            break
    reader.at = 0
    return True


def read_mistral_calls(reader: TextReader, tools: Parameters) -> Reading:
    """Read calls of Mistral.

    They are [TOOL_CALLS][{"name": …, "arguments": {…}}, …] or [TOOL_CALLS]name[ARGS]{…}.
    """
    if not (yield from reader.literal("[TOOL_CALLS]")):
        return False
    if not (yield from reader.space()):
        return False
    if reader.text[reader.at] == "{":
        return (yield from _call_object(reader, tools))
    if reader.text[reader.at] != "[":
        return (yield from _named_call(reader, tools))
    reader.at += 1
    yield from reader.space()
    if not (yield from _call_object(reader, tools)):
        return False
    while (yield from _separator(reader, ",")):
        if not (yield from _call_object(reader, tools)):
            reader.at = 0
            return True
    yield from _closing(reader, "]")
    return True


def read_pythonic_calls(reader: TextReader, tools: Parameters) -> Reading:
    """Read calls of Llama 3.2 and 4: [name(key=value, …), …]."""
    tagged = yield from reader.literal("<|python_start|>")
    if not (yield from reader.literal("[")):
        return False
    if not (yield from _python_call(reader, tools)):
        return False
    while (yield from _separator(reader, ",")):
        if not (yield from _python_call(reader, tools)):
            reader.at = 0
            return True
    yield from _closing(reader, "]")
    if tagged:
        yield from _closing(reader, "<|python_end|>")
    return True


def read_xml_call(reader: TextReader, tools: Parameters) -> Reading:
    """Read a call of Qwen3-Coder: <tool_call><function=name><parameter=key>value</parameter>…."""
    tagged = yield from reader.literal("<tool_call>")
    yield from reader.space()
    if not (yield from reader.literal("<function=")):
        return False
    name = yield from _tool_name(reader, tools)
    if not name or not (yield from reader.literal(">")):
        return False
    reader.settle(SegmentKind.CALL, reader.at, name)
    separator = "{"
    while True:
        yield from reader.space()
        if not (yield from reader.literal("<parameter=")):
            break
        key_at = reader.at
        if not (yield from reader.until(">")):
            break
        key, value_at = reader.text[key_at : reader.at].strip(), reader.at + 1
        if not (yield from reader.until("</parameter>")):
            break
        text = reader.text[value_at : reader.at].removeprefix("\n").removesuffix("\n")
        value = _typed(text, properties_of(tools[name]).get(key), tools[name])
        fragment = f"{separator}{_json(key)}: {value}"
        reader.settle(SegmentKind.ARGUMENTS, reader.at + len("</parameter>"), fragment)
        separator = ", "
    end = "{}" if separator == "{" else "}"
    if (yield from reader.literal("</function>")):
        reader.settle(SegmentKind.ARGUMENTS, reader.at, end)
        if tagged:
            yield from _closing(reader, "</tool_call>")
    else:
        reader.at = 0
        if not (reader.is_ended and reader.is_cut):
            reader.settle(SegmentKind.ARGUMENTS, 0, end)
    return True


def _call_object(reader: TextReader, tools: Parameters) -> Reading:
    """Read {"name": …, "arguments": {…}}, in any order."""
    scanner, begin = JsonScanner(), reader.at
    key_at, places = 0, dict[str, int]()
    is_settled = False
    while not scanner.is_complete:
        if not (yield from reader.more()):
            break
        character, at = reader.text[reader.at], reader.at
        if scanner.depth == 0 and character != "{" and not character.isspace():
            return False  # JSON, but no object
        is_key = scanner.depth == 1 and scanner.awaits_key and character == '"'
        is_value = scanner.depth == 1 and scanner.awaits_value and not character.isspace()
        if not scanner.push(character):
            break
        reader.at += 1
        if is_key:
            key_at = at
        if not is_value or is_settled:
            continue
        key = _DECODER.raw_decode(reader.text, key_at)[0]
        places[key] = at
        if key not in _KEYS:
            return False
        if key in _ARGUMENTS and character == "{" and "name" in places:
            if reader.text[places["name"]] != '"':
                return False
            name = _DECODER.raw_decode(reader.text, places["name"])[0]
            if name not in tools:
                return False
            reader.settle(SegmentKind.CALL, at, name)
            is_settled = True
            if not (yield from _arguments(reader)):
                return True
            scanner.push("}")
    if is_settled:
        reader.settle(SegmentKind.MARKUP, reader.at, "")
    elif scanner.is_complete:
        try:
            call = json.loads(reader.text[begin : reader.at])
        except (ValueError, RecursionError):  # such as a number with too many digits
            return False
        return isinstance(call, dict) and _settle_call(reader, call, tools)
    return is_settled


def _settle_call(reader: TextReader, call: Mapping[str, Any], tools: Parameters) -> bool:
    """Settle a call that was read as a whole, if it is one."""
    name = call.get("name")
    arguments = next((call[key] for key in call if key in _ARGUMENTS), None)
    if isinstance(arguments, str):  # some models write JSON in JSON
        try:
            arguments = json.loads(arguments)
        except (ValueError, RecursionError):
            return False
    if not isinstance(name, str) or name not in tools:
        return False
    if arguments is None:
        arguments = {}
    if not isinstance(arguments, dict):
        return False
    try:
        text = _json(arguments)
    except ValueError:
        return False
    reader.settle(SegmentKind.CALL, reader.at, name)
    reader.settle(SegmentKind.ARGUMENTS, 0, text)
    return True


def _arguments(reader: TextReader) -> Reading:
    """Settle an object as it arrives. Return false if it breaks off; it is completed unless cut."""
    scanner = JsonScanner()
    reader.at = 0
    while True:
        text = reader.text
        while reader.at < len(text) and not scanner.is_complete:
            if not scanner.push(text[reader.at]):
                reader.settle(
                    SegmentKind.ARGUMENTS, reader.at, text[: reader.at] + scanner.completion()
                )
                return False
            reader.at += 1
        reader.settle(SegmentKind.ARGUMENTS, reader.at)
        if scanner.is_complete:
            return True
        if not (yield from reader.more()):
            if not reader.is_cut:
                reader.settle(SegmentKind.ARGUMENTS, 0, scanner.completion())
            return False


def _named_call(reader: TextReader, tools: Parameters) -> Reading:
    """Read name[CALL_ID]id[ARGS]{…}; [CALL_ID]id and [ARGS] are optional."""
    name = yield from _tool_name(reader, tools)
    if not name:
        return False
    if (yield from reader.literal("[CALL_ID]")) and not (yield from reader.until("[ARGS]")):
        return False
    yield from reader.literal("[ARGS]")
    if not (yield from reader.space()) or reader.text[reader.at] != "{":
        return False
    reader.settle(SegmentKind.CALL, reader.at, name)
    yield from _arguments(reader)
    return True


def _python_call(reader: TextReader, tools: Parameters) -> Reading:
    """Read name(key=value, …), and settle it as a whole."""
    yield from reader.space()
    name = yield from _tool_name(reader, tools)
    if not name or not (yield from reader.literal("(")):
        return False
    opened = reader.at
    if not (yield from _closing_bracket(reader)):
        return False
    try:
        arguments = _python_arguments(reader.text[opened : reader.at])
    except (ArithmeticError, MemoryError, RecursionError, SyntaxError, TypeError, ValueError):
        return False
    reader.settle(SegmentKind.CALL, opened, name)
    reader.settle(SegmentKind.ARGUMENTS, reader.at, arguments)
    return True


def _tool_name(reader: TextReader, tools: Parameters) -> Generator[None, None, str]:
    """Read the longest beginning of a tool's name; return it, or "" if it is no whole name."""
    begin = reader.at
    while (yield from reader.more()):
        name = reader.text[begin : reader.at + 1]
        if not any(tool.startswith(name) for tool in tools):
            break
        reader.at += 1
    name = reader.text[begin : reader.at]
    return name if name in tools else ""


def _closing_bracket(reader: TextReader) -> Reading:
    """Read to the bracket that closes the one before, past strings and nested brackets."""
    depth, quote = 1, ""
    while depth:
        if not (yield from reader.more()):
            return False
        character = reader.text[reader.at]
        reader.at += 1
        if quote:
            if character == "\\":
                if not (yield from reader.more()):
                    return False
                reader.at += 1
            elif character == quote:
                quote = ""
        elif character in "\"'":
            quote = character
        elif character in "([{":
            depth += 1
        elif character in ")]}":
            depth -= 1
    return True


def _python_arguments(text: str) -> str:
    """Return JSON of the keyword arguments in `text`, which ends with their closing bracket."""
    call = ast.parse(f"f({text}", mode="eval").body
    if not isinstance(call, ast.Call) or call.args or any(not word.arg for word in call.keywords):
        raise SyntaxError("arguments must have names")
    values = {
        str(word.arg): ast.literal_eval(_JsonConstants().visit(word.value))
        for word in call.keywords
    }
    return _json(values)


class _JsonConstants(ast.NodeTransformer):
    """Replaces JSON's constants with Python's."""

    def visit_Name(self, node: ast.Name) -> ast.expr:
        return ast.Constant(_CONSTANTS[node.id]) if node.id in _CONSTANTS else node


def _separator(reader: TextReader, mark: str) -> Reading:
    """Read a mark with whitespace around it, or nothing."""
    before = reader.at
    yield from reader.space()
    if (yield from reader.literal(mark)):
        yield from reader.space()
        return True
    reader.at = before
    return False


def _closing(reader: TextReader, mark: str) -> Reading:
    """Settle a mark that ends calls, if it is there."""
    yield from reader.space()
    found = yield from reader.literal(mark)
    if found:
        reader.settle(SegmentKind.MARKUP, reader.at, "")
    reader.at = 0
    return found


def _typed(text: str, schema: Any, root: Mapping[str, Any]) -> str:
    """Return JSON of a value without quotes, by the schema's type."""
    kinds = json_types(schema, root)
    if "string" in kinds and not (text == "null" and "null" in kinds):
        return _json(text)
    try:
        return _json(json.loads(text))
    except (ValueError, RecursionError):
        return _json(_PYTHON_CONSTANTS.get(text, text))


def json_types(schema: Any, root: Mapping[str, Any], depth: int = 0) -> frozenset[str]:
    """Return the JSON types that a schema allows; "string" if it does not say."""
    if not isinstance(schema, Mapping) or depth > _MAX_REFERENCES:
        return frozenset({"string"})
    named = schema.get("type")
    if isinstance(named, str):
        return frozenset({named})
    if isinstance(named, list):
        return frozenset(map(str, named))
    if values := named_values(schema):
        return frozenset(_TYPE_OF.get(type(value), "string") for value in values)
    if isinstance(reference := schema.get("$ref"), str):
        return json_types(_resolved(reference, root), root, depth + 1)
    options = [
        option
        for keyword in ("anyOf", "oneOf", "allOf")
        if isinstance(parts := schema.get(keyword), list)
        for option in parts
    ]
    kinds = [json_types(option, root, depth + 1) for option in options]
    return frozenset().union(*kinds) if kinds else frozenset({"string"})


def object_of(root: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the part of a schema that describes the object: the target of a bare reference."""
    schema = root
    for _ in range(_MAX_REFERENCES):
        reference = schema.get("$ref")
        if "properties" in schema or not isinstance(reference, str):
            break
        found = _resolved(reference, root)
        if not isinstance(found, Mapping):
            break
        schema = found
    return schema


def properties_of(root: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the schemas of an object's members by name; {} if they are no object."""
    properties = object_of(root).get("properties")
    return properties if isinstance(properties, dict) else {}


def named_values(schema: Mapping[str, Any]) -> list[Any]:
    """Return the values that a schema lists; [] if it lists none."""
    if isinstance(values := schema.get("enum"), list):
        return values
    return [schema["const"]] if "const" in schema else []


def _resolved(reference: str, root: Mapping[str, Any]) -> Any:
    """Return the target of a reference into the schema; None without one."""
    found: Any = root
    for part in reference.removeprefix("#").split("/")[1:]:
        found = found.get(part) if isinstance(found, Mapping) else None
    return found


def _json(value: Any) -> str:
    """Return JSON. Raises TypeError and ValueError for values that JSON can't express."""
    text = json.dumps(value, ensure_ascii=False, allow_nan=False)
    try:
        text.encode()
    except UnicodeEncodeError:  # half a surrogate pair must be escaped
        return json.dumps(value, allow_nan=False)
    return text
