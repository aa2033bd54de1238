"""The tokens of a vocabulary by what they spell."""

import re
from bisect import bisect_left
from collections.abc import Iterator

from services.grammar.matching.vocabulary import Vocabulary

__all__ = ["TokenIndex", "ids_of"]

_AFTER_VALUE = re.compile(rb'(?:^|["\]}el0-9])[,\]}]')
_WHOLE_ITEM = re.compile(
    rb'[,\[](?:"(?:[^"\\]|\\.)*"|[-0-9a-z.+E]+[,\]}]|\[.*\]|\{.*\})', re.DOTALL
)
_STRING = re.compile(rb'"(?=((?:[^"\\]|\\.)*)")', re.DOTALL)


class TokenIndex:
    """Finds tokens that end or hold a key or an item."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        decode = vocabulary.tokenizer.decode_bytes
        self.spellings = [bytes(decode([token])) for token in range(vocabulary.size)]
        self._sorted = sorted((text, token) for token, text in enumerate(self.spellings))
        self._texts = [text for text, _ in self._sorted]
        self._by_key: dict[bytes, int] = {}
        self.ends_items = 0
        """Tokens that may end an item that an earlier one began, or hold one; as bits"""
        self.hold_items = 0
        """Tokens that may hold a whole item; as bits"""
        self.repeats_keys = 0
        """Tokens in which a string comes twice; as bits"""
        for token, text in enumerate(self.spellings):
            strings = _STRING.findall(text)
            for content in set(strings):
                self._by_key[content] = self._by_key.get(content, 0) | 1 << token
            if len(set(strings)) < len(strings):
                self.repeats_keys |= 1 << token
            if _WHOLE_ITEM.search(text):
                self.hold_items |= 1 << token
            if _AFTER_VALUE.search(text):
                self.ends_items |= 1 << token
        self.ends_items |= self.hold_items

    def led_by(self, beginning: bytes) -> int:
        """The tokens that begin so, as bits."""
        bits = 0
        for place in range(bisect_left(self._texts, beginning), len(self._sorted)):
            text, token = self._sorted[place]
            if not text.startswith(beginning):
                break
            bits |= 1 << token
        return bits

    def holding(self, key: bytes) -> int:
        """The tokens that hold a whole string of that content, as bits."""
        return self._by_key.get(key, 0)


def ids_of(bits: int) -> Iterator[int]:
    """The positions of the ones."""
    while bits:
        lowest = bits & -bits
        yield lowest.bit_length() - 1
        bits ^= lowest
