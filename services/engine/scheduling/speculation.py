"""Speculation by prompt lookup: draft tokens are the tokens that followed the same n-gram before.

A step over a few more tokens costs little more than one over one token, because it reads the same
weights. So draft tokens are computed with the newest token, and accepted if they are the tokens
that would have been drawn anyway. The output is the same as without speculation.

Saxena, "Prompt lookup decoding" (2023).
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

__all__ = ["NgramIndex", "Speculation"]

_LONGEST, _SHORTEST = 4, 2
"""Most and fewest tokens of an n-gram; the longest that occurred before decides"""
_FIRST_LENGTH, _MAX_LENGTH = 4, 15
"""Number of draft tokens at first, and largest number"""
_PATIENCE = 4
"""Number of rejected drafts in a row before a pause; the last of them are short"""
_PAUSE_STEPS = 16
"""Number of steps without a draft after too many rejected drafts in a row"""


class NgramIndex:
    """Latest occurrence of each n-gram in one growing sequence."""

    def __init__(self) -> None:
        self._next: dict[tuple[int, ...], int] = {}
        """Index of the token after the latest occurrence, by n-gram"""
        self._length = 0

    def propose(self, tokens: npt.NDArray[np.int32], count: int) -> list[int]:
        """Return `count` draft tokens, or none if the last tokens have not occurred before.

        tokens: int32 [length], the sequence so far. The latest occurrence of the longest n-gram
        decides. If fewer than `count` tokens follow it, they repeat.
        """
        begin = max(self._length - _LONGEST, 0)
        ids = tokens[begin:].tolist()
        for end in range(max(self._length - begin, 1), len(ids)):
            for run in range(_SHORTEST, min(_LONGEST, end) + 1):
                self._next[tuple(ids[end - run : end])] = begin + end
        self._length = len(tokens)
        for run in range(min(_LONGEST, len(ids)), _SHORTEST - 1, -1):
            place = self._next.get(tuple(ids[-run:]))
            if place is not None:
                following: list[int] = tokens[place : place + count].tolist()
                return (following * count)[:count]
        return []


class Speculation:
    """Draft state of one sequence: its draft grows with acceptance and pauses after rejections."""

    def __init__(self) -> None:
        self.reported: tuple[int, Sequence[int]] = (-1, ())
        """Position and tokens of the draft whose masks were requested"""
        self._index = NgramIndex()
        self._length = _FIRST_LENGTH
        self._failures = 0
        self._pause = 0

    def propose(self, tokens: npt.NDArray[np.int32], most: int) -> list[int]:
        """Return at most `most` draft tokens. tokens: int32 [length], the sequence so far."""
        if self._pause:
            self._pause -= 1
            return []
        count = min(self._length, most)
        return self._index.propose(tokens, count) if count else []

    def learn(self, proposed: int, accepted: int) -> None:
        """Adapt to the outcome of a draft."""
        if accepted == proposed:
            self._length = min(2 * self._length, _MAX_LENGTH)
        elif 2 * accepted < proposed:
            self._length = max(self._length // 2, 2)
        self._failures = 0 if accepted else self._failures + 1
        if self._failures > _PATIENCE:
            self._failures, self._pause = 0, _PAUSE_STEPS
