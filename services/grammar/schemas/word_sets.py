"""Sets of words (JSON texts) that a grammar allows, and the prefixes whose words are all used."""

import functools
import json
from collections.abc import Iterable
from decimal import Decimal

from llguidance import LLMatcher, LLTokenizer

__all__ = ["WordSet", "canonical"]

_BYTES = 256
_MAX_STEPS = 64  # bytes by which a word is shortened


class WordSet:
    """The JSON texts that a grammar allows."""

    def __init__(self, prototype: LLMatcher) -> None:
        self._prototype = prototype
        # most tokens that end an item end the same one
        self._cached = functools.lru_cache(maxsize=64)(self._exhausted)

    @classmethod
    def of(cls, grammar: str) -> "WordSet | None":
        """Return the words of an llguidance grammar, or None if it does not compile."""
        prototype = LLMatcher(_tokenizer(), grammar, log_level=0)
        return None if prototype.is_error() else cls(prototype)

    def exhausted(
        self, exhausted: frozenset[bytes], seen: Iterable[str], word: bytes
    ) -> frozenset[bytes]:
        """Return `exhausted` with the prefixes of `word` all of whose completions are used.

        seen: canonical forms of all used words, including `word`. The empty prefix is exhausted
        when all words are used.
        """
        return self._cached(exhausted, frozenset(seen), word)

    def _exhausted(
        self, exhausted: frozenset[bytes], seen: frozenset[str], word: bytes
    ) -> frozenset[bytes]:
        matcher = self._prototype.deep_copy()
        if matcher.try_consume_tokens(list(word)) < len(word):
            return exhausted
        prefix, found = word, set(exhausted)
        for _ in range(_MAX_STEPS):
            if matcher.is_accepting() and canonical(prefix) not in seen:
                break
            live = int.from_bytes(matcher.compute_bitmask(), "little") & ((1 << _BYTES) - 1)
            if matcher.is_error() or not _all_in(found, prefix, live):
                break
            found.add(prefix)
            if not prefix or not matcher.rollback(1):
                break
            prefix = prefix[:-1]
        return frozenset(found)


def canonical(word: bytes) -> str:
    """Return a text that is the same for all JSON texts of equal values."""
    if word[:1] == b'"' or word in (b"null", b"true", b"false"):
        return word.decode()  # the grammar allows one spelling
    value = json.loads(word, parse_float=_number, parse_int=_number)
    return json.dumps(value, sort_keys=True)


def _number(text: str) -> list[str]:
    # a list that no JSON text has, so that 1 differs from "1"
    sign, digits, exponent = Decimal(text).as_tuple()
    body = "".join(map(str, digits)).lstrip("0")
    power = int(exponent) + len(body) - len(body := body.rstrip("0"))
    return ["\0", "0" if not body else f"{'-' * sign}{body}e{power}"]


def _all_in(found: set[bytes], prefix: bytes, live: int) -> bool:
    while live:
        lowest = live & -live
        if prefix + bytes([lowest.bit_length() - 1]) not in found:
            return False
        live ^= lowest
    return True


@functools.cache
def _tokenizer() -> LLTokenizer:
    return LLTokenizer("byte")
