"""Parts of tool calls that several families share: objects, names, arguments, marks."""

import json
from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

from services.tokenizer.chat.answer.argument_schemas import json_types, properties_of
from services.tokenizer.chat.answer.json_scanner import JsonScanner
from services.tokenizer.chat.answer.message_parser import SegmentKind
from services.tokenizer.chat.answer.text_reader import Reading, TextReader

__all__ = [
    "CallReader",
    "MemberTags",
    "Parameters",
    "arguments_object",
    "as_json",
    "call_object",
    "closing",
    "separator",
    "tagged_members",
    "tool_name",
    "typed_value",
]

Parameters: TypeAlias = Mapping[str, Mapping[str, Any]]
"""Schemas of the tools' arguments by name"""
CallReader: TypeAlias = Callable[[TextReader, Parameters], Reading]

_DECODER = json.JSONDecoder()
_ARGUMENTS = frozenset({"arguments", "parameters"})
_NAMES = frozenset({"name", "tool_name"})
_KEYS = _ARGUMENTS | _NAMES | {"id", "tool_call_id", "type"}
_PYTHON_CONSTANTS = {"True": True, "False": False, "None": None}


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
        named = next((places[each] for each in _NAMES if each in places), None)
        if key in _ARGUMENTS and character == "{" and named is not None:
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
        except (ValueError, RecursionError):  # such as a number with too many digits
            return False
        return isinstance(call, dict) and _settle_call(reader, call, tools)
    return is_settled


def _settle_call(reader: TextReader, call: Mapping[str, Any], tools: Parameters) -> bool:
    """Settle a call that was read as a whole, if it is one."""
    name = next((call[key] for key in call if key in _NAMES), None)
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
        text = as_json(arguments)
    except ValueError:
        return False
    reader.settle(SegmentKind.CALL, reader.at, name)
    reader.settle(SegmentKind.ARGUMENTS, 0, text)
    return True


def arguments_object(reader: TextReader) -> Reading:
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


def tool_name(reader: TextReader, tools: Parameters) -> Generator[None, None, str]:
    """Read the longest beginning of a tool's name; return it, or "" if it is no whole name."""
    begin = reader.at
    while (yield from reader.more()):
        name = reader.text[begin : reader.at + 1]
        if not any(tool.startswith(name) for tool in tools):
            break
        reader.at += 1
    name = reader.text[begin : reader.at]
    return name if name in tools else ""


@dataclass(frozen=True, slots=True)
class MemberTags:
    """Tags around the members of a call's arguments."""

    key: tuple[str, str]
    value: tuple[str, str]
    closes: str
    """End of the call"""
    trims: bool = False
    """True if a line break after the start and before the end of a value is not part of it"""


def tagged_members(reader: TextReader, schema: Mapping[str, Any], tags: MemberTags) -> Reading:
    """Settle members with tags as an object; return whether the end of the call was there."""
    before = "{"
    while True:
        reader.at = 0
        yield from reader.space()
        if not (yield from reader.literal(tags.key[0])):
            break
        key_at = reader.at
        if not (yield from reader.until(tags.key[1])):
            break
        key = reader.text[key_at : reader.at].strip()
        reader.at += len(tags.key[1])
        if tags.value[0]:
            yield from reader.space()
            if not (yield from reader.literal(tags.value[0])):
                break
        value_at = reader.at
        if not (yield from reader.until(tags.value[1])):
            break
        text = reader.text[value_at : reader.at]
        if tags.trims:
            text = text.removeprefix("\n").removesuffix("\n")
        value = typed_value(text, properties_of(schema).get(key), schema)
        fragment = f"{before}{as_json(key)}: {value}"
        reader.settle(SegmentKind.ARGUMENTS, reader.at + len(tags.value[1]), fragment)
        before = ", "
    reader.at = 0
    yield from reader.space()
    end = "{}" if before == "{" else "}"
    is_closed = yield from reader.literal(tags.closes)
    if is_closed:
        reader.settle(SegmentKind.ARGUMENTS, reader.at, end)
    elif not (reader.is_ended and reader.is_cut):
        reader.settle(SegmentKind.ARGUMENTS, 0, end)
    reader.at = 0
    return is_closed


def separator(reader: TextReader, mark: str) -> Reading:
    """Read a mark with whitespace around it, or nothing."""
    before = reader.at
    yield from reader.space()
    if (yield from reader.literal(mark)):
        yield from reader.space()
        return True
    reader.at = before
    return False


def closing(reader: TextReader, mark: str) -> Reading:
    """Settle a mark that ends calls, if it is there."""
    yield from reader.space()
    found = yield from reader.literal(mark)
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
        return as_json(_PYTHON_CONSTANTS.get(text, text))


def as_json(value: Any) -> str:
    """Return JSON. Raises TypeError and ValueError for values that JSON can't express."""
    text = json.dumps(value, ensure_ascii=False, allow_nan=False)
    try:
        text.encode()
    except UnicodeEncodeError:  # half a surrogate pair must be escaped
        return json.dumps(value, allow_nan=False)
    return text
