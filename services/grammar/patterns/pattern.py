"""Syntax trees of ECMA-262 regular expressions with the flag "u", the patterns of JSON Schema.

Source: ECMA-262, "RegExp (Regular Expression) Objects". From its Annex B, the parser accepts only
what all engines agree on: escaped punctuation, literal braces, and hyphens beside a set.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NoReturn, TypeAlias

from services.grammar import GrammarError
from services.grammar.patterns.character_sets import (
    DIGITS,
    LINE_ENDS,
    SPACES,
    WORD,
    Ranges,
    complement,
    union,
)

__all__ = [
    "Alternation",
    "Anchor",
    "CharacterClass",
    "Concatenation",
    "Lookahead",
    "Node",
    "Repetition",
    "parse",
]


@dataclass(frozen=True, slots=True)
class CharacterClass:
    """One character of a set."""

    ranges: Ranges
    properties: tuple[str, ...] = ()
    """Unicode properties, \\p{…} and \\P{…}, whose characters are in the set too"""
    is_negated: bool = False
    ignores_case: bool = False


@dataclass(frozen=True, slots=True)
class Anchor:
    """The start or the end of the text: ^ or $."""

    is_start: bool


@dataclass(frozen=True, slots=True)
class Lookahead:
    """A positive lookahead, (?=…)."""

    body: "Node"
    place: int
    """Position of its first character in the pattern, from 1"""


@dataclass(frozen=True, slots=True)
class Concatenation:
    """Several nodes in sequence."""

    parts: Sequence["Node"]


@dataclass(frozen=True, slots=True)
class Alternation:
    """One of several nodes."""

    options: Sequence["Node"]


@dataclass(frozen=True, slots=True)
class Repetition:
    """A node with a quantifier. `most` None: unbounded."""

    body: "Node"
    least: int
    most: int | None
    place: int
    """Position of the quantifier in the pattern, from 1"""


Node: TypeAlias = CharacterClass | Anchor | Lookahead | Concatenation | Alternation | Repetition

_MAX_DEPTH = 100  # groups within groups
_MAX_COUNT = 1_000_000
_HYPHEN = ord("-")
_QUANTIFIER = re.compile(r"\{(\d+)(?:(,)(\d*))?\}")
_GROUP_NAME = re.compile(r"\?<([^\W\d]|\$)[\w$]*>")
_SHORT = {"f": 12, "n": 10, "r": 13, "t": 9, "v": 11}
_SETS = {
    "d": DIGITS, "D": complement(DIGITS), "s": SPACES, "S": complement(SPACES),
    "w": WORD, "W": complement(WORD),
}  # fmt: skip
# Case folding maps U+017F to "s" and U+212A to "k".
_WORD_OF_ANY_CASE = union((*WORD, (0x17F, 0x17F), (0x212A, 0x212A)))
_PROPERTY = re.compile(r"\{(?:(?P<name>\w+)=)?(?P<value>\w+)\}")
_PROPERTY_NAMES = frozenset({
    "General_Category", "gc", "Script", "sc", "Script_Extensions", "scx",
})  # fmt: skip
_CATEGORIES = frozenset({
    "C", "Cc", "Cf", "Cn", "Co", "L", "LC", "Ll", "Lm", "Lo", "Lt", "Lu", "M", "Mc", "Me", "Mn",
    "N", "Nd", "Nl", "No", "P", "Pc", "Pd", "Pe", "Pf", "Pi", "Po", "Ps", "S", "Sc", "Sk", "Sm",
    "So", "Z", "Zl", "Zp", "Zs", "Cased_Letter", "Close_Punctuation", "Connector_Punctuation",
    "Control", "Currency_Symbol", "Dash_Punctuation", "Decimal_Number", "Enclosing_Mark",
    "Final_Punctuation", "Format", "Initial_Punctuation", "Letter", "Letter_Number",
    "Line_Separator", "Lowercase_Letter", "Mark", "Math_Symbol", "Modifier_Letter",
    "Modifier_Symbol", "Nonspacing_Mark", "Number", "Open_Punctuation", "Other", "Other_Letter",
    "Other_Number", "Other_Punctuation", "Other_Symbol", "Paragraph_Separator", "Private_Use",
    "Punctuation", "Separator", "Space_Separator", "Spacing_Mark", "Symbol", "Titlecase_Letter",
    "Unassigned", "Uppercase_Letter", "digit", "punct",
})  # fmt: skip
_BINARY = frozenset({
    "ASCII", "ASCII_Hex_Digit", "Alphabetic", "Any", "Bidi_Control", "Case_Ignorable", "Cased",
    "Dash", "Default_Ignorable_Code_Point", "Deprecated", "Diacritic", "Emoji", "Emoji_Component",
    "Emoji_Modifier", "Emoji_Modifier_Base", "Emoji_Presentation", "Extended_Pictographic",
    "Extender", "Grapheme_Base", "Grapheme_Extend", "Hex_Digit", "ID_Continue", "ID_Start",
    "Ideographic", "Join_Control", "Logical_Order_Exception", "Lowercase", "Math",
    "Noncharacter_Code_Point", "Pattern_Syntax", "Pattern_White_Space", "Quotation_Mark", "Radical",
    "Regional_Indicator", "Sentence_Terminal", "Soft_Dotted", "Terminal_Punctuation",
    "Unified_Ideograph", "Uppercase", "Variation_Selector", "White_Space", "XID_Continue",
    "XID_Start",
})  # fmt: skip


def parse(pattern: str) -> Node:
    """Return the syntax tree of a pattern.

    Raises GrammarError for syntax errors, and for constructs that no grammar can enforce: word
    boundaries, back references, and lookarounds other than `(?=`.
    """
    parser = _Parser(pattern)
    node = parser.choice(depth=0)
    if parser.rest:
        parser.refuse('")" closes no group')
    return node


class _Parser:
    """A recursive-descent parser."""

    def __init__(self, pattern: str) -> None:
        self._pattern = pattern
        self._at = 0
        self._ignores_case = False
        self._dot_is_all = False

    @property
    def rest(self) -> str:
        """The next character, empty at the end."""
        return self._pattern[self._at : self._at + 1]

    def refuse(self, why: str, at: int | None = None) -> NoReturn:
        """Raise GrammarError with a reason and the position, by default the current one."""
        place = (self._at if at is None else at) + 1
        raise GrammarError(f"{why} (character {place})")

    def choice(self, depth: int) -> Node:
        """Parse alternatives up to the end of the group."""
        if depth > _MAX_DEPTH:
            self.refuse(f"groups are nested deeper than {_MAX_DEPTH} levels")
        options = [self._sequence(depth)]
        while self._take("|"):
            options.append(self._sequence(depth))
        return options[0] if len(options) == 1 else Alternation(options)

    def _sequence(self, depth: int) -> Node:
        parts: list[Node] = []
        while self.rest not in ("", "|", ")"):
            can_repeat = not self._pattern.startswith(("^", "$", "(?="), self._at)
            parts.append(self._quantified(self._atom(depth), can_repeat))
        return parts[0] if len(parts) == 1 else Concatenation(parts)

    def _quantified(self, body: Node, can_repeat: bool) -> Node:
        place = self._at
        if self._take("*"):
            bounds: tuple[int, int | None] = 0, None
        elif self._take("+"):
            bounds = 1, None
        elif self._take("?"):
            bounds = 0, 1
        elif counted := _QUANTIFIER.match(self._pattern, self._at):
            bounds = self._counts(counted)
            self._at = counted.end()
        else:
            return body
        if not can_repeat:
            self.refuse("there is nothing to repeat", place)
        self._take("?")  # laziness does not change whether a text matches
        if self.rest and self.rest in "*+?":
            self.refuse(f'"{self.rest}" follows another quantifier')
        return Repetition(body, *bounds, place + 1)

    def _counts(self, counted: re.Match[str]) -> tuple[int, int | None]:
        low, has_comma, high = counted.groups()
        if any(len(number) > 9 or int(number) > _MAX_COUNT for number in (low, high or "0")):
            self.refuse(f"more than {_MAX_COUNT:,} repetitions are not supported")
        least = int(low)
        most = int(high) if high else None if has_comma else least
        if most is not None and most < least:
            self.refuse("the numbers of the quantifier are out of order")
        return least, most

    def _atom(self, depth: int) -> Node:
        character = self.rest
        if character == "(":
            return self._group(depth)
        if character == "[":
            return self._class()
        if character == "\\":
            return self._escape()
        if character in "*+?" or _QUANTIFIER.match(self._pattern, self._at):
            self.refuse("there is nothing to repeat")
        self._at += 1
        if character == ".":
            return CharacterClass(() if self._dot_is_all else LINE_ENDS, is_negated=True)
        if character in "^$":
            return Anchor(character == "^")
        return self._one(ord(character))

    def _group(self, depth: int) -> Node:
        start = self._at
        self._at += 1
        before = self._ignores_case, self._dot_is_all
        is_ahead = self._take("?=")
        if not is_ahead and self.rest == "?":
            self._open_special(start)
        body = self.choice(depth + 1)
        self._ignores_case, self._dot_is_all = before
        if not self._take(")"):
            self.refuse("a group is not closed", start)
        return Lookahead(body, start + 1) if is_ahead else body

    def _open_special(self, start: int) -> None:
        if self._take("?:"):
            return
        if self._pattern.startswith(("?!", "?<=", "?<!"), self._at):
            self.refuse("the only supported lookaround is (?=…) after ^", start)
        if name := _GROUP_NAME.match(self._pattern, self._at):
            self._at = name.end()
            return
        flags = re.compile(r"\?([a-zA-Z]*)(?:-([a-zA-Z]*))?([:)])").match(self._pattern, self._at)
        if flags is None:
            self.refuse("ECMA-262 has no such group", start)
        on, off, end = flags[1], flags[2] or "", flags[3]
        if end == ")" or not (on or off) or set(on + off) - set("is"):
            self.refuse("the only supported flags are those of a group, (?i:…) and (?s:…)", start)
        self._ignores_case = ("i" in on or self._ignores_case) and "i" not in off
        self._dot_is_all = ("s" in on or self._dot_is_all) and "s" not in off
        self._at = flags.end()

    def _class(self) -> Node:
        start = self._at
        self._at += 1
        is_negated = self._take("^")
        ranges: list[tuple[int, int]] = []
        properties: list[str] = []
        while not self._take("]"):
            if not self.rest:
                self.refuse("a class is not closed", start)
            first = self._member()
            members = [first]
            place = self._at
            if self.rest == "-" and self._pattern[place + 1 : place + 2] not in ("", "]"):
                self._at += 1
                last = self._member()
                if isinstance(first, int) and isinstance(last, int):
                    if last < first:
                        self.refuse("the range is out of order", place)
                    ranges.append((first, last))
                    continue
                ranges.append((_HYPHEN, _HYPHEN))  # beside a set, a hyphen is literal
                members.append(last)
            for member in members:
                node = self._one(member) if isinstance(member, int) else member
                ranges += node.ranges
                properties += node.properties
        return CharacterClass(union(ranges), tuple(properties), is_negated, self._ignores_case)

    def _member(self) -> int | CharacterClass:
        """Parse a member of a class: a character or a set."""
        if self.rest != "\\":
            self._at += 1
            return ord(self._pattern[self._at - 1])
        if self._pattern.startswith("\\b", self._at):
            self._at += 2
            return 8
        start = self._at
        node = self._escape()
        is_one = self._pattern[start + 1] not in "dDsSwWpP"
        return node.ranges[0][0] if is_one else node

    def _escape(self) -> CharacterClass:
        start = self._at
        letter = self._pattern[start + 1 : start + 2]
        self._at += 2
        if letter in _SETS:
            if self._ignores_case and letter in "wW":
                word = _WORD_OF_ANY_CASE
                return CharacterClass(
                    word if letter == "w" else complement(word), ignores_case=True
                )
            return CharacterClass(_SETS[letter])
        if letter in ("p", "P"):
            return self._property(letter, start)
        return self._one(self._escaped(letter, start))

    def _escaped(self, letter: str, start: int) -> int:
        """Parse an escape that stands for one character; return its code point."""
        if not letter:
            self.refuse("the pattern ends with a backslash", start)
        if letter in _SHORT:
            return _SHORT[letter]
        following = self._pattern[self._at : self._at + 1]
        if letter == "0" and not following.isdecimal():
            return 0
        if letter == "c" and following.isascii() and following.isalpha():
            self._at += 1
            return ord(following) % 32
        if letter == "x":
            return self._hexadecimal(r"([0-9a-fA-F]{2})", start)
        if letter == "u":
            return self._code_point(start)
        if letter in ("b", "B"):
            self.refuse(f"\\{letter}, a word boundary, is not supported", start)
        if letter == "k" or letter.isdecimal():
            self.refuse("back references are not supported", start)
        if letter.isalpha():
            remedy = "; use ^ and $" if letter in "AZz" else ""
            self.refuse(f"ECMA-262 has no \\{letter}{remedy}", start)
        return ord(letter)

    def _code_point(self, start: int) -> int:
        """Parse the rest of \\u0000, \\u{0} or an escaped surrogate pair."""
        if self.rest == "{":
            code = self._hexadecimal(r"\{0*([0-9a-fA-F]{1,6})\}", start)
            if code > 0x10FFFF:
                self.refuse("there is no such character", start)
            return code
        code = self._hexadecimal(r"([0-9a-fA-F]{4})", start)
        low = re.compile(r"\\u([dD][c-fC-F][0-9a-fA-F]{2})").match(self._pattern, self._at)
        if 0xD800 <= code < 0xDC00 and low:
            self._at = low.end()
            return 0x10000 + (code - 0xD800) * 0x400 + int(low[1], 16) - 0xDC00
        return code

    def _hexadecimal(self, form: str, start: int) -> int:
        digits = re.compile(form).match(self._pattern, self._at)
        if digits is None:
            self.refuse("the escape has too few hexadecimal digits", start)
        self._at = digits.end()
        return int(digits[1], 16)

    def _property(self, letter: str, start: int) -> CharacterClass:
        found = _PROPERTY.match(self._pattern, self._at)
        if found is None:
            self.refuse(f"\\{letter} needs the name of a property in braces", start)
        name, value = found["name"], found["value"]
        is_known = name in _PROPERTY_NAMES if name else value in _CATEGORIES | _BINARY
        if not is_known:
            self.refuse(f"ECMA-262 has no property \\{letter}{found[0]}", start)
        if self._ignores_case:
            self.refuse(f"\\{letter}{found[0]} where case is ignored is not supported", start)
        self._at = found.end()
        return CharacterClass((), (f"\\{letter}{found[0]}",))

    def _one(self, code: int) -> CharacterClass:
        return CharacterClass(((code, code),), ignores_case=self._ignores_case)

    def _take(self, text: str) -> bool:
        """Skip a text if it comes next; return whether it did."""
        if not self._pattern.startswith(text, self._at):
            return False
        self._at += len(text)
        return True
