"""Outlines of grammars: the text around JSON, with marks in place of the values of JSON.

llguidance does not say whether a token continues a value or the text around it. A second matcher
follows the text alone, byte by byte, and so finds the places where a value begins.
"""

from collections.abc import Sequence

from llguidance import LLMatcher, LLTokenizer, TokenizerWrapper

from services.grammar.matching.prototype import compile_prototype
from services.grammar.matching.vocabulary import Vocabulary

__all__ = ["Outline", "OutlineVocabulary"]

_BYTES = 256
_BYTE_TOKENS = [bytes([byte]) for byte in range(_BYTES)]
_MARKS = (b"<value>", b"<numbered value>")


class OutlineVocabulary:
    """The vocabulary of outlines: control tokens under their own ids, all bytes, and two marks."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        tokenizer = vocabulary.tokenizer
        self._first_byte = vocabulary.size
        self._controls = frozenset(filter(tokenizer.is_special_token, range(vocabulary.size)))
        self.value = vocabulary.size + _BYTES
        """The id of the mark in place of a value of JSON"""
        self.numbered_value = self.value + 1
        """The id of the mark in front of a value's number, which digits and ";" spell"""
        self.tokenizer = LLTokenizer(TokenizerWrapper(self._definition(vocabulary)))

    @property
    def marks(self) -> tuple[int, int]:
        """The ids of both marks"""
        return self.value, self.numbered_value

    def spell(self, token: int, text: bytes) -> Sequence[int]:
        """Return the ids of a token of the checkpoint whose bytes are `text`."""
        if token in self._controls:
            return [token]
        return self.spell_bytes(text)

    def spell_bytes(self, text: bytes) -> Sequence[int]:
        """Return the ids of a text."""
        return [self._first_byte + byte for byte in text]

    def _definition(self, vocabulary: Vocabulary) -> "_Definition":
        decode = vocabulary.tokenizer.decode_bytes
        names = [
            bytes(decode([token])) if token in self._controls else b""
            for token in range(vocabulary.size)
        ]
        return _Definition(names, [*self._controls, *self.marks], vocabulary.end_ids[0])


class _Definition:
    """The vocabulary in the form that llguidance reads."""

    bos_token_id = None

    def __init__(self, names: Sequence[bytes], controls: Sequence[int], end: int) -> None:
        self._first_byte = len(names)
        self.tokens = [*names, *_BYTE_TOKENS, *_MARKS]
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

    def after_value(self) -> tuple["Outline | None", int | None]:
        """Return the state after a value of JSON and its number, if it has one.

        The state is None if no value may begin here.
        """
        for mark in reversed(self._vocabulary.marks):
            following, taken = self.after([mark])
            if taken and mark == self._vocabulary.value:
                return following, None
            if taken:
                return following._after_number()
        return None, None

    def _after_number(self) -> tuple["Outline | None", int | None]:
        number, end, _ = self._matcher.deep_copy().compute_ff_bytes().partition(b";")
        if not end:  # several values may begin here
            return None, None
        following, _ = self.after(self._vocabulary.spell_bytes(number + end))
        return following, int(number)
