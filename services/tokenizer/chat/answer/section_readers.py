"""Readers of tool calls that a family writes in a section of their own.

They keep the rules of `call_readers`.
"""

from services.tokenizer.chat.answer.call_parts import (
    CallReader,
    MemberTags,
    Parameters,
    arguments_object,
    call_object,
    closing,
    separator,
    tagged_members,
    tool_name,
)
from services.tokenizer.chat.answer.message_parser import SegmentKind
from services.tokenizer.chat.answer.text_reader import Reading, TextReader

__all__ = [
    "read_command_calls",
    "read_deepseek_calls",
    "read_glm_call",
    "read_invocations",
    "read_json_lines",
    "read_kimi_calls",
    "read_listed_calls",
]


def read_deepseek_calls(reader: TextReader, tools: Parameters) -> Reading:
    """Read calls of DeepSeek, each between <｜tool▁call▁begin｜> and <｜tool▁call▁end｜>.

    From V3.1 on they are name<｜tool▁sep｜>{…}, before function<｜tool▁sep｜>name and a code block.
    """
    marks = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
    return (yield from _section(reader, tools, marks, _deepseek_call))


def _deepseek_call(reader: TextReader, tools: Parameters) -> Reading:
    if not (yield from _mark(reader, "<｜tool▁call▁begin｜>")):
        return False
    has_block = yield from reader.literal("function<｜tool▁sep｜>")
    name = yield from tool_name(reader, tools)
    begins = _mark(reader, "```json") if has_block else reader.literal("<｜tool▁sep｜>")
    if not name or not (yield from begins):
        return False
    if not (yield from _named_object(reader, name)):
        return False
    if has_block:
        yield from closing(reader, "```")
    yield from closing(reader, "<｜tool▁call▁end｜>")
    return True


def read_kimi_calls(reader: TextReader, tools: Parameters) -> Reading:
    """Read calls of Kimi K2.

    They are functions.name:0<|tool_call_argument_begin|>{…}, each between <|tool_call_begin|> and
    <|tool_call_end|>.
    """
    marks = "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"
    return (yield from _section(reader, tools, marks, _kimi_call))


def _kimi_call(reader: TextReader, tools: Parameters) -> Reading:
    if not (yield from _mark(reader, "<|tool_call_begin|>")):
        return False
    yield from _mark(reader, "functions.")
    name = yield from tool_name(reader, tools)
    if not name or not (yield from reader.until("<|tool_call_argument_begin|>")):
        return False
    yield from reader.literal("<|tool_call_argument_begin|>")
    if not (yield from _named_object(reader, name)):
        return False
    yield from closing(reader, "<|tool_call_end|>")
    return True


def read_listed_calls(reader: TextReader, tools: Parameters) -> Reading:
    """Read calls of Granite 3 and Phi-4: <|tool_call|>[{"name": …, "arguments": {…}}, …]."""
    return (yield from _section(reader, tools, ("<|tool_call|>", "<|/tool_call|>"), _list))


def read_command_calls(reader: TextReader, tools: Parameters) -> Reading:
    """Read calls of Command: <|START_ACTION|>[{"tool_name": …, "parameters": {…}}, …]."""
    return (yield from _section(reader, tools, ("<|START_ACTION|>", "<|END_ACTION|>"), _list))


def _list(reader: TextReader, tools: Parameters) -> Reading:
    if not (yield from _mark(reader, "[")):
        return False
    yield from reader.space()
    if not (yield from call_object(reader, tools)):
        return False
    while (yield from separator(reader, ",")):
        if not (yield from call_object(reader, tools)):
            break
    yield from closing(reader, "]")
    return True


def read_json_lines(reader: TextReader, tools: Parameters) -> Reading:
    """Read calls of MiniMax M1: an object in each line between <tool_calls> and </tool_calls>."""
    return (yield from _section(reader, tools, ("<tool_calls>", "</tool_calls>"), _object))


def _object(reader: TextReader, tools: Parameters) -> Reading:
    if not (yield from reader.space()) or reader.text[reader.at] != "{":
        return False
    return (yield from call_object(reader, tools))


def read_glm_call(reader: TextReader, tools: Parameters) -> Reading:
    """Read a call of GLM 4.5.

    It is <tool_call>name<arg_key>key</arg_key><arg_value>value</arg_value>…</tool_call>.
    """
    if not (yield from reader.literal("<tool_call>")):
        return False
    yield from reader.space()
    name = yield from tool_name(reader, tools)
    if not name or not (yield from reader.space()) or reader.text[reader.at] != "<":
        return False
    reader.settle(SegmentKind.CALL, reader.at, name)
    tags = MemberTags(("<arg_key>", "</arg_key>"), ("<arg_value>", "</arg_value>"), "</tool_call>")
    yield from tagged_members(reader, tools[name], tags)
    return True


def read_invocations(reader: TextReader, tools: Parameters) -> Reading:
    """Read calls of MiniMax M2.

    They are <invoke name="name"><parameter name="key">value</parameter>…</invoke> between
    <minimax:tool_call> and </minimax:tool_call>.
    """
    marks = "<minimax:tool_call>", "</minimax:tool_call>"
    return (yield from _section(reader, tools, marks, _invocation))


def _invocation(reader: TextReader, tools: Parameters) -> Reading:
    if not (yield from _mark(reader, '<invoke name="')):
        return False
    name = yield from tool_name(reader, tools)
    if not name or not (yield from reader.literal('">')):
        return False
    reader.settle(SegmentKind.CALL, reader.at, name)
    tags = MemberTags(('<parameter name="', '">'), ("", "</parameter>"), "</invoke>")
    yield from tagged_members(reader, tools[name], tags)
    return True


def _section(
    reader: TextReader, tools: Parameters, marks: tuple[str, str], read: CallReader
) -> Reading:
    """Read calls between two marks, of which the second may be missing."""
    if not (yield from reader.literal(marks[0])) or not (yield from read(reader, tools)):
        return False
    while (yield from read(reader, tools)):
        pass
    reader.at = 0
    yield from closing(reader, marks[1])
    return True


def _mark(reader: TextReader, mark: str) -> Reading:
    """Read a mark behind whitespace, or nothing."""
    before = reader.at
    yield from reader.space()
    if (yield from reader.literal(mark)):
        return True
    reader.at = before
    return False


def _named_object(reader: TextReader, name: str) -> Reading:
    """Settle a call whose name was read, and the object of its arguments."""
    if not (yield from reader.space()) or reader.text[reader.at] != "{":
        return False
    reader.settle(SegmentKind.CALL, reader.at, name)
    yield from arguments_object(reader)
    return True
