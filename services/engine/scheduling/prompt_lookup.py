"""Draft tokens by prompt lookup: the tokens that followed the same n-gram before.

Saxena, "Prompt lookup decoding" (2023).
"""

import numpy as np
import numpy.typing as npt

__all__ = ["NgramIndex"]

_LONGEST, _SHORTEST = 4, 2
"""Most and fewest tokens of an n-gram; the longest that occurred before decides"""


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
