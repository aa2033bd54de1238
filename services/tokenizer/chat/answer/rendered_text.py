"""Units of rendered texts, such as tags and words, that comparisons must not cut."""

import re
from collections.abc import Sequence

from services.tokenizer.chat.answer.call_syntax import INDEX

__all__ = ["common_prefix", "common_suffix", "marks_in", "merged", "units_of"]

_MARKS = re.compile(r"<[^<>\s\ue000-\ue00f]+>|\[[A-Z_/]+\]|\]<\]\w+\[>\[")
_UNITS = re.compile(r"<[^<>\s\ue000-\ue00f]+>|\[[A-Z_/]+\]|\]<\]\w+\[>\[|\w+|.", re.DOTALL)


def marks_in(text: str) -> Sequence[str]:
    """Return the parts of a text that look like tokens."""
    return _MARKS.findall(text)


def units_of(text: str) -> list[str]:
    """Return the text as marks, words and single characters."""
    return _UNITS.findall(text)


def common_prefix(first: str, second: str) -> str:
    """Return the longest common beginning in whole units."""
    return "".join(_common(units_of(first), units_of(second)))


def common_suffix(first: str, second: str) -> str:
    """Return the longest common end in whole units; a number that differs becomes an index."""
    found = _common(units_of(first)[::-1], units_of(second)[::-1])
    return "".join(reversed(found))


def merged(first: str, second: str) -> str | None:
    """Return the text that two texts share if only numbers differ, which become an index."""
    one, other = units_of(first), units_of(second)
    found = _common(one, other)
    return "".join(found) if len(found) == len(one) == len(other) else None


def _common(first: Sequence[str], second: Sequence[str]) -> list[str]:
    found: list[str] = []
    for one, other in zip(first, second, strict=False):
        if one == other:
            found.append(one)
        elif one.isdigit() and other.isdigit():
            found.append(INDEX)
        else:
            break
    return found
