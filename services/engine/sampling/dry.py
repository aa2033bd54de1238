"""DRY: a token that would extend a repetition loses the more, the longer the repetition is.

As in llama.cpp: of each id, the longest repetition that it would extend counts.
"""

import numpy as np
import numpy.typing as npt

from services.engine.messages import DrySettings

__all__ = ["Repetitions"]

_MOST = 1e30
"""A penalty of base**n soon leaves what a float can hold; this one outweighs any logit"""


class Repetitions:
    """How much of a sequence's end occurred before, by place; follows the sequence as it grows.

    A step costs one pass over the tokens so far, a few operations each.
    """

    def __init__(self, settings: DrySettings) -> None:
        self._settings = settings
        self._runs = np.zeros(0, dtype=np.int32)
        """[d] = tokens at the end that also stand d places earlier, none of them a breaker"""
        self._length = 0

    def follow(self, tokens: npt.NDArray[np.int32]) -> None:
        """Take in what was added. tokens: int32 [length], the whole sequence."""
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
        """Ids, each once, and what they lose. tokens: int32 [length], what was followed."""
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
        return ids, np.minimum(amounts, _MOST).astype(np.float32)

    def _add(self, tokens: npt.NDArray[np.int32]) -> None:
        """Take in the next token: a run that it does not lengthen ends."""
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
    """The runs of a sequence from scratch: int32 [length].

    The Z algorithm, backwards: each token is compared about twice, however much repeats.
    """
    runs = np.zeros(len(tokens), dtype=np.int32)
    ids = tokens[::-1].tolist()
    limit = next((n for n, token in enumerate(ids) if token in breakers), len(ids))
    if limit == 0:
        return runs
    begin = end = 0  # the stretch that reaches farthest among those known to repeat ids[0:]
    for place in (np.flatnonzero(tokens[-2::-1] == tokens[-1]) + 1).tolist():
        run = min(int(runs[place - begin]), end - place) if place < end else 0
        while run < limit and place + run < len(ids) and ids[place + run] == ids[run]:
            run += 1
        runs[place] = run
        if place + run > end:
            begin, end = place, place + run
    return runs
