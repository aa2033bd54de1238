"""DRY: a penalty that grows with the length of the repetition that a token would extend.

As in llama.cpp, the longest repetition that an id would extend decides.
"""

import numpy as np
import numpy.typing as npt

from services.engine.checked_request import DrySettings

__all__ = ["Repetitions"]

_LARGEST_PENALTY = 1e30
"""Largest penalty, because base**n overflows a float; it outweighs any logit"""


class Repetitions:
    """Lengths of the repetitions at the end of one growing sequence.

    An update is one pass over the tokens so far, with a few operations for each.
    """

    def __init__(self, settings: DrySettings) -> None:
        self._settings = settings
        self._runs = np.zeros(0, dtype=np.int32)
        """Number of last tokens, up to a breaker, that equal those d places earlier, by d"""
        self._length = 0

    def update(self, tokens: npt.NDArray[np.int32]) -> None:
        """Add the new tokens. tokens: int32 [length], the whole sequence."""
        if len(tokens) >= len(self._runs):
            self._runs = np.resize(self._runs, 2 * len(tokens))
        if self._length == 0:
            self._runs[: len(tokens)] = _runs(tokens, self._settings.breaker_ids)
            self._length = len(tokens)
        while self._length < len(tokens):
            self._add(tokens)

    def penalties(
        self, tokens: npt.NDArray[np.int32]
    ) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.float32]]:
        """Return distinct ids and their penalties. tokens: int32 [length], as last updated."""
        settings = self._settings
        runs = self._runs[1 : len(tokens)]
        places = np.flatnonzero(runs >= settings.allowed_length)
        if not len(places):
            return np.zeros(0, dtype=np.int64), np.zeros(0, dtype=np.float32)
        followers = tokens[len(tokens) - 1 - places]
        longest = np.full(int(followers.max()) + 1, -1, dtype=np.int32)
        np.maximum.at(longest, followers, runs[places])
        ids = np.flatnonzero(longest >= 0)
        with np.errstate(over="ignore"):
            excess = longest[ids].astype(np.float64) - settings.allowed_length
            amounts = settings.multiplier * np.power(settings.base, excess)
        return ids, np.minimum(amounts, _LARGEST_PENALTY).astype(np.float32)

    def _add(self, tokens: npt.NDArray[np.int32]) -> None:
        """Add the next token, which lengthens some runs and ends the others."""
        length = self._length
        runs, token = self._runs[: length + 1], tokens[length]
        runs[length] = 0
        self._length = length + 1
        if int(token) in self._settings.breaker_ids:
            runs[:] = 0
            return
        runs[1:] += 1
        runs[1:] *= tokens[:length][::-1] == token


def _runs(tokens: npt.NDArray[np.int32], breakers: frozenset[int]) -> npt.NDArray[np.int32]:
    """Compute the runs of a sequence from scratch: int32 [length].

    This is the Z algorithm in reverse. It compares each token about twice for any input.
    """
    runs = np.zeros(len(tokens), dtype=np.int32)
    ids = tokens[::-1].tolist()
    limit = next((n for n, token in enumerate(ids) if token in breakers), len(ids))
    if limit == 0:
        return runs
    begin = end = 0  # bounds of that known match of ids[0:] which ends last
    for place in (np.flatnonzero(tokens[-2::-1] == tokens[-1]) + 1).tolist():
        run = min(int(runs[place - begin]), end - place) if place < end else 0
        while run < limit and place + run < len(ids) and ids[place + run] == ids[run]:
            run += 1
        runs[place] = run
        if place + run > end:
            begin, end = place, place + run
    return runs
