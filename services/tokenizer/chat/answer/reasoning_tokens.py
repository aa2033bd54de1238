"""Number of a message's tokens whose text is reasoning."""

import codecs
from collections import deque
from collections.abc import Sequence

__all__ = ["ReasoningTokens"]


class ReasoningTokens:
    """Counter of the tokens whose text the parser classifies as reasoning.

    The last character of a token decides; a token without text belongs to the next one with text.
    Places are in code points of the generated text.
    """

    def __init__(self, pieces: Sequence[bytes]) -> None:
        """pieces: bytes of each token by id; empty for tokens that the text leaves out."""
        self.count = 0
        self._pieces = pieces
        self._unfinished = b""
        """Bytes of the last character, if it is not complete"""
        self._ends: deque[int] = deque()
        """Ends of the tokens whose text is not decided"""
        self._received = 0
        self._settled = 0
        self._last = 0
        """End of the last decided token with text"""
        self._silent = 0
        """Tokens without text since the last decided token with text"""

    def extend(self, text: str, ids: Sequence[int]) -> None:
        """Add tokens, which add `text`."""
        end = self._received + len(text)
        for token in ids:
            spelled = self._unfinished + self._pieces[token]
            whole, consumed = codecs.utf_8_decode(spelled, "replace", False)
            self._unfinished = spelled[consumed:]
            self._received = min(end, self._received + len(whole))
            self._ends.append(self._received)
        self._received = end
        if ids and text:  # the whole text is theirs, even if the decoder left out bytes
            self._ends[-1] = end

    def settle(self, length: int, *, is_reasoning: bool) -> None:
        """Record whether the next `length` code points are reasoning."""
        self._settled += length
        while self._ends and self._ends[0] <= self._settled:
            end = self._ends.popleft()
            self._silent += 1
            if end > self._last:
                self.count += self._silent if is_reasoning else 0
                self._silent, self._last = 0, end
