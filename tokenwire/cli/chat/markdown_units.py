"""Division of growing Markdown into units that end one after the other."""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from markdown_it import MarkdownIt
from markdown_it.token import Token

__all__ = ["PARSER", "MarkdownUnits", "Unit"]

# HTML counts as text: the terminal can't show it, and dropping it would lose what a model wrote
PARSER = MarkdownIt("commonmark", {"html": False}).enable(["strikethrough", "table"])
_CODE_LINES = 100
"""Lines of a code block after which it is divided, so that a long one is not rendered again"""
_MAY_BE_MARKUP = re.compile(r"[ \t]*(?:[-=*_#>`~|+:\\ \t]+|[0-9]{1,9}[.)]?[ \t]*)\Z")
_NUMBER = re.compile(r"[0-9]{1,9}")
_FENCE = re.compile(r"[ ]{0,3}(`{3,}|~{3,})")


@dataclass(frozen=True, slots=True)
class Unit:
    """A block, or one item of a list."""

    source: str
    follows_closely: bool = False
    """True if no empty row stands before it: a further item, or the rest of a code block"""
    is_table: bool = False


class MarkdownUnits:
    """Units of a text that grows. A unit is final when the next one begins."""

    def __init__(self) -> None:
        self._rest = ""
        """Text from the beginning of the last unit on"""
        self._first = _Start(0)
        """Beginning of that unit, as it was among the units before it"""

    def add(self, text: str) -> None:
        """Append text."""
        self._rest += text

    def take(self) -> tuple[list[Unit], Unit]:
        """Return the units that have become final, and the last one as it is now."""
        *final, last = self._units(_settled(self._rest)) or [(self._first, Unit(""))]
        if final:
            self._keep_from(*last)
        return [unit for _, unit in final], last[1]

    def take_all(self) -> list[Unit]:
        """Return all units that are left: the text grows no more."""
        found = [unit for _, unit in self._units(self._rest)]
        self._rest = ""
        return found

    def _units(self, text: str) -> list[tuple["_Start", Unit]]:
        lines = text.split("\n")
        starts = list(_starts(PARSER.parse(text), self._first))
        ends = [*(start.line for start in starts[1:]), len(lines)]
        found: list[tuple[_Start, Unit]] = []
        for start, end in zip(starts, ends, strict=False):
            source = "\n".join(lines[start.line : end]).rstrip()
            if start.number is not None:
                source = _NUMBER.sub(str(start.number), source, count=1)
            whole = Unit(source, start.follows_closely, start.is_table)
            for index, unit in enumerate(_divided(whole)):
                place = replace(start, follows_closely=unit.follows_closely, part=index)
                found.append((place, unit))
        return found

    def _keep_from(self, start: "_Start", unit: Unit) -> None:
        """Drop the text before a unit."""
        lines = self._rest.split("\n")[start.line :]
        if start.part:  # the rest of a code block begins with its fence again
            lines = [lines[0], *lines[1 + start.part * _CODE_LINES :]]
        self._rest = "\n".join(lines)
        self._first = replace(start, line=0, part=0)


@dataclass(frozen=True, slots=True)
class _Start:
    """Beginning of a unit."""

    line: int
    follows_closely: bool = False
    is_table: bool = False
    number: int | None = None
    """Number of an item; None if it has none"""
    part: int = 0
    """Number of the part of a divided code block"""


def _starts(tokens: Sequence[Token], first: _Start) -> Iterator[_Start]:
    """Yield the beginnings of the units. `first` says what came before the first of them."""
    number: int | None = None
    is_first_item = True
    is_first_block = True
    for token in tokens:
        if token.type in ("bullet_list_open", "ordered_list_open") and token.level == 0:
            number = None
            if token.type == "ordered_list_open":
                number = int(token.attrs.get("start", 1))
                if is_first_block and first.number is not None:
                    number = first.number
            is_first_item = not (is_first_block and first.follows_closely)
            is_first_block = False
        elif token.type == "list_item_open" and token.level == 1 and token.map:
            yield _Start(token.map[0], follows_closely=not is_first_item, number=number)
            is_first_item = False
            number = None if number is None else number + 1
        elif token.level == 0 and token.nesting >= 0 and token.map:
            closely = is_first_block and first.follows_closely
            yield _Start(token.map[0], closely, is_table=token.type == "table_open")
            is_first_block = False


def _divided(unit: Unit) -> Iterator[Unit]:
    """Yield a long fenced block as several, which together look like one."""
    lines = unit.source.split("\n")
    match = _FENCE.match(lines[0])
    if match is None or len(lines) <= _CODE_LINES + 2:
        yield unit
        return
    head, body = lines[0], lines[1:]
    while len(body) > _CODE_LINES + 1:
        part, body = body[:_CODE_LINES], body[_CODE_LINES:]
        yield replace(unit, source="\n".join([head, *part, match[1]]))
        unit = replace(unit, follows_closely=True)
    yield replace(unit, source="\n".join([head, *body]))


def _settled(text: str) -> str:
    """Return a growing text as it is shown: without a last line that may become markup.

    A dash, for example, may begin an item, or make the line above it a heading.
    """
    if _ends_in_code(text):
        return text
    head, _, last = text.rpartition("\n")
    return head if _MAY_BE_MARKUP.match(last) else text + _closers(last)


def _ends_in_code(text: str) -> bool:
    """Return whether the text ends within a fenced block."""
    fence = ""
    for line in text.split("\n"):
        match = _FENCE.match(line)
        if match is None:
            continue
        if not fence:
            fence = match[1]
        elif line.strip().startswith(fence) and not line.strip().strip(fence[0]):
            fence = ""
    return bool(fence)


def _closers(line: str) -> str:
    """Return the marks that close bold or code of a line whose rest has yet to come."""
    if line.count("`") % 2:
        return "`"
    if line.count("**") % 2 and not line.endswith((" ", "*")):
        return "**"
    return ""
