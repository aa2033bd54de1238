"""Speculation by prompt look-up: what followed the last few tokens before may follow them again.

A step over a few more tokens costs hardly more than one over one token, because it reads the same
weights. So guesses are computed along with the newest token, and each is kept only if it is what
would have been drawn anyway: the output is that of decoding one token a step.

Saxena, "Prompt lookup decoding" (2023).
"""

import numpy as np
import numpy.typing as npt

__all__ = ["DraftWidth", "Precedents"]

_LONGEST, _SHORTEST = 4, 2
"""Tokens that must have occurred before, the longest run first"""
_FIRST_WIDTH, _WIDEST = 4, 15
_PATIENCE = 4
"""Failures in a row that are borne: the guesses are few by then, and cost little"""
_REST_STEPS = 16
"""Steps without guesses after more"""


class Precedents:
    """Where in a sequence each run of tokens occurred last."""

    def __init__(self) -> None:
        self._after: dict[tuple[int, ...], int] = {}
        """The place behind each run that something follows"""
        self._length = 0

    def propose(self, tokens: npt.NDArray[np.int32], width: int) -> list[int]:
        """`width` tokens that may follow, or none; to be called with a growing sequence.

        tokens: int32 [length]. The latest earlier place where the longest run of last tokens occurs
        decides; what goes on up to the end is taken to go round.
        """
        begin = max(self._length - _LONGEST, 0)
        ids = tokens[begin:].tolist()
        for end in range(max(self._length - begin, 1), len(ids)):
            for run in range(_SHORTEST, min(_LONGEST, end) + 1):
                self._after[tuple(ids[end - run : end])] = begin + end
        self._length = len(tokens)
        for run in range(min(_LONGEST, len(ids)), _SHORTEST - 1, -1):
            place = self._after.get(tuple(ids[-run:]))
            if place is not None:
                ahead: list[int] = tokens[place : place + width].tolist()
                return (ahead * width)[:width]
        return []


class DraftWidth:
    """How many tokens to guess for one sequence: more after success, a rest after failure."""

    def __init__(self) -> None:
        self._width = _FIRST_WIDTH
        self._failures = 0
        self._rest = 0

    def next(self) -> int:
        """Tokens to guess in this step."""
        if self._rest:
            self._rest -= 1
            return 0
        return self._width

    def learn(self, guessed: int, kept: int) -> None:
        """What became of a guess."""
        if kept == guessed:
            self._width = min(2 * self._width, _WIDEST)
        elif 2 * kept < guessed:
            self._width = max(self._width // 2, 2)
        self._failures = 0 if kept else self._failures + 1
        if self._failures > _PATIENCE:
            self._failures, self._rest = 0, _REST_STEPS
