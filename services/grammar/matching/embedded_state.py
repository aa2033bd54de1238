"""State of a text that contains JSON: the tokens that masks exclude within its values."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from llguidance import LLMatcher

from services.grammar.matching.json_extent import JsonExtent
from services.grammar.matching.json_state import JsonState
from services.grammar.matching.outline import Outline
from services.grammar.matching.token_index import TokenIndex, ids_of

__all__ = ["EmbeddedState"]


@dataclass(frozen=True, slots=True)
class _Value:
    """An unfinished value of JSON."""

    extent: JsonExtent
    state: JsonState


@dataclass(frozen=True, slots=True)
class EmbeddedState:
    """The state after a text. It is immutable: each token leads to a new state.

    Where a byte could continue both the text and a value, it counts as text.
    """

    index: TokenIndex
    plain: JsonState
    """The state before a value without a number"""
    numbered: Sequence[JsonState]
    """The states before the values that have numbers"""
    outline: Outline | None
    """Outline behind the current value; None = the text has left it, so masks are not narrowed"""
    value: _Value | None = None
    """Unfinished value of JSON; None = the text is between values"""

    def after(self, token: int) -> "EmbeddedState | None":
        """Return the state after a token, which may cross the borders of values.

        None: the token repeats a key or an item.
        """
        text = self.index.spellings[token]
        ids = self.index.outlines.spell(token, text)
        outline, value, place = self.outline, self.value, 0
        while outline is not None and place < len(ids):
            if value is None:
                outline, taken = outline.after(ids[place:])
                place += taken
                if place < len(ids):
                    outline, number = outline.after_value()
                    state = self.plain if number is None else self.numbered[number]
                    value = _Value(JsonExtent(), state)
            else:
                extent, taken = value.extent.after(text[place:])
                following = value.state.after_text(text[place : place + taken])
                if following is None:
                    return None
                value = None if extent is None else _Value(extent, following)
                place += taken
        return replace(self, outline=outline, value=value)

    def narrowed(self, mask: int, grammar: LLMatcher) -> int:
        """Return a mask without the tokens that JSON's rules exclude here.

        These are the tokens that the current value excludes and, between values, the tokens that
        begin a value and break a rule in it.
        """
        if self.outline is None:
            return mask
        if self.value is not None:
            return self.value.state.narrowed(mask, grammar) if self.value.extent.depth else mask
        if not any(state.uniqueness for state in self.numbered):
            return mask
        for token in ids_of(mask & self.index.opening_items):
            if self.after(token) is None:
                mask &= ~(1 << token)
        return mask
