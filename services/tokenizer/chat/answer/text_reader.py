"""Reader of generated text, which reads ahead and then settles segments or goes back."""

from abc import ABC, abstractmethod
from collections.abc import Generator, Sequence
from typing import TypeAlias

from services.tokenizer.chat.answer.message_parser import Segment, SegmentKind

__all__ = ["Reading", "ReadingParser", "TextReader", "is_half"]

Reading: TypeAlias = Generator[None, None, bool]
"""A read that yields whenever it needs more text, and returns whether it succeeded"""


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
        """True if a cut or a stop string ended the text, and not the model"""
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
        """Read exactly this string, or read nothing and return False."""
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

    def text_until(self, kind: SegmentKind, marks: Sequence[str]) -> Reading:
        """Settle text up to a mark and the whitespace before it; return false without a mark.

        `at` is then at the mark, behind that whitespace. Text that an interruption leaves with only
        the beginning of a mark is markup.
        """
        is_empty = True
        while True:
            places = [place for mark in marks if (place := self.text.find(mark)) >= 0]
            if places:
                kept = len(self.text[: min(places)].rstrip())
                self.settle_as(kind, kept)
                self.at = min(places) - kept
                return True
            if is_empty and self.is_interrupted and is_half(self.text.strip(), marks):
                kind = SegmentKind.MARKUP
            held = 0 if self.is_ended else _held(self.text, marks)
            is_empty = is_empty and held == len(self.text)
            self.settle_as(kind, len(self.text) - held)
            if self.is_ended:
                return False
            yield

    def settle_as(self, kind: SegmentKind, upto: int) -> None:
        """Make the text before `upto` a segment, which has no text if it is markup."""
        self.settle(kind, upto, "" if kind is SegmentKind.MARKUP else None)

    def skip_space(self) -> Generator[None, None, None]:
        """Settle whitespace as markup."""
        self.at = 0
        yield from self.space()
        self.settle(SegmentKind.MARKUP, self.at, "")


class ReadingParser(ABC):
    """Parser of one message by a reader, which waits in `_read` for more text."""

    def __init__(self) -> None:
        """Begin to read. A subclass calls this at the end of its own __init__."""
        self._reader = TextReader()
        self._run = self._read()
        next(self._run, None)

    def feed(self, text: str) -> Sequence[Segment]:
        """Add text; return the segments that are certain now."""
        self._reader.text += text
        next(self._run, None)
        return self._reader.take()

    def finish(self, *, is_cut: bool, is_stopped: bool = False) -> Sequence[Segment]:
        """End the text, and return the remaining segments; see `MessageParser.finish`."""
        self._reader.is_ended, self._reader.is_cut = True, is_cut
        self._reader.is_interrupted = is_cut or is_stopped
        next(self._run, None)
        return self._reader.take()

    @abstractmethod
    def _read(self) -> Generator[None, None, None]:
        """Settle all text. Yield whenever more text is needed."""


def is_half(text: str, marks: Sequence[str]) -> bool:
    """Return whether the text is the beginning of a mark."""
    return bool(text) and any(mark.startswith(text) for mark in marks)


def _held(text: str, marks: Sequence[str]) -> int:
    """Return the length of the end that may belong to a mark or to whitespace before one."""
    longest = min(max(map(len, marks), default=1) - 1, len(text))
    partial = next(
        (
            size
            for size in range(longest, 0, -1)
            if any(mark.startswith(text[-size:]) for mark in marks)
        ),
        0,
    )
    return len(text) - len(text[: len(text) - partial].rstrip())
