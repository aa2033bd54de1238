"""What the parts of a message's text are: segments, and who finds them."""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Protocol

__all__ = ["MessageParser", "PlainText", "Segment", "SegmentKind"]


class SegmentKind(Enum):
    """What a segment of generated text is."""

    CONTENT = "content"
    REASONING = "reasoning"
    CALL = "the beginning of a call: its text is the tool's name"
    ARGUMENTS = "a fragment of the JSON of that call's arguments"
    MARKUP = "what only separates the others: its text is empty"


@dataclass(frozen=True, slots=True)
class Segment:
    """A part of a message."""

    kind: SegmentKind
    text: str
    source: int
    """How many code points of the generated text it settles; segments settle all of it in order."""


class MessageParser(Protocol):
    """Reads one text piece by piece. What it makes of a text does not depend on the pieces."""

    def feed(self, text: str) -> Sequence[Segment]:
        """What is certain now."""

    def finish(self, *, is_cut: bool, is_stopped: bool = False) -> Sequence[Segment]:
        """What is left: no more text comes. `is_cut` says that max_tokens or a cancellation ended
        it, `is_stopped` that a stop string did: the model would have gone on."""


class PlainText:
    """A message that is all content."""

    def feed(self, text: str) -> Sequence[Segment]:
        """The text, as it is."""
        return [Segment(SegmentKind.CONTENT, text, len(text))] if text else ()

    def finish(self, *, is_cut: bool, is_stopped: bool = False) -> Sequence[Segment]:
        """Nothing is held back."""
        return ()
