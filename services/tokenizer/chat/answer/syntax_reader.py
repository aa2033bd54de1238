"""Reader of tool calls of any syntax in generated text.

It starts where calls may begin. It settles nothing until the first call is certain: a known tool's
name was read, and its arguments begin. It returns false if it settled nothing. Arguments are passed
on as they arrive. Text from the first character that can't belong to them is left as content.
White space may differ from that of the syntax.
"""

from services.tokenizer.chat.answer.call_parts import (
    Parameters,
    arguments_object,
    call_object,
    closing,
    read_mark,
    tool_name,
)
from services.tokenizer.chat.answer.call_syntax import (
    CallSyntax,
    KeywordArguments,
    TaggedArguments,
)
from services.tokenizer.chat.answer.keyword_reader import read_keywords
from services.tokenizer.chat.answer.message_parser import SegmentKind
from services.tokenizer.chat.answer.tag_reader import read_tags
from services.tokenizer.chat.answer.text_reader import Reading, TextReader

__all__ = ["read_calls"]


def read_calls(
    reader: TextReader, tools: Parameters, syntax: CallSyntax, *, is_opened: bool = False
) -> Reading:
    """Read the calls of one syntax.

    is_opened: whether the text in front of the first name is in the prompt.
    """
    if not is_opened and not (yield from read_mark(reader, syntax.opens)):
        return False
    if not (yield from _call(reader, tools, syntax, is_opened=is_opened)):
        return False
    while True:
        yield from read_mark(reader, syntax.between)
        if not (yield from _call(reader, tools, syntax)):
            break
    reader.at = 0
    yield from closing(reader, syntax.closes)
    return True


def _call(
    reader: TextReader, tools: Parameters, syntax: CallSyntax, *, is_opened: bool = False
) -> Reading:
    begins, begin, end = syntax.begins, syntax.object_begin, syntax.object_end
    if begin >= 0:
        if not (yield from read_mark(reader, begins[:begin])):
            return False
        yield from reader.space()
        if not (yield from call_object(reader, tools)):
            return False
        yield from closing(reader, syntax.ends[end:])
        return True
    if not is_opened and not (yield from read_mark(reader, begins, tools)):
        return False
    yield from reader.space()
    name = yield from tool_name(reader, tools)
    if not name or not (yield from read_mark(reader, syntax.middle)):
        return False
    form = syntax.arguments
    if isinstance(form, TaggedArguments):
        if not syntax.middle.strip() and not (yield from _is_behind_name(reader, syntax, form)):
            return False
        reader.settle(SegmentKind.CALL, reader.at, name)
        yield from read_tags(reader, tools[name], form, syntax.ends)
        return True
    if isinstance(form, KeywordArguments):
        if not (yield from read_keywords(reader, name, form)):
            return False
    else:
        if not (yield from reader.space()) or reader.text[reader.at] != "{":
            return False
        reader.settle(SegmentKind.CALL, reader.at, name)
        if not (yield from arguments_object(reader)):
            return True
    yield from closing(reader, syntax.ends)
    return True


def _is_behind_name(reader: TextReader, syntax: CallSyntax, form: TaggedArguments) -> Reading:
    """Return whether arguments or the end of the call come next, and read nothing."""
    before = reader.at
    found = (yield from read_mark(reader, form.begins)) or (
        yield from read_mark(reader, syntax.ends)
    )
    reader.at = before
    return found
