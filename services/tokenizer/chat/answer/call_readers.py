"""Readers of tool calls in generated text, by family of models.

A reader starts where a call may begin. It settles nothing until the call is certain: a known tool's
name was read, and its arguments begin. It returns false if it settled nothing. Arguments are passed
on as they arrive. Text from the first character that can't belong to them is left as content.
"""

import ast

from services.tokenizer.chat.answer.call_parts import (
    MemberTags,
    Parameters,
    arguments_object,
    as_json,
    call_object,
    closing,
    separator,
    tagged_members,
    tool_name,
)
from services.tokenizer.chat.answer.message_parser import SegmentKind
from services.tokenizer.chat.answer.text_reader import Reading, TextReader

__all__ = [
    "read_json_calls",
    "read_mistral_calls",
    "read_pythonic_calls",
    "read_tagged_json_call",
    "read_xml_call",
]

_CONSTANTS = {"true": True, "false": False, "null": None}


def read_tagged_json_call(reader: TextReader, tools: Parameters) -> Reading:
    """Read a call of Hermes or Qwen: <tool_call>{"name": …, "arguments": {…}}</tool_call>."""
    if not (yield from reader.literal("<tool_call>")):
        return False
    yield from reader.space()
    if not (yield from call_object(reader, tools)):
        return False
    yield from closing(reader, "</tool_call>")
    return True


def read_json_calls(reader: TextReader, tools: Parameters) -> Reading:
    """Read calls of Llama 3: {"name": …, "parameters": {…}}; …, behind <|python_tag|> or alone."""
    yield from reader.literal("<|python_tag|>")
    yield from reader.space()
    if not (yield from call_object(reader, tools)):
        return False
    while (yield from separator(reader, ";")):
        if not (yield from call_object(reader, tools)):
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
        return (yield from call_object(reader, tools))
    if reader.text[reader.at] != "[":
        return (yield from _named_call(reader, tools))
    reader.at += 1
    yield from reader.space()
    if not (yield from call_object(reader, tools)):
        return False
    while (yield from separator(reader, ",")):
        if not (yield from call_object(reader, tools)):
            reader.at = 0
            return True
    yield from closing(reader, "]")
    return True


def read_pythonic_calls(reader: TextReader, tools: Parameters) -> Reading:
    """Read calls of Llama 3.2 and 4: [name(key=value, …), …]."""
    tagged = yield from reader.literal("<|python_start|>")
    if not (yield from reader.literal("[")):
        return False
    if not (yield from _python_call(reader, tools)):
        return False
    while (yield from separator(reader, ",")):
        if not (yield from _python_call(reader, tools)):
            reader.at = 0
            return True
    yield from closing(reader, "]")
    if tagged:
        yield from closing(reader, "<|python_end|>")
    return True


def read_xml_call(reader: TextReader, tools: Parameters) -> Reading:
    """Read a call of Qwen3-Coder: <tool_call><function=name><parameter=key>value</parameter>…."""
    tagged = yield from reader.literal("<tool_call>")
    yield from reader.space()
    if not (yield from reader.literal("<function=")):
        return False
    name = yield from tool_name(reader, tools)
    if not name or not (yield from reader.literal(">")):
        return False
    reader.settle(SegmentKind.CALL, reader.at, name)
    tags = MemberTags(("<parameter=", ">"), ("", "</parameter>"), "</function>", trims=True)
    if (yield from tagged_members(reader, tools[name], tags)) and tagged:
        yield from closing(reader, "</tool_call>")
    return True


def _named_call(reader: TextReader, tools: Parameters) -> Reading:
    """Read name[CALL_ID]id[ARGS]{…}; [CALL_ID]id and [ARGS] are optional."""
    name = yield from tool_name(reader, tools)
    if not name:
        return False
    if (yield from reader.literal("[CALL_ID]")) and not (yield from reader.until("[ARGS]")):
        return False
    yield from reader.literal("[ARGS]")
    if not (yield from reader.space()) or reader.text[reader.at] != "{":
        return False
    reader.settle(SegmentKind.CALL, reader.at, name)
    yield from arguments_object(reader)
    return True


def _python_call(reader: TextReader, tools: Parameters) -> Reading:
    """Read name(key=value, …), and settle it as a whole."""
    yield from reader.space()
    name = yield from tool_name(reader, tools)
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
    return as_json(values)


class _JsonConstants(ast.NodeTransformer):
    """Replaces JSON's constants with Python's."""

    def visit_Name(self, node: ast.Name) -> ast.expr:
        return ast.Constant(_CONSTANTS[node.id]) if node.id in _CONSTANTS else node
