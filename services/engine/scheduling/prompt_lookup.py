"""Draft tokens by prompt lookup: the tokens that followed the same n-gram before.

Saxena, "Prompt lookup decoding" (2023).
"""

import numpy as np
import numpy.typing as npt

__all__ = ["NgramIndex"]

_LONGEST, _SHORTEST = 4, 2
"""Most and fewest tokens of an n-gram; the longest that occurred before decides"""
_MANY = 16
"""Fewest new tokens whose n-grams are added together"""


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
        first = max(self._length - begin, 1)
        if len(ids) - first >= _MANY:
            self._add_many(ids, first, begin)
        else:
            for end in range(first, len(ids)):
                for run in range(_SHORTEST, min(_LONGEST, end) + 1):
                    self._next[tuple(ids[end - run : end])] = begin + end
        self._length = len(tokens)
        for run in range(min(_LONGEST, len(ids)), _SHORTEST - 1, -1):
            place = self._next.get(tuple(ids[-run:]))
            if place is not None:
                following: list[int] = tokens[place : place + count].tolist()
                return (following * count)[:count]
        return []

    def _add_many(self, ids: list[int], first: int, begin: int) -> None:
        """Add the n-grams in front of the tokens from `first` on.

        begin: index of the first of `ids` in the sequence. Loops in C take half the time for many.
        """
        last = len(ids)
        for run in range(_SHORTEST, _LONGEST + 1):
            least = max(first, run)
            parts = (ids[least - run + i : last - run + i] for i in range(run))
            ends = range(begin + least, begin + last)
            self._next.update(zip(zip(*parts, strict=True), ends, strict=True))
