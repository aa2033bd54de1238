"""State of a JSON text: the tokens that masks exclude although the grammar allows them."""

from dataclasses import dataclass

from llguidance import LLMatcher

from services.grammar.matching.separators import SeparatorState
from services.grammar.matching.token_index import TokenIndex
from services.grammar.matching.uniqueness import UniquenessState

__all__ = ["JsonState"]


@dataclass(frozen=True, slots=True)
class JsonState:
    """The state after a text. It is immutable: each token leads to a new state."""

    index: TokenIndex
    uniqueness: UniquenessState | None = None
    """State of keys and items; None = the grammar allows no repeated keys or items"""
    separators: SeparatorState | None = None
    """State of white space; None = the JSON is compact, or the client chose its white space"""

    def after(self, token: int) -> "JsonState | None":
        """Return the state after a token, or None if the token repeats a key or an item."""
        return self.after_text(self.index.spellings[token])

    def after_text(self, text: bytes) -> "JsonState | None":
        """Return the state after a text, or None if the text repeats a key or an item."""
        uniqueness = self.uniqueness
        if uniqueness is not None and (uniqueness := uniqueness.after_text(text)) is None:
            return None
        separators = self.separators and self.separators.after(text)
        return JsonState(self.index, uniqueness, separators)

    def narrowed(self, mask: int, grammar: LLMatcher) -> int:
        """Return a mask without the tokens that must not, or should not, continue this text."""
        if self.uniqueness is not None:
            mask &= ~self.uniqueness.forbidden(mask)
        return mask if self.separators is None else self.separators.narrowed(mask, grammar)
