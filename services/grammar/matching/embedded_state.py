"""State of a text that contains JSON: what its masks leave out in the values of JSON."""

from dataclasses import dataclass

from llguidance import LLMatcher

from services.grammar.matching.json_extent import JsonExtent
from services.grammar.matching.outline import Outline
from services.grammar.matching.separators import SeparatorState
from services.grammar.matching.token_index import TokenIndex

__all__ = ["EmbeddedState"]


@dataclass(frozen=True, slots=True)
class _Value:
    """An unfinished value of JSON."""

    extent: JsonExtent
    separators: SeparatorState


@dataclass(frozen=True, slots=True)
class EmbeddedState:
    """The state after a text. It is immutable: each token leads to a new state.

    Where a byte could continue both the text and a value, it counts as text.
    """

    index: TokenIndex
    outline: Outline | None
    """The outline behind the current value; None: the text left it, and masks stay as they are"""
    value: _Value | None = None
    """None: the text around the values"""

    def after(self, token: int) -> "EmbeddedState":
        """Return the state after a token, which may cross the borders of values."""
        text = self.index.spellings[token]
        ids = self.index.outlines.spell(token, text)
        outline, value, place = self.outline, self.value, 0
        while outline is not None and place < len(ids):
            if value is None:
                outline, taken = outline.after(ids[place:])
                place += taken
                if place < len(ids):
                    outline = outline.after_value()
                    value = _Value(JsonExtent(), SeparatorState(self.index))
            else:
                extent, taken = value.extent.after(text[place:])
                part = text[place : place + taken]
                separators = value.separators.after_text(part)
                value = None if extent is None else _Value(extent, separators)
                place += taken
        return EmbeddedState(self.index, outline, value)

    def narrowed(self, mask: int, grammar: LLMatcher) -> int:
        """Return a mask without white space in front of commas and colons of the current value."""
        if self.outline is None or self.value is None or not self.value.extent.depth:
            return mask
        return self.value.separators.narrowed(mask, grammar)
