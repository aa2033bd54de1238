"""Translation of GBNF, and of xgrammar's EBNF, to a Lark grammar in llguidance's dialect.

Source of the syntax: llama.cpp, grammars/README.md. As in xgrammar, a rule continues over line ends
until the next `name ::=`.

Lark's lexer takes the longest matching token whatever must follow: no "x" could follow `[a-z]*`.
GBNF has no lexer. So a grammar without recursion becomes one token, inside which matching is exact.
In a grammar with recursion, each character is a token.
"""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from services.grammar import GrammarError

__all__ = ["lark_literal", "to_lark"]

_MAX_DEPTH = 100  # nested parentheses
_TOKEN = re.compile(
    r"""(?P<space>(?:\s|\#[^\r\n]*)+)
    |(?P<defines>::=)
    |(?P<name>[\w-]+)
    |(?P<literal>"(?:\\.|[^"\\])*")
    |(?P<chars>\[(?:\\.|[^\]\\])*\])
    |(?P<repeat>[*+?]|\{\s*(?P<least>[0-9]+)\s*(?P<open>,\s*(?P<most>[0-9]*)\s*)?\})
    |(?P<mark>[.|()])""",
    re.DOTALL | re.VERBOSE,
)
_CHARACTER = re.compile(
    r"\\(?:x([0-9A-Fa-f]{2})|u([0-9A-Fa-f]{4})|U([0-9A-Fa-f]{8})|(.))|([^\\])", re.DOTALL
)
_ESCAPES: Mapping[str, str] = {
    "0": "\0", "a": "\a", "b": "\b", "e": "\x1b", "f": "\f", "n": "\n", "r": "\r", "t": "\t",
    "v": "\v", **{char: char for char in "\"'[]\\-^/|?*+.(){}"},
}  # fmt: skip
_OPERATORS: Mapping[str, tuple[int, int | None]] = {"*": (0, None), "+": (1, None), "?": (0, 1)}
_ANY = "/(?s:.)/"


@dataclass(frozen=True, slots=True)
class _Text:
    """A literal."""

    text: str


@dataclass(frozen=True, slots=True)
class _Class:
    """A character class, as a regular expression between slashes."""

    regex: str


@dataclass(frozen=True, slots=True)
class _Reference:
    """The use of a rule; `place` is its offset in the text."""

    name: str
    place: int


@dataclass(frozen=True, slots=True)
class _Sequence:
    """Several nodes in sequence."""

    items: "Sequence[_Node]"


@dataclass(frozen=True, slots=True)
class _Choice:
    """One of several nodes."""

    options: "Sequence[_Node]"


@dataclass(frozen=True, slots=True)
class _Repeat:
    """A node with a quantifier. `most` None: unbounded."""

    item: "_Node"
    least: int
    most: int | None


_Node: TypeAlias = _Text | _Class | _Reference | _Sequence | _Choice | _Repeat


def to_lark(text: str) -> str:
    """Translate a grammar to Lark. Raises GrammarError with line and column."""
    return _Writer(_Parser(text).rules()).grammar()


class _Parser:
    """A recursive-descent parser."""

    def __init__(self, text: str) -> None:
        self._text = text
        self._tokens = list(_tokens(text))
        self._next = 0

    def rules(self) -> dict[str, _Node]:
        """Parse all rules, and check their references; return the bodies by name."""
        rules: dict[str, _Node] = {}
        while (token := self._peek()) is not None:
            if not self._is_at_rule():
                raise self._error(token.start(), "A rule must begin with its name and ::=")
            if token.group() in rules:
                raise self._error(token.start(), f"There are two rules {token.group()}")
            self._next += 2
            rules[token.group()] = self._choice(0)
            if (stray := self._peek()) is not None and stray.group() == ")":
                raise self._error(stray.start(), "This ) closes nothing")
        if "root" not in rules:
            raise GrammarError("The grammar has no rule root, with which it must start.")
        for body in rules.values():
            for reference in _references(body):
                if reference.name not in rules:
                    raise self._error(reference.place, f"There is no rule {reference.name}")
        return rules

    def _choice(self, depth: int) -> _Node:
        options = [self._sequence(depth)]
        while (token := self._peek()) is not None and token.group() == "|":
            self._next += 1
            options.append(self._sequence(depth))
        return options[0] if len(options) == 1 else _Choice(options)

    def _sequence(self, depth: int) -> _Node:
        items: list[_Node] = []
        while (token := self._peek()) is not None and token.group() not in ("|", ")"):
            if self._is_at_rule():
                break
            self._next += 1
            items.append(self._repeated(self._item(token, depth)))
        return items[0] if len(items) == 1 else _Sequence(items)

    def _item(self, token: re.Match[str], depth: int) -> _Node:
        match token.lastgroup:
            case "name":
                return _Reference(token.group(), token.start())
            case "literal":
                start, end = token.start() + 1, token.end() - 1
                return _Text("".join(char for char, _ in self._characters(start, end)))
            case "chars":
                return _Class(self._class(token.start() + 1, token.end() - 1))
            case "mark" if token.group() == ".":
                return _Class(_ANY)
            case "mark" if token.group() == "(":
                return self._group(token, depth + 1)
        raise self._error(token.start(), f"An item is expected, not {token.group()}")

    def _group(self, opening: re.Match[str], depth: int) -> _Node:
        if depth > _MAX_DEPTH:
            raise self._error(opening.start(), f"This is nested deeper than {_MAX_DEPTH} levels")
        inner = self._choice(depth)
        closing = self._peek()
        if closing is None or closing.group() != ")":
            raise self._error(opening.start(), "This ( is not closed")
        self._next += 1
        return inner

    def _repeated(self, item: _Node) -> _Node:
        token = self._peek()
        if token is None or token.lastgroup != "repeat":
            return item
        self._next += 1
        if (simple := _OPERATORS.get(token.group())) is not None:
            return _Repeat(item, *simple)
        least, most = int(token["least"]), token["most"]
        last = least if token["open"] is None else int(most) if most else None
        if last is not None and last < least:
            raise self._error(
                token.start(), f"The limits of {token.group()} are the wrong way round"
            )
        return _Repeat(item, least, last)

    def _class(self, start: int, end: int) -> str:
        """Return a character class as a regular expression."""
        is_negated = self._text.startswith("^", start, end)
        found = list(self._characters(start + is_negated, end))
        if not found:
            if is_negated:
                return _ANY
            raise self._error(start - 1, "[] is empty")
        ranges: list[str] = []
        while found:
            first, place = found.pop(0)
            last = first
            if len(found) > 1 and found[0][0] == "-" and self._text[found[0][1]] == "-":
                last = found[1][0]
                del found[:2]
            if last < first:
                raise self._error(place, f"The range from {first!r} to {last!r} is empty")
            ranges.append(f"\\x{{{ord(first):X}}}-\\x{{{ord(last):X}}}")
        return f"/[{'^' * is_negated}{''.join(ranges)}]/"

    def _characters(self, start: int, end: int) -> Iterator[tuple[str, int]]:
        """Yield the characters in a literal or class, escapes resolved, with their offsets."""
        while start < end:
            found = _CHARACTER.match(self._text, start, end)
            code = None if found is None else found[1] or found[2] or found[3]
            if found is None or (found[4] is not None and found[4] not in _ESCAPES):
                raise self._error(start, f"The escape {self._text[start : start + 2]} is not known")
            if code is not None and (int(code, 16) > 0x10FFFF or 0xD800 <= int(code, 16) < 0xE000):
                raise self._error(start, f"{found.group()} is not a character")
            char = chr(int(code, 16)) if code is not None else found[5] or _ESCAPES[found[4]]
            yield char, start
            start = found.end()

    def _is_at_rule(self) -> bool:
        """Return whether the next tokens are a name and ::=."""
        following = self._tokens[self._next : self._next + 2]
        return [token.lastgroup for token in following] == ["name", "defines"]

    def _peek(self) -> re.Match[str] | None:
        return self._tokens[self._next] if self._next < len(self._tokens) else None

    def _error(self, place: int, why: str) -> GrammarError:
        return GrammarError(f"{why} ({_line_and_column(self._text, place)}).")


class _Writer:
    """Rules in Lark: one token, or rules whose tokens are single characters."""

    def __init__(self, rules: Mapping[str, _Node]) -> None:
        self._rules = rules
        self._is_token = "root" in _without_recursion(rules)
        self._names: dict[str, str] = {}
        for index, name in enumerate(rules):
            plain = f"r{index}_{re.sub(r'[^a-z0-9]', '_', name.lower())}"
            self._names[name] = plain.upper() if self._is_token else plain

    def grammar(self) -> str:
        """Return the rules reachable from root, in order of first use."""
        needed = {"root": None}
        waiting = ["root"]
        for name in waiting:
            more = [reference.name for reference in _references(self._rules[name])]
            waiting += [each for each in dict.fromkeys(more) if each not in needed]
            needed |= dict.fromkeys(more)
        lines = [f"{self._names[name]}: {self._write(self._rules[name])}" for name in needed]
        return "\n".join([f"start: {self._names['root']}", *lines])

    def _write(self, node: _Node) -> str:
        match node:
            case _Text():
                return lark_literal(node.text) if self._is_token else _spelled(node.text)
            case _Class():
                return node.regex
            case _Reference():
                return self._names[node.name]
            case _Sequence():
                return f"({' '.join(map(self._write, node.items))})" if node.items else '""'
            case _Choice():
                return f"({' | '.join(map(self._write, node.options))})"
            case _Repeat(most=0):
                return '""'
            case _Repeat():
                most = "" if node.most is None else node.most
                return f"({self._write(node.item)}){{{node.least},{most}}}"


def _without_recursion(rules: Mapping[str, _Node]) -> set[str]:
    """Return the names of the rules that no cycle of references reaches."""
    users: dict[str, set[str]] = {name: set() for name in rules}
    missing: dict[str, int] = {}
    for name, body in rules.items():
        needed = {reference.name for reference in _references(body)}
        missing[name] = len(needed)
        for each in needed:
            users[each].add(name)
    found = [name for name, count in missing.items() if not count]
    for name in found:
        for user in users[name]:
            missing[user] -= 1
            if not missing[user]:
                found.append(user)
    return set(found)


def _tokens(text: str) -> Iterator[re.Match[str]]:
    place = 0
    while place < len(text):
        token = _TOKEN.match(text, place)
        if token is None:
            where = _line_and_column(text, place)
            raise GrammarError(f"No GBNF token begins with {text[place]!r} ({where}).")
        if token.lastgroup != "space":
            yield token
        place = token.end()


def _references(node: _Node) -> Iterator[_Reference]:
    match node:
        case _Reference():
            yield node
        case _Sequence():
            for item in node.items:
                yield from _references(item)
        case _Choice():
            for option in node.options:
                yield from _references(option)
        case _Repeat():
            yield from _references(node.item)


def lark_literal(text: str) -> str:
    """Return a literal of Lark."""
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")


def _spelled(text: str) -> str:
    return f"({' '.join(map(lark_literal, text))})" if text else '""'


def _line_and_column(text: str, place: int) -> str:
    line = text.count("\n", 0, place) + 1
    return f"line {line}, column {place - text.rfind(chr(10), 0, place)}"
