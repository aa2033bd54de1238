"""Reader of arguments in brackets, as in name(key='value') or name{key:value}."""

import json
import re
from typing import Any

from services.tokenizer.chat.answer.call_parts import as_json, python_value
from services.tokenizer.chat.answer.call_syntax import KeywordArguments, Notation
from services.tokenizer.chat.answer.message_parser import SegmentKind
from services.tokenizer.chat.answer.text_reader import Reading, TextReader

__all__ = ["read_keywords"]

_MAX_DEPTH = 64
_WRONG = (ArithmeticError, MemoryError, RecursionError, SyntaxError, TypeError, ValueError)
_BARE = re.compile(r"[^\[\]{},:]+")


def read_keywords(reader: TextReader, name: str, form: KeywordArguments) -> Reading:
    """Settle arguments behind the opening bracket, member by member, up to the closing bracket.

    Return False, and settle nothing, if the text does not begin with a member.
    """
    before, is_settled = "{", False
    while True:
        yield from reader.space()
        if before != "{" and (yield from reader.literal(form.between.strip())):
            yield from reader.space()
        if not (yield from reader.more()):
            break
        if reader.text[reader.at] in ")}":
            if not is_settled:
                reader.settle(SegmentKind.CALL, reader.at, name)
            reader.settle(SegmentKind.ARGUMENTS, reader.at, "{}" if before == "{" else "}")
            return True
        begin = reader.at
        if not (yield from reader.until(form.middle.strip())):
            break
        key = reader.text[begin : reader.at].strip()
        if not key.isidentifier():
            break
        reader.at += len(form.middle.strip())
        if form.notation is Notation.BARE and not is_settled:  # text rarely looks like this
            reader.settle(SegmentKind.CALL, begin, name)
            is_settled, begin = True, 0
        value_at = reader.at
        if not (yield from _value_end(reader, form)):
            break
        try:
            value = _value(reader.text[value_at : reader.at], form)
            member = f"{as_json(key)}: {as_json(value)}"
        except _WRONG:
            break
        if not is_settled:
            reader.settle(SegmentKind.CALL, begin, name)
            is_settled = True
        reader.settle(SegmentKind.ARGUMENTS, reader.at, before + member)
        before = ", "
    if is_settled:
        if not (reader.is_ended and reader.is_cut):
            reader.settle(SegmentKind.ARGUMENTS, 0, "{}" if before == "{" else "}")
        reader.at = 0
    return is_settled


def _value_end(reader: TextReader, form: KeywordArguments) -> Reading:
    """Read to the comma or the bracket behind a value, past strings and nested brackets."""
    quotes = (form.quote,) if form.notation is Notation.BARE else ("'", '"')
    depth = 0
    while (yield from reader.more()):
        for quote in quotes:
            if (yield from reader.literal(quote)):
                if not (yield from _string_end(reader, quote, form)):
                    return False
                break
        else:
            character = reader.text[reader.at]
            if depth == 0 and character in ",)]}":
                return True
            depth += (character in "([{") - (character in ")]}")
            reader.at += 1
    return False


def _string_end(reader: TextReader, quote: str, form: KeywordArguments) -> Reading:
    while not (yield from reader.literal(quote)):
        if not (yield from reader.more()):
            return False
        has_escape = form.notation is Notation.PYTHON and reader.text[reader.at] == "\\"
        reader.at += 2 if has_escape else 1
    return True


def _value(text: str, form: KeywordArguments) -> Any:
    if form.notation is Notation.PYTHON:
        return python_value(text)
    value, end = _bare_value(text, 0, form.quote, 0)
    if text[end:].strip():
        raise ValueError(text)
    return value


def _bare_value(text: str, at: int, quote: str, depth: int) -> tuple[Any, int]:
    """Return the value at a place, and the place behind it. Raises ValueError."""
    if depth > _MAX_DEPTH:
        raise ValueError("too deep")
    at = _skip_space(text, at)
    if text.startswith(quote, at):
        begin = at + len(quote)
        end = text.index(quote, begin)
        return text[begin:end], end + len(quote)
    if text[at : at + 1] in ("{", "["):
        return _bare_group(text, at, quote, depth)
    found = _BARE.match(text, at)
    if found is None:
        raise ValueError(text)
    word = found.group().strip()
    try:
        return json.loads(word), found.end()
    except ValueError:
        return word, found.end()


def _bare_group(text: str, at: int, quote: str, depth: int) -> tuple[Any, int]:
    close = "}" if text[at] == "{" else "]"
    members: dict[str, Any] = {}
    items: list[Any] = []
    at = _skip_space(text, at + 1)
    while not text.startswith(close, at):
        value, at = _bare_value(text, at, quote, depth + 1)
        at = _skip_space(text, at)
        if close == "}":
            if not text.startswith(":", at):
                raise ValueError(text)
            key, (value, at) = str(value), _bare_value(text, at + 1, quote, depth + 1)
            members[key.strip('"')] = value
            at = _skip_space(text, at)
        else:
            items.append(value)
        if text.startswith(",", at):
            at = _skip_space(text, at + 1)
        elif not text.startswith(close, at):
            raise ValueError(text)
    return (members if close == "}" else items), at + 1


def _skip_space(text: str, at: int) -> int:
    while at < len(text) and text[at].isspace():
        at += 1
    return at
