"""Draft tokens from a text that the client expects, such as the file that the answer edits."""

from bisect import bisect
from collections import defaultdict
from collections.abc import Sequence
from functools import cached_property

import numpy as np
import numpy.typing as npt

__all__ = ["PredictedText"]

_LONGEST, _SHORTEST = 8, 2
"""Most and fewest generated tokens by which a lost place is found again; the longest run decides"""
_MOST_PLACES = 16
"""Most places on each side of the last one that are compared: texts may repeat themselves"""


class PredictedText:
    """Expected tokens of an answer, and the place in them that the answer has reached."""

    def __init__(self, ids: Sequence[int]) -> None:
        """ids: tokens of the expected text."""
        self._ids = np.array(ids, dtype=np.int32)
        self._place: int | None = 0
        """Index of the token that is expected next; None = the answer has left the text"""
        self._last_place = 0
        """Index at which the answer has left the text"""
        self._read = 0
        """Number of generated tokens that have moved the place"""

    def propose(self, generated: npt.NDArray[np.int32], count: int) -> list[int]:
        """Return at most `count` expected tokens that follow the answer; none if its place is lost.

        generated: int32 [length], the answer so far.
        """
        self._follow(generated)
        if self._place is None:
            return []
        draft: list[int] = self._ids[self._place : self._place + count].tolist()
        return draft

    def _follow(self, generated: npt.NDArray[np.int32]) -> None:
        """Move the place by the tokens that were generated since the last call."""
        for token in generated[self._read :].tolist():
            if self._place is None:
                continue
            if self._place < len(self._ids) and self._ids[self._place] == token:
                self._place += 1
            else:
                self._last_place, self._place = self._place, None
        self._read = len(generated)
        if self._place is None:
            self._place = self._found(generated[-_LONGEST:].tolist())

    def _found(self, newest: list[int]) -> int | None:
        """Return the place behind the longest run of the newest tokens in the text.

        Of several, it is the nearest one to the place where the answer left the text.
        """
        places = self._places.get(tuple(newest[-_SHORTEST:]), ())
        middle = bisect(places, self._last_place)
        near = places[max(middle - _MOST_PLACES, 0) : middle + _MOST_PLACES]

        def rank(place: int) -> tuple[int, int]:
            return self._run(newest, place), -abs(place - self._last_place)

        return max(near, key=rank, default=None)

    def _run(self, newest: list[int], place: int) -> int:
        """Return how many of the newest tokens stand before `place`."""
        before = self._ids[max(place - len(newest), 0) : place].tolist()
        count = 0
        for expected, token in zip(reversed(before), reversed(newest), strict=False):
            if expected != token:
                break
            count += 1
        return count

    @cached_property
    def _places(self) -> dict[tuple[int, ...], list[int]]:
        """Places behind each run of `_SHORTEST` tokens of the text."""
        ids, places = self._ids.tolist(), defaultdict(list)
        for place in range(_SHORTEST, len(ids)):
            places[tuple(ids[place - _SHORTEST : place])].append(place)
        return places
