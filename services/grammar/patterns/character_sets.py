"""Sets of characters as ranges of code points."""

from collections.abc import Iterable
from typing import TypeAlias

__all__ = [
    "DIGITS",
    "LINE_ENDS",
    "SPACES",
    "SPELLABLE",
    "WORD",
    "Ranges",
    "as_class",
    "as_literal",
    "complement",
    "intersection",
    "is_spellable",
    "union",
]

Ranges: TypeAlias = tuple[tuple[int, int], ...]
"""First and last code point of each range; ascending, neither overlapping nor adjacent."""

_LAST = 0x10FFFF
SPELLABLE: Ranges = ((8, 10), (12, 13), (0x20, 0x7E), (0x80, 0xD7FF), (0xE000, _LAST))
"""The characters that llguidance can write in a JSON string without \\u. Of the control characters,
only \\b, \\t, \\n, \\f and \\r are among them."""
# ECMA-262's \d, \w, \s, and the characters that "." does not match
DIGITS: Ranges = ((0x30, 0x39),)
WORD: Ranges = ((0x30, 0x39), (0x41, 0x5A), (0x5F, 0x5F), (0x61, 0x7A))
SPACES: Ranges = (
    (0x9, 0xD), (0x20, 0x20), (0xA0, 0xA0), (0x1680, 0x1680), (0x2000, 0x200A), (0x2028, 0x2029),
    (0x202F, 0x202F), (0x205F, 0x205F), (0x3000, 0x3000), (0xFEFF, 0xFEFF),
)  # fmt: skip
LINE_ENDS: Ranges = ((0xA, 0xA), (0xD, 0xD), (0x2028, 0x2029))

_PLAIN = frozenset(" _@:;,=<>!%~`'\"")  # ASCII that means itself in a regular expression


def union(ranges: Iterable[tuple[int, int]]) -> Ranges:
    """Return the union of ranges that may overlap."""
    joined: list[tuple[int, int]] = []
    for first, last in sorted(ranges):
        if joined and first <= joined[-1][1] + 1:
            joined[-1] = joined[-1][0], max(joined[-1][1], last)
        else:
            joined.append((first, last))
    return tuple(joined)


def complement(ranges: Ranges) -> Ranges:
    """Return all other code points."""
    others: list[tuple[int, int]] = []
    following = 0
    for first, last in ranges:
        if following < first:
            others.append((following, first - 1))
        following = last + 1
    if following <= _LAST:
        others.append((following, _LAST))
    return tuple(others)


def intersection(one: Ranges, other: Ranges) -> Ranges:
    """Return the code points in both sets."""
    return complement(union((*complement(one), *complement(other))))


def is_spellable(text: str) -> bool:
    """Return whether all characters of a text are in SPELLABLE."""
    return all(_contains(SPELLABLE, ord(character)) for character in set(text))


def as_literal(code: int) -> str:
    """Return a character as llguidance's regular expressions write it outside a class."""
    character = chr(code)
    is_plain = character in _PLAIN or (
        character.isalnum() if code < 0x80 else character.isprintable()
    )
    return character if is_plain else f"\\x{{{code:x}}}"


def as_class(ranges: Ranges) -> str:
    """Return the content of the brackets of a character class."""
    return "".join(
        _bound(first) if first == last else f"{_bound(first)}-{_bound(last)}"
        for first, last in ranges
    )


def _bound(code: int) -> str:
    character = chr(code)
    return character if code < 0x80 and character.isalnum() else f"\\x{{{code:x}}}"


def _contains(ranges: Ranges, code: int) -> bool:
    return any(first <= code <= last for first, last in ranges)
