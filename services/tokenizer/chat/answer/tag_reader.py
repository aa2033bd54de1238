"""Reader of arguments between tags, each with its name."""

import json
from collections.abc import Generator, Mapping
from typing import Any, TypeAlias

from services.tokenizer.chat.answer.argument_schemas import json_types, properties_of
from services.tokenizer.chat.answer.call_parts import as_json, read_mark, typed_value
from services.tokenizer.chat.answer.call_syntax import KEY, KIND, Notation, TaggedArguments
from services.tokenizer.chat.answer.message_parser import SegmentKind
from services.tokenizer.chat.answer.text_reader import Reading, TextReader

__all__ = ["read_tags"]

_MAX_DEPTH = 32
_Member: TypeAlias = Generator[None, None, str]
_Text: TypeAlias = Generator[None, None, str | None]


def read_tags(
    reader: TextReader, schema: Mapping[str, Any], form: TaggedArguments, ends: str
) -> Reading:
    """Settle arguments as an object; return whether the end of the call was found."""
    before = "{"
    while True:
        reader.at = 0
        yield from read_mark(reader, form.between)
        if not (yield from read_mark(reader, form.begins)):
            break
        member = yield from _member(reader, schema, form)
        if not member:
            break
        reader.settle(SegmentKind.ARGUMENTS, reader.at, before + member)
        before = ", "
    reader.at = 0
    end = "{}" if before == "{" else "}"
    is_closed = yield from read_mark(reader, ends)
    if is_closed:
        reader.settle(SegmentKind.ARGUMENTS, reader.at, end)
    elif not (reader.is_ended and reader.is_cut):
        reader.settle(SegmentKind.ARGUMENTS, 0, end)
    reader.at = 0
    return is_closed


def _member(reader: TextReader, schema: Mapping[str, Any], form: TaggedArguments) -> _Member:
    """Read a member from its name to the end of its value; return its JSON, "" if it has no end."""
    middle, has_kind, rest = form.middle.rstrip().partition(KIND)
    key = yield from _text_until(reader, middle.split()[0])
    if key is None or not (yield from read_mark(reader, middle)):
        return ""
    kind = ""
    if has_kind:
        found = yield from _text_until(reader, rest.split()[0])
        if found is None or not (yield from read_mark(reader, rest)):
            return ""
        kind = found
    key = key.strip()
    end = form.ends.replace(KEY, key)
    text = yield from _text_until(reader, end.strip())
    if text is None:
        return ""
    reader.at += len(end.strip())
    text = text.removeprefix(_space_behind(form.middle)).removesuffix(_space_before(form.ends))
    return f"{as_json(key)}: {_value(text, properties_of(schema).get(key), schema, form, kind)}"


def _text_until(reader: TextReader, end: str) -> _Text:
    """Read up to the text `end`; return the text in front of it, or None if there is no `end`."""
    begin = reader.at
    found = yield from reader.until(end)
    return reader.text[begin : reader.at] if found else None


def _value(
    text: str, schema: Any, root: Mapping[str, Any], form: TaggedArguments, kind: str
) -> str:
    """Return JSON of a value."""
    if form.notation is Notation.TAGS and form.begins in text:
        try:
            return as_json(_tagged_value(text, schema, root, form))
        except ValueError:
            return typed_value(text, schema, root)
    if not kind:
        return typed_value(text, schema, root)
    kinds = [name for name, written in form.kinds.items() if written == kind]
    return typed_value(text, {"type": kinds or ["string"]}, root)


def _tagged_value(
    text: str, schema: Any, root: Mapping[str, Any], form: TaggedArguments, depth: int = 0
) -> Any:
    """Return a list or an object. Raises ValueError for other texts."""
    if depth > _MAX_DEPTH:
        raise ValueError("too deep")
    own = schema if isinstance(schema, Mapping) else {}
    items: list[Any] = []
    members: dict[str, Any] = {}
    at = 0
    while text[at:].strip():
        at = text.index(form.begins, at) + len(form.begins)
        key, at = _until(text, at, form.middle.strip())
        is_item = key == form.item and "array" in json_types(own, root)
        inner = own.get("items") if is_item else properties_of(own).get(key)
        part, at = _until_own_end(text, at, key, form)
        if form.begins in part:
            value = _tagged_value(part, inner, root, form, depth + 1)
        else:
            value = _scalar(part, inner, root)
        if is_item:
            items.append(value)
        else:
            members[key] = value
    return items or members


def _scalar(text: str, schema: Any, root: Mapping[str, Any]) -> Any:
    if schema is not None:
        return json.loads(typed_value(text, schema, root))
    try:
        return json.loads(text)
    except ValueError:
        return text


def _until(text: str, at: int, mark: str) -> tuple[str, int]:
    end = text.index(mark, at)
    return text[at:end], end + len(mark)


def _until_own_end(text: str, at: int, key: str, form: TaggedArguments) -> tuple[str, int]:
    """Return the text up to the end of a tag, past tags of the same name within."""
    begin, mark = form.begins + key + form.middle.strip(), form.ends.replace(KEY, key).strip()
    start, depth = at, 1
    while depth:
        end = text.index(mark, at)
        inner = text.find(begin, at, end)
        depth += 1 if inner >= 0 else -1
        at = inner + len(begin) if inner >= 0 else end + len(mark)
    return text[start : at - len(mark)], at


def _space_behind(text: str) -> str:
    return text[len(text.rstrip()) :]


def _space_before(text: str) -> str:
    return text[: len(text) - len(text.lstrip())]
