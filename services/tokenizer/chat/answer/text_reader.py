"""Generated text on its way into segments: read ahead, then settled or taken back."""

from collections.abc import Generator, Sequence
from typing import TypeAlias

from services.tokenizer.chat.answer.message_parser import Segment, SegmentKind

__all__ = ["Reading", "TextReader"]

Reading: TypeAlias = Generator[None, None, bool]
"""Reads, and yields whenever more text is needed; returns whether it found what it looks for."""


class TextReader:
    """The text that is not settled yet. Places are in code points from its start."""

    def __init__(self) -> None:
        self.text = ""
        self.at = 0
        """The place up to which was read."""
        self.is_ended = False
        """No more text comes."""
        self.is_cut = False
        """max_tokens ended it, or a cancellation: calls stay open."""
        self.is_interrupted = False
        """The model would have gone on: it was cut, or a stop string ended it."""
        self.ran_out = False
        """What was read last would have needed more text than there is."""
        self._segments: list[Segment] = []

    def settle(self, kind: SegmentKind, upto: int, text: str | None = None) -> None:
        """What stands before `upto` is a segment of this kind. Its text is what stands there,
        unless it is given."""
        if upto or text:
            source = self.text[:upto]
            self._segments.append(Segment(kind, source if text is None else text, upto))
            self.text = self.text[upto:]
            self.at = max(0, self.at - upto)

    def take(self) -> Sequence[Segment]:
        """What was settled since the last call."""
        segments, self._segments = self._segments, []
        return segments

    def more(self) -> Reading:
        """Waits for a character at `at`; false when the text ends before."""
        while self.at >= len(self.text):
            if self.is_ended:
                self.ran_out = True
                return False
            yield
        return True

    def space(self) -> Reading:
        """Reads whitespace, if any; false when the text ends with it."""
        while (yield from self.more()):
            if not self.text[self.at].isspace():
                return True
            self.at += 1
        return False

    def literal(self, literal: str) -> Reading:
        """Reads exactly this; reads nothing of anything else."""
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

    def until(self, *ends: str) -> Reading:
        """Reads up to the first of these strings, which is not read."""
        start = self.at
        longest = max(map(len, ends))
        while True:
            places = [place for end in ends if (place := self.text.find(end, start)) >= 0]
            if places:
                self.at = min(places)
                return True
            if self.is_ended:
                self.ran_out = True
                return False
            start = max(self.at, len(self.text) - longest + 1)
            yield
