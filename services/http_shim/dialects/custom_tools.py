"""Custom tools, whose input is text: functions with one argument for the model.

A regular expression constrains that argument. A Lark grammar can't, because it would have to hold
within a string of JSON; the model reads it in the description.
"""

import re
from typing import Any, Literal

import msgspec
from msgspec import Struct

from tokenwire.pb.completion.v1 import completion_pb2

__all__ = ["CustomInput", "InputGrammar", "arguments_of", "custom_tool"]

_OPENING = re.compile(r'\s*\{\s*"input"\s*:\s*"')
_BEGINNING = re.compile(r'\s*(\{\s*("(i(n(p(u(t("\s*(:\s*)?)?)?)?)?)?)?)?)?')
"""A text that may become the opening of an input"""
_ESCAPES = {"b": "\b", "f": "\f", "n": "\n", "r": "\r", "t": "\t"}
_HEX = re.compile(r"[0-9A-Fa-f]{4}")
_LONE_SURROGATE = re.compile("[\ud800-\udfff]")
_REPLACEMENT = "\ufffd"


class InputGrammar(Struct):
    """The grammar of a custom tool's input. Lark does not constrain it."""

    syntax: Literal["lark", "regex"]
    definition: str


def custom_tool(
    name: str, description: str | None, grammar: InputGrammar | None
) -> completion_pb2.Tool:
    """Convert a custom tool. grammar: of its input; None = any text."""
    lines = [description] if description else []
    argument: dict[str, Any] = {"type": "string"}
    is_regex = grammar is not None and grammar.syntax == "regex"
    if grammar is not None:
        form = "regular expression" if is_regex else "Lark grammar"
        lines.append(f"The input must match this {form}:\n{grammar.definition}")
    if grammar is not None and is_regex:
        argument["pattern"] = f"^(?:{grammar.definition})$"
    schema = {
        "type": "object",
        "properties": {"input": argument},
        "required": ["input"],
        "additionalProperties": False,
    }
    return completion_pb2.Tool(
        name=name,
        description="\n\n".join(lines),
        parameters_json=_json(schema).decode(),
        strict=is_regex,
    )


def arguments_of(text: str) -> str:
    """Return the arguments of a call with this input."""
    return _json({"input": text}).decode()


class CustomInput:
    """Reads the input of a call from the JSON of its arguments, piece by piece.

    Arguments of another form are the input as they are.
    """

    def __init__(self) -> None:
        self._raw = ""
        """Arguments that are not read"""
        self._is_open = False
        """True once the string of the input has begun"""
        self._is_closed = False
        self._high = ""
        """First half of a surrogate pair"""

    def feed(self, arguments: str) -> str:
        """Add arguments; return the input that is certain now."""
        if self._is_closed:
            return ""
        self._raw += arguments
        if not self._is_open:
            opening = _OPENING.match(self._raw)
            if opening is None:
                return ""
            self._is_open, self._raw = True, self._raw[opening.end() :]
        return self._read()

    def finish(self) -> str:
        """End the arguments; return the rest of the input."""
        if self._is_open or self._is_closed:
            return _REPLACEMENT if self._high else ""
        is_opening = _BEGINNING.fullmatch(self._raw) is not None
        return "" if is_opening else _LONE_SURROGATE.sub(_REPLACEMENT, self._raw)

    def _read(self) -> str:
        """Decode the text of the string as far as it is there."""
        parts: list[str] = []
        raw, at = self._raw, 0
        while at < len(raw):
            if raw[at] == '"':
                self._is_closed = True
                at = len(raw)
            elif raw[at] != "\\":
                end = next((i for i in range(at, len(raw)) if raw[i] in '"\\'), len(raw))
                parts.append(self._after_high() + raw[at:end])
                at = end
            elif at + 1 == len(raw):
                break
            elif raw[at + 1] != "u":
                parts.append(self._after_high() + _ESCAPES.get(raw[at + 1], raw[at + 1]))
                at += 2
            elif at + 6 > len(raw):
                break
            else:
                parts.append(self._unescaped(raw[at + 2 : at + 6]))
                at += 6
        self._raw = raw[at:]
        return "".join(parts)

    def _unescaped(self, digits: str) -> str:
        """Return the text of an escaped code unit; the first half of a pair waits for the other."""
        unit = chr(int(digits, 16)) if _HEX.fullmatch(digits) else _REPLACEMENT
        if "\udc00" <= unit <= "\udfff" and self._high:
            pair, self._high = self._high + unit, ""
            return pair.encode("utf-16-le", "surrogatepass").decode("utf-16-le")
        before = self._after_high()
        if "\ud800" <= unit <= "\udbff":
            self._high = unit
            return before
        return before + _LONE_SURROGATE.sub(_REPLACEMENT, unit)

    def _after_high(self) -> str:
        lone, self._high = self._high, ""
        return _REPLACEMENT if lone else ""


def _json(value: object) -> bytes:
    return msgspec.json.encode(value)
