"""Speculation by prompt look-up: what followed the last few tokens before may follow them again.

A step over a few more tokens costs hardly more than one over one token, because it reads the same
weights. So guesses are computed along with the newest token, and each is kept only if it is what
would have been drawn anyway: the output is that of decoding one token a step.

Saxena, "Prompt lookup decoding" (2023).
"""

import numpy as np
import numpy.typing as npt

__all__ = ["DraftWidth", "propose"]

_LONGEST, _SHORTEST = 4, 2
"""Tokens that must have occurred before, the longest run first"""
_FIRST_WIDTH, _WIDEST = 4, 12
_REST_STEPS = 16
"""Steps without guesses after they failed twice in a row"""


def propose(tokens: npt.NDArray[np.int32], width: int) -> list[int]:
    """Up to `width` tokens that may follow, or none.

    tokens: int32 [length]. The most recent earlier place where the longest run of last tokens
    occurs decides.
    """
    for run in range(_LONGEST, _SHORTEST - 1, -1):
        starts = len(tokens) - run
        if starts < 1 or width < 1:
            continue
        found = tokens[:starts] == tokens[starts]
        for offset in range(1, run):
            found = found & (tokens[offset : offset + starts] == tokens[starts + offset])
        places = np.flatnonzero(found)
        if len(places):
            after = int(places[-1]) + run
            return [int(token) for token in tokens[after : after + width]]
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
        if self._failures >= 2:
            self._failures, self._rest = 0, _REST_STEPS
