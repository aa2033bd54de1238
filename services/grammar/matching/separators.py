"""White space in front of commas and colons of JSON, which no model was trained on.

llguidance allows the white space of a schema between any two tokens. A model that would close an
object too early writes a line break behind the value; where a member must follow, only a comma
could continue. These masks leave out that white space, so that the model meets the comma first.
"""

from llguidance import LLMatcher

from services.grammar.matching.token_index import TokenIndex

__all__ = ["SeparatorState"]

_QUOTE, _BACKSLASH = b'"\\'


class SeparatorState:
    """The state after a text of JSON. It is immutable: each token leads to a new state."""

    __slots__ = ("_in_string", "_index", "_is_escaped", "_is_spaced")

    def __init__(self, index: TokenIndex) -> None:
        self._index = index
        self._in_string = False
        self._is_escaped = False
        self._is_spaced = False  # True if the text ends with white space outside a string

    def after(self, text: bytes) -> "SeparatorState":
        """Return the state after a text."""
        in_string, is_escaped = self._in_string, self._is_escaped
        for byte in text:
            if is_escaped:
                is_escaped = False
            elif byte == _QUOTE:
                in_string = not in_string
            else:
                is_escaped = in_string and byte == _BACKSLASH
        state = SeparatorState(self._index)
        state._in_string, state._is_escaped = in_string, is_escaped
        state._is_spaced = not in_string and text.endswith((b" ", b"\t", b"\n", b"\r"))
        return state

    def narrowed(self, mask: int, grammar: LLMatcher) -> int:
        """Return a mask without white space that stands, or must stand, before a comma or a colon.

        The mask stays as it is where it allows nothing else: no text comes to a dead end.
        """
        index = self._index
        kept = mask
        if self._in_string:
            kept &= ~index.string_ends_apart
            if kept & index.string_ends_spaced and not self._may_close(grammar):
                kept &= ~index.string_ends_spaced
        elif mask & index.separators:
            kept &= ~index.separators_apart
            if not mask & index.closers:
                kept &= ~index.spaces
            elif self._is_spaced:
                kept &= ~index.separators
        return kept or mask

    def _may_close(self, grammar: LLMatcher) -> bool:
        """Return whether a bracket may follow the end of the current string."""
        quote = self._index.quote
        return quote is None or any(
            grammar.validate_tokens([quote, bracket]) == 2 for bracket in self._index.brackets
        )
