"""Reader of generated text: it reads ahead, then settles segments or goes back."""

from collections.abc import Generator, Sequence
from typing import TypeAlias

from services.tokenizer.chat.answer.message_parser import Segment, SegmentKind

__all__ = ["Reading", "TextReader"]

Reading: TypeAlias = Generator[None, None, bool]
"""A read that yields whenever it needs more text, and returns whether it found its object"""


class TextReader:
    """Text that is not settled yet. Places are in code points from its start."""

    def __init__(self) -> None:
        self.text = ""
        self.at = 0
        """Place up to which the text was read"""
        self.is_ended = False
        """True if the text is complete"""
        self.is_cut = False
        """True if max_tokens or a cancellation ended the text, so that calls stay open"""
        self.is_interrupted = False
        """True if the text was cut, or a stop string ended it: not the model"""
        self.ran_out = False
        """True if a read needed more text than there is"""
        self._segments: list[Segment] = []

    def settle(self, kind: SegmentKind, upto: int, text: str | None = None) -> None:
        """Make the text before `upto` a segment; `text` replaces its text."""
        if upto or text:
            source = self.text[:upto]
            self._segments.append(Segment(kind, source if text is None else text, upto))
            self.text = self.text[upto:]
            self.at = max(0, self.at - upto)

    def take(self) -> Sequence[Segment]:
        """Return the segments that were settled since the last call."""
        segments, self._segments = self._segments, []
        return segments

    def more(self) -> Reading:
        """Wait for a character at `at`; return false if the text ends before it."""
        while self.at >= len(self.text):
            if self.is_ended:
                self.ran_out = True
                return False
            yield
        return True

    def space(self) -> Reading:
        """Read whitespace; return false if the text ends with it."""
        while (yield from self.more()):
            if not self.text[self.at].isspace():
                return True
            self.at += 1
        return False

    def literal(self, literal: str) -> Reading:
        """Read exactly this string, or nothing."""
        while len(self.text) - self.at < len(literal):
            if not literal.startswith(self.text[self.at :]):
                return False
            if self.is_ended:
                self.ran_out = True
                return False
            yield
        if not self.text.startswith(literal, self.at):
            return False
        self.at += len(literal)
        return True

    def until(self, end: str) -> Reading:
        """Read up to this string, which stays unread."""
        start = self.at
        while (place := self.text.find(end, start)) < 0:
            if self.is_ended:
                self.ran_out = True
                return False
            start = max(self.at, len(self.text) - len(end) + 1)
            yield
        self.at = place
        return True
