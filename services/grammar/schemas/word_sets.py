"""The words of a grammar, of which some are taken: which beginnings lead only to those."""

import functools
import json
from collections.abc import Iterable
from decimal import Decimal

from llguidance import LLMatcher, LLTokenizer

__all__ = ["WordSet", "meaning_of"]

_BYTES = 256
_MOST_STEPS = 64  # bytes that are taken back of a word


class WordSet:
    """The JSON texts that a grammar allows."""

    def __init__(self, prototype: LLMatcher) -> None:
        self._prototype = prototype
        # of all tokens that end an item, most end the same one
        self._spent_by = functools.lru_cache(maxsize=64)(self._spent)

    @classmethod
    def of(cls, grammar: str) -> "WordSet | None":
        """Those of a grammar of llguidance; None for one that it does not compile."""
        prototype = LLMatcher(_tokenizer(), grammar, log_level=0)
        return None if prototype.is_error() else cls(prototype)

    def spent(self, spent: frozenset[bytes], taken: Iterable[str], word: bytes) -> frozenset[bytes]:
        """The beginnings from which only words lead that are taken: `spent`, and those of `word`.

        `taken`: the meanings of all words that are, of `word` too. The empty beginning: all words.
        """
        return self._spent_by(spent, frozenset(taken), word)

    def _spent(
        self, spent: frozenset[bytes], taken: frozenset[str], word: bytes
    ) -> frozenset[bytes]:
        matcher = self._prototype.deep_copy()
        if matcher.try_consume_tokens(list(word)) < len(word):
            return spent
        beginning, found = word, set(spent)
        for _ in range(_MOST_STEPS):
            if matcher.is_accepting() and meaning_of(beginning) not in taken:
                break
            live = int.from_bytes(matcher.compute_bitmask(), "little") & ((1 << _BYTES) - 1)
            if matcher.is_error() or not _all_in(found, beginning, live):
                break
            found.add(beginning)
            if not beginning or not matcher.rollback(1):
                break
            beginning = beginning[:-1]
        return frozenset(found)


def meaning_of(word: bytes) -> str:
    """A text that two JSON texts share where they are the same value."""
    if word[:1] == b'"' or word in (b"null", b"true", b"false"):
        return word.decode()  # strings have one spelling
    value = json.loads(word, parse_float=_number, parse_int=_number)
    return json.dumps(value, sort_keys=True)


def _number(text: str) -> list[str]:
    # as a list that no JSON text spells, so that 1 differs from "1"
    sign, digits, exponent = Decimal(text).as_tuple()
    body = "".join(map(str, digits)).lstrip("0")
    power = int(exponent) + len(body) - len(body := body.rstrip("0"))
    return ["\0", "0" if not body else f"{'-' * sign}{body}e{power}"]


def _all_in(found: set[bytes], beginning: bytes, live: int) -> bool:
    while live:
        lowest = live & -live
        if beginning + bytes([lowest.bit_length() - 1]) not in found:
            return False
        live ^= lowest
    return True


@functools.cache
def _tokenizer() -> LLTokenizer:
    return LLTokenizer("byte")
