"""Syntax of tool calls: the texts in front of, between and behind their names and arguments.

One reader (`syntax_reader`) and one writer of grammars (`call_grammars`) serve every syntax. Some
come from the table of `tool_formats`, others from what a chat template writes for calls.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from functools import lru_cache

__all__ = [
    "ARGUMENTS_KEYS",
    "ID",
    "INDEX",
    "KEY",
    "KIND",
    "NAME",
    "NAME_KEYS",
    "CallSyntax",
    "JsonArguments",
    "KeywordArguments",
    "Notation",
    "TaggedArguments",
    "mark_pieces",
]

NAME, ID, INDEX, KEY, KIND = map(chr, range(0xE000, 0xE005))
"""Placeholders in marks: the tool's name, a call's id and number, a parameter's name and type"""
NAME_KEYS = frozenset({"name", "tool_name"})
ARGUMENTS_KEYS = frozenset({"arguments", "parameters"})

_PLACEHOLDERS = f"[{NAME}-{KIND}]"
_PIECES = re.compile(rf"\s+|{_PLACEHOLDERS}|<[^<>\s{NAME}-{KIND}]*>|\[[A-Z_/]+\]|[{{}}\[\],:()]|"
                     rf"[^\s{NAME}-{KIND}{{}}\[\],:()<]+|.")  # fmt: skip
_WEAK = re.compile(r"[\[{(\"'](?![A-Z_/]+\])")
_OPENING = re.compile(rf"(?:<[^<>\s{NAME}-{KIND}]+>\w*|\[[A-Z_/]+\]|[^\s\"{{{NAME}-{KIND}]+)")
_OBJECT = re.compile(r'\{[^{}]*"(\w+)":\s*"$')
_ARGUMENTS = re.compile(r'^"[^{}]*"(\w+)":\s*$')


class Notation(Enum):
    """Notation of values that are not strings."""

    JSON = "JSON"
    PYTHON = "Python's literals"
    BARE = "JSON whose keys have no quotes, and whose strings have special ones"
    TAGS = "a tag for each item and member"


@dataclass(frozen=True, slots=True)
class JsonArguments:
    """Arguments that are a JSON object."""


@dataclass(frozen=True, slots=True)
class TaggedArguments:
    """Arguments that stand between tags, each with its name; strings have no quotes."""

    begins: str
    """Text in front of a name"""
    middle: str
    """Text between a name and its value; KIND stands for the value's type"""
    ends: str
    """Text behind a value; KEY stands for the name"""
    between: str = ""
    kinds: Mapping[str, str] = field(default_factory=dict)
    """Text that stands in place of KIND, by type of JSON"""
    notation: Notation = Notation.JSON
    item: str = ""
    """Name of the tag around the items of a list, in the notation TAGS"""
    is_sorted: bool = False
    """True if arguments are in the order of their names"""


@dataclass(frozen=True, slots=True)
class KeywordArguments:
    """Arguments in brackets, as in name(key='value') or name{key:value}."""

    middle: str
    """Text between a name and its value"""
    quote: str
    """Text on both sides of a string"""
    between: str = ", "
    notation: Notation = Notation.PYTHON
    is_sorted: bool = False
    """True if arguments are in the order of their names"""


@dataclass(frozen=True, slots=True)
class CallSyntax:
    """Form of the calls of a message."""

    begins: str
    """Text in front of each tool's name"""
    middle: str
    """Text between a name and its arguments"""
    ends: str
    """Text behind the arguments"""
    arguments: JsonArguments | TaggedArguments | KeywordArguments = JsonArguments()
    opens: str = ""
    """Text in front of the first call"""
    between: str = ""
    """Text between two calls"""
    closes: str = ""
    """Text behind the last call"""
    is_single: bool = False
    """True if a message has one call at most"""
    mark: str = ""
    """Mark by which calls are found anywhere in a text; "" = the first mark in `lead`"""
    content: str = ""
    """Text in front of content, where an answer could begin with a name instead"""
    is_opened: bool = False
    """True if the prompt ends with `begins`, so that an answer may begin with a name"""

    @property
    def lead(self) -> str:
        """Text in front of the first name."""
        return self.opens + self.begins

    @property
    def opening(self) -> str:
        """Mark by which calls are found anywhere in a text; "" if calls have no mark."""
        lead = self.lead.lstrip()
        if self.mark:
            return self.mark
        if not lead or _WEAK.match(lead):
            return ""
        found = _OPENING.match(lead)
        mark = found.group() if found else ""
        return mark if len(mark) > 2 else ""

    @property
    def leads(self) -> str:
        """Character with which calls begin a message; "" if calls have a mark."""
        return "" if self.opening else self.lead.lstrip()[:1]

    @property
    def object_begin(self) -> int:
        """Place in `begins` of an object with the name and the arguments; -1 without one."""
        if not isinstance(self.arguments, JsonArguments):
            return -1
        found, then = _OBJECT.search(self.begins), _ARGUMENTS.match(self.middle)
        if found is None or then is None:
            return -1
        is_object = found[1] in NAME_KEYS and then[1] in ARGUMENTS_KEYS
        return found.start() if is_object else -1

    @property
    def object_end(self) -> int:
        """Place in `ends` behind the object with the name and the arguments."""
        return self.ends.find("}") + 1

    def texts(self) -> Sequence[str]:
        """Return all texts that may contain control tokens."""
        form = self.arguments
        own: tuple[str, ...] = ()
        if isinstance(form, TaggedArguments):
            own = (form.begins, form.middle, form.ends, form.between)
        elif isinstance(form, KeywordArguments):
            own = (form.middle, form.quote, form.between)
        calls = (self.opens, self.begins, self.middle, self.ends, self.between, self.closes)
        return (*calls, *own)


@lru_cache(maxsize=1_024)
def mark_pieces(mark: str) -> Sequence[str]:
    """Return the parts of a mark: placeholders, and texts that white space may separate."""
    return tuple(_split(mark))


def _split(mark: str) -> Iterator[str]:
    for found in _PIECES.finditer(mark):
        if not found.group().isspace():
            yield found.group()
