"""Segments of a message's text, and the interface of their parsers."""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Protocol

__all__ = ["MessageParser", "PlainText", "Segment", "SegmentKind"]


class SegmentKind(Enum):
    """Kind of a segment."""

    CONTENT = "content"
    REASONING = "reasoning"
    CALL = "start of a call; the text is the tool's name"
    ARGUMENTS = "part of the JSON of that call's arguments"
    MARKUP = "separator of the others; the text is empty"


@dataclass(frozen=True, slots=True)
class Segment:
    """A part of a message."""

    kind: SegmentKind
    text: str
    source: int
    """Code points of generated text that the segment covers. Segments cover all text in order."""


class MessageParser(Protocol):
    """Parser of one text, piece by piece. The result does not depend on the pieces."""

    def feed(self, text: str) -> Sequence[Segment]:
        """Add text; return the segments that are certain now."""

    def finish(self, *, is_cut: bool, is_stopped: bool = False) -> Sequence[Segment]:
        """End the text; return the remaining segments.

        is_cut: whether max_tokens or a cancellation ended the text. is_stopped: whether a stop
        string did. Otherwise the model itself ended it.
        """


class PlainText:
    """Parser of a message that is all content."""

    def feed(self, text: str) -> Sequence[Segment]:
        return [Segment(SegmentKind.CONTENT, text, len(text))] if text else ()

    def finish(self, *, is_cut: bool, is_stopped: bool = False) -> Sequence[Segment]:
        return ()
