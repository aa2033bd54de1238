"""An index of a vocabulary by the bytes of its tokens."""

import re
from bisect import bisect_left
from collections.abc import Iterator

from services.grammar.matching.outline import OutlineVocabulary
from services.grammar.matching.vocabulary import Vocabulary

__all__ = ["TokenIndex", "ids_of"]

_SPACE = rb"[ \t\n\r]"
_AFTER_VALUE = re.compile(
    rb'^%b*(?:\Z|[,\]}"])|["\]}]%b*[,\]}]|[el0-9](?:%b|[,\]}])' % (_SPACE, _SPACE, _SPACE)
)
_WHOLE_ITEM = re.compile(
    rb'[,\[]%b*(?:"(?:[^"\\]|\\.)*"|[-0-9a-z.+E]+(?:%b|[,\]}])|\[.*\]|\{.*\})' % (_SPACE, _SPACE),
    re.DOTALL,
)
_OPENED_ITEMS = re.compile(rb"[\[{].*,", re.DOTALL)
_SEPARATOR_APART = re.compile(rb'[^"]*?%b+[,:]' % _SPACE)
_STRING_END = re.compile(rb'(?:[^"\\]|\\.)*?"%b+(?:([,:])|\Z)' % _SPACE, re.DOTALL)
_STRING = re.compile(rb'"(?=((?:[^"\\]|\\.)*)")', re.DOTALL)
# a string, or white space between tokens of JSON
_STRING_OR_SPACE = re.compile(rb'("(?:[^"\\]|\\.)*"?)|%b+' % _SPACE, re.DOTALL)


class TokenIndex:
    """The tokens that end or contain keys and items of JSON."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        decode = vocabulary.tokenizer.decode_bytes
        self.spellings = [bytes(decode([token])) for token in range(vocabulary.size)]
        self.outlines = OutlineVocabulary(vocabulary)
        """The vocabulary of outlines"""
        self._sorted = sorted(
            (text, token) for token, full in enumerate(self.spellings) for text in _compact(full)
        )
        self._texts = [text for text, _ in self._sorted]
        self._by_string: dict[bytes, int] = {}
        self.ending_items = 0
        """Tokens, as bits, that may end an item of an earlier token, or contain an item"""
        self.containing_items = 0
        """Tokens, as bits, that may contain a whole item"""
        self.opening_items = 0
        """Tokens, as bits, that may open an object or an array, and continue it behind a comma"""
        self.repeating_keys = 0
        """Tokens, as bits, that contain a string twice"""
        self.spaces = self.separators = self.closers = 0
        """Tokens, as bits, that start with white space; with a comma or a colon; with a closing
        bracket"""
        self.separators_apart = 0
        """Tokens, as bits, that have white space before a comma or a colon, outside a string"""
        self.string_ends_apart = self.string_ends_spaced = 0
        """Tokens, as bits, that end a string and have white space behind it: those that go on with
        a comma or a colon, and those that end there"""
        for token, text in enumerate(self.spellings):
            strings = _STRING.findall(text)
            for content in set(strings):
                self._by_string[content] = self._by_string.get(content, 0) | 1 << token
            if len(set(strings)) < len(strings):
                self.repeating_keys |= 1 << token
            if _WHOLE_ITEM.search(text):
                self.containing_items |= 1 << token
            if _OPENED_ITEMS.search(text):
                self.opening_items |= 1 << token
            if _AFTER_VALUE.search(text):
                self.ending_items |= 1 << token
            self._add_spaced(1 << token, text)
        self.ending_items |= self.containing_items
        bytes_alone = {text: token for token, text in enumerate(self.spellings) if len(text) == 1}
        self.quote = bytes_alone.get(b'"')
        """The token of a quotation mark alone"""
        self.brackets = [bytes_alone[text] for text in (b"}", b"]") if text in bytes_alone]
        """The tokens of closing brackets alone"""

    def _add_spaced(self, bit: int, text: bytes) -> None:
        """Add a token to the sets for white space in front of commas and colons."""
        first = text[:1]
        if first in (b",", b":"):
            self.separators |= bit
        elif first in (b"}", b"]"):
            self.closers |= bit
        if not any(space in text for space in b" \t\n\r"):
            return
        if first in (b" ", b"\t", b"\n", b"\r"):
            self.spaces |= bit
        if _SEPARATOR_APART.match(text):
            self.separators_apart |= bit
        if found := _STRING_END.match(text):
            if found[1]:
                self.string_ends_apart |= bit
            else:
                self.string_ends_spaced |= bit

    def starting_with(self, prefix: bytes) -> int:
        """Return the tokens that may start with a prefix, white space apart, as bits."""
        bits = 0
        for place in range(bisect_left(self._texts, prefix), len(self._sorted)):
            text, token = self._sorted[place]
            if not text.startswith(prefix):
                break
            bits |= 1 << token
        return bits

    def containing_string(self, content: bytes) -> int:
        """Return the tokens that contain a whole string of that content, as bits."""
        return self._by_string.get(content, 0)


def _compact(text: bytes) -> set[bytes]:
    """Return a token as it is, and without white space where it starts outside or in a string."""
    if not any(space in text for space in b" \t\n\r"):
        return {text}
    inside = _STRING_OR_SPACE.sub(rb"\1", b'"' + text)[1:]
    return {text, _STRING_OR_SPACE.sub(rb"\1", text), inside}


def ids_of(bits: int) -> Iterator[int]:
    """Yield the positions of the set bits."""
    while bits:
        lowest = bits & -bits
        yield lowest.bit_length() - 1
        bits ^= lowest
