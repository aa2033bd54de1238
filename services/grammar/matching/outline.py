"""Outlines of grammars: the text around JSON, with one token in place of each value of JSON.

llguidance does not say whether a token continues a value or the text around it. A second matcher
follows the text alone, byte by byte, and so finds the places where a value begins.
"""

from collections.abc import Sequence

from llguidance import LLMatcher, LLTokenizer, TokenizerWrapper

from services.grammar.matching.prototype import compile_prototype
from services.grammar.matching.vocabulary import Vocabulary

__all__ = ["Outline", "OutlineVocabulary"]

_BYTES = 256


class OutlineVocabulary:
    """The vocabulary of outlines: control tokens under their own ids, all bytes, and VALUE."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        tokenizer = vocabulary.tokenizer
        self._first_byte = vocabulary.size
        self._controls = frozenset(filter(tokenizer.is_special_token, range(vocabulary.size)))
        self.value = vocabulary.size + _BYTES
        """The id of the token in place of a value of JSON"""
        self.tokenizer = LLTokenizer(TokenizerWrapper(self._definition(vocabulary)))

    def spell(self, token: int, text: bytes) -> Sequence[int]:
        """Return the ids of a token of the checkpoint whose bytes are `text`."""
        if token in self._controls:
            return [token]
        return [self._first_byte + byte for byte in text]

    def _definition(self, vocabulary: Vocabulary) -> "_Definition":
        decode = vocabulary.tokenizer.decode_bytes
        names = [
            bytes(decode([token])) if token in self._controls else b""
            for token in range(vocabulary.size)
        ]
        return _Definition(names, [*self._controls, self.value], vocabulary.end_ids[0])


class _Definition:
    """The vocabulary in the form that llguidance reads."""

    bos_token_id = None

    def __init__(self, names: Sequence[bytes], controls: Sequence[int], end: int) -> None:
        self._first_byte = len(names)
        self.tokens = [*names, *(bytes([byte]) for byte in range(_BYTES)), b"<value>"]
        self.special_token_ids = controls
        self.eos_token_id = end

    def __call__(self, text: bytes) -> list[int]:
        return [self._first_byte + byte for byte in text]


class Outline:
    """The state of an outline after a text. It is immutable."""

    __slots__ = ("_matcher", "_vocabulary")

    def __init__(self, vocabulary: OutlineVocabulary, matcher: LLMatcher) -> None:
        self._vocabulary = vocabulary
        self._matcher = matcher

    @classmethod
    def compile(cls, vocabulary: OutlineVocabulary, grammar: str) -> "Outline":
        """Return the state before the text. Raises GrammarError."""
        return cls(vocabulary, compile_prototype(vocabulary.tokenizer, grammar))

    def after(self, ids: Sequence[int]) -> tuple["Outline", int]:
        """Return the state after the first ids that continue the text, and their number."""
        following = self._matcher.deep_copy()
        taken = following.try_consume_tokens(list(ids))
        return Outline(self._vocabulary, following), taken

    def after_value(self) -> "Outline | None":
        """Return the state after a value of JSON, or None if none may begin here."""
        following, taken = self.after([self._vocabulary.value])
        return following if taken else None
