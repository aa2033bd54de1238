"""Parts of tool calls that several families share: objects, names, arguments, marks."""

import ast
import json
from collections.abc import Collection, Generator, Mapping
from typing import Any, TypeAlias

from services.tokenizer.chat.answer.argument_schemas import json_types
from services.tokenizer.chat.answer.call_syntax import (
    ARGUMENTS_KEYS,
    ID,
    INDEX,
    NAME,
    NAME_KEYS,
    mark_pieces,
)
from services.tokenizer.chat.answer.json_scanner import JsonScanner
from services.tokenizer.chat.answer.message_parser import SegmentKind
from services.tokenizer.chat.answer.text_reader import Reading, TextReader

__all__ = [
    "Parameters",
    "arguments_object",
    "as_json",
    "call_object",
    "closing",
    "python_value",
    "read_mark",
    "tool_name",
    "typed_value",
]

Parameters: TypeAlias = Mapping[str, Mapping[str, Any]]
"""Schemas of the tools' arguments by name"""

_DECODER = json.JSONDecoder()
_KEYS = ARGUMENTS_KEYS | NAME_KEYS | {"id", "tool_call_id", "type"}
_CONSTANTS = {"true": True, "false": False, "null": None}


def call_object(reader: TextReader, tools: Parameters) -> Reading:
    """Read {"name": …, "arguments": {…}}, in any order."""
    scanner, begin = JsonScanner(), reader.at
    key_at, places = 0, dict[str, int]()
    is_settled = False
    while not scanner.is_complete:
        if not (yield from reader.more()):
            break
        character, at = reader.text[reader.at], reader.at
        if scanner.depth == 0 and character != "{" and not character.isspace():
            return False  # the JSON is not an object
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
        named = next((places[each] for each in NAME_KEYS if each in places), None)
        if key in ARGUMENTS_KEYS and character == "{" and named is not None:
            if reader.text[named] != '"':
                return False
            name = _DECODER.raw_decode(reader.text, named)[0]
            if name not in tools:
                return False
            reader.settle(SegmentKind.CALL, at, name)
            is_settled = True
            if not (yield from arguments_object(reader)):
                return True
            scanner.push("}")
    if is_settled:
        reader.settle(SegmentKind.MARKUP, reader.at, "")
    elif scanner.is_complete:
        try:
            call = json.loads(reader.text[begin : reader.at])
        except (ValueError, RecursionError):  # for example, a number has too many digits
            return False
        return isinstance(call, dict) and _settle_call(reader, call, tools)
    return is_settled


def _settle_call(reader: TextReader, call: Mapping[str, Any], tools: Parameters) -> bool:
    """Settle a call that was read as a whole, if it is one."""
    name = next((call[key] for key in call if key in NAME_KEYS), None)
    arguments = next((call[key] for key in call if key in ARGUMENTS_KEYS), None)
    if isinstance(arguments, str):  # some models write the arguments as a JSON string
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
        text = as_json(arguments)
    except ValueError:
        return False
    reader.settle(SegmentKind.CALL, reader.at, name)
    reader.settle(SegmentKind.ARGUMENTS, 0, text)
    return True


def arguments_object(reader: TextReader) -> Reading:
    """Settle an object as it arrives; return False if it is incomplete.

    An incomplete object is closed, unless the text was cut.
    """
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


def tool_name(reader: TextReader, tools: Collection[str]) -> Generator[None, None, str]:
    """Read the longest beginning of a tool's name; return it if it is a whole name, else ""."""
    begin = reader.at
    while (yield from reader.more()):
        name = reader.text[begin : reader.at + 1]
        if not any(tool.startswith(name) for tool in tools):
            break
        reader.at += 1
    name = reader.text[begin : reader.at]
    return name if name in tools else ""


def read_mark(reader: TextReader, mark: str, names: Collection[str] = ()) -> Reading:
    """Read a mark with any white space between its parts, or read nothing.

    names: names of the tools, for marks that contain a tool's name.
    """
    before = reader.at
    for piece in mark_pieces(mark):
        yield from reader.space()
        if piece == NAME:
            found = bool((yield from tool_name(reader, names)))
        elif piece in (ID, INDEX):
            found = yield from _word(reader)
        else:
            found = yield from reader.literal(piece)
        if not found:
            reader.at = before
            return False
    return True


def _word(reader: TextReader) -> Reading:
    """Read letters, digits and signs of an id."""
    begin = reader.at
    while (yield from reader.more()):
        character = reader.text[reader.at]
        if not (character.isalnum() or character in "_-.:"):
            break
        reader.at += 1
    return reader.at > begin


def closing(reader: TextReader, mark: str) -> Reading:
    """Settle a mark that ends calls, if the text has it next."""
    reader.at = 0
    found = yield from read_mark(reader, mark)
    if found:
        reader.settle(SegmentKind.MARKUP, reader.at, "")
    reader.at = 0
    return found


def typed_value(text: str, schema: Any, root: Mapping[str, Any]) -> str:
    """Return JSON of a value without quotes, by the schema's type."""
    kinds = json_types(schema, root)
    if "string" in kinds and not (text == "null" and "null" in kinds):
        return as_json(text)
    try:
        return as_json(json.loads(text))
    except (ValueError, RecursionError):
        pass
    if "string" in kinds:
        return as_json(text)
    try:
        return as_json(python_value(text))
    except (ArithmeticError, MemoryError, RecursionError, SyntaxError, TypeError, ValueError):
        return as_json(text)


def python_value(text: str) -> Any:
    """Return the value of a Python literal, which may have JSON's constants.

    Raises SyntaxError, ValueError, TypeError, ArithmeticError, MemoryError or RecursionError.
    """
    body = ast.parse(text.strip(), mode="eval").body
    return ast.literal_eval(_JsonConstants().visit(body))


class _JsonConstants(ast.NodeTransformer):
    """Replaces JSON's constants with Python's."""

    def visit_Name(self, node: ast.Name) -> ast.expr:
        return ast.Constant(_CONSTANTS[node.id]) if node.id in _CONSTANTS else node


def as_json(value: Any) -> str:
    """Return JSON. Raises TypeError and ValueError for values that JSON can't express."""
    text = json.dumps(value, ensure_ascii=False, allow_nan=False)
    try:
        text.encode()
    except UnicodeEncodeError:  # half a surrogate pair must be escaped
        return json.dumps(value, allow_nan=False)
    return text
