"""Beam search of one prompt: scores of its beams, and the best sequences that have ended.

The algorithm is that of transformers' `generate(num_beams=..., do_sample=False)`: among all
continuations of all beams, the best `width` that go on are the next beams, and those that end
compete for the results by the sum of their logprobs / length^length_penalty.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from math import inf
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from services.engine.checked_request import BeamSettings, EarlyStopping
from services.engine.messages import FinishCause, Score

__all__ = ["BeamResult", "BeamSearch", "Continuation"]


class Continuation(NamedTuple):
    """A token that may continue a beam."""

    beam: int
    token: int
    logprob: float
    """Natural-log probability of the token"""


@dataclass(frozen=True, slots=True, eq=False)
class _Node:
    """The newest token of a beam, and the node of the token before."""

    parent: "_Node | None"
    token: int
    score: Score | None


class BeamResult(NamedTuple):
    """A sequence that has ended."""

    rank_score: float
    """Sum of the logprobs / length^length_penalty"""
    newest: _Node
    cause: FinishCause

    @property
    def tokens(self) -> list[tuple[int, Score | None]]:
        """Generated tokens, among them the token that ended the sequence."""
        tokens: list[tuple[int, Score | None]] = []
        node: _Node | None = self.newest
        while node is not None:
            tokens.append((node.token, node.score))
            node = node.parent
        return tokens[::-1]


@dataclass(slots=True)
class _Beam:
    """A sequence that goes on."""

    total: float
    """Sum of the logprobs; -inf for a beam without a continuation"""
    newest: _Node | None = None


@dataclass(slots=True)
class BeamSearch:
    """A search. Its beams are numbered, and each step gives every beam one more token."""

    settings: BeamSettings
    width: int
    """Number of beams, and of results"""
    max_tokens: int
    end_causes: dict[int, FinishCause]
    """Cause of the end of a sequence, by the id that ends it"""
    length: int = 0
    """Number of generated tokens of each beam"""
    is_over: bool = False
    results: list[BeamResult] = field(default_factory=list)
    """Results, best first; there are `width` of them once the search is over"""
    _beams: list[_Beam] = field(init=False)

    def __post_init__(self) -> None:
        # all beams are equal at first, so only one of them counts
        self._beams = [_Beam(0.0 if beam == 0 else -inf) for beam in range(self.width)]

    @property
    def candidates(self) -> int:
        """Number of each beam's most likely tokens that `choose` needs."""
        return self.width + len(self.end_causes)

    def choose(
        self, tokens: npt.NDArray[np.int64], logprobs: npt.NDArray[np.float32]
    ) -> list[Continuation]:
        """Return at most 2 x width continuations, best first.

        These are the best `width` continuations of all, and the best `width` continuations that
        don't end their sequence. tokens, logprobs: [width, candidates or all], of each beam's most
        likely tokens.
        """
        before = np.array([beam.total for beam in self._beams])
        totals = (before[:, None] + logprobs).ravel()
        order = np.argsort(-totals, kind="stable")
        order = order[totals[order] > -inf]
        goes_on = ~np.isin(tokens.ravel()[order], list(self.end_causes))
        matters = goes_on & (np.cumsum(goes_on) <= self.width)
        matters[: self.width] = True
        beams, columns = np.divmod(order[matters], tokens.shape[1])
        return [
            Continuation(int(beam), int(tokens[beam, column]), float(logprobs[beam, column]))
            for beam, column in zip(beams, columns, strict=True)
        ]

    def advance(self, chosen: Sequence[Continuation], scores: Sequence[Score | None]) -> list[int]:
        """Give each beam its next token. Return the number of the beam that each beam continues.

        chosen: from `choose`, at least one; scores: of the chosen tokens. A beam that continues
        another beam gets all its tokens; a beam that others continue always continues itself.
        """
        self.length += 1
        going_on: list[tuple[int, _Beam]] = []
        ended: list[BeamResult] = []
        for place, (each, score) in enumerate(zip(chosen, scores, strict=True)):
            before = self._beams[each.beam]
            total = before.total + each.logprob
            node = _Node(before.newest, each.token, score)
            cause = self._end_cause(each.token)
            if cause is None and len(going_on) < self.width:
                going_on.append((each.beam, _Beam(total, node)))
            elif cause is not None and place < self.width:
                ended.append(BeamResult(total / self._divisor(self.length), node, cause))
        ranked = sorted([*self.results, *ended], key=lambda each: -each.rank_score)
        self.results = ranked[: self.width]
        best = going_on[0][1].total if going_on else -inf
        self.is_over = not going_on or self._is_decided(best)
        if self.is_over:
            self._fill_results()
            return list(range(self.width))
        return self._place(going_on)

    def newest(self, beam: int) -> int:
        """Return the newest token of a beam."""
        node = self._beams[beam].newest
        assert node is not None
        return node.token

    def _end_cause(self, token: int) -> FinishCause | None:
        """Return the cause for which a sequence ends with a token; None = it goes on."""
        cause = self.end_causes.get(token)
        if cause is None and self.length == self.max_tokens:
            return FinishCause.LENGTH
        return cause

    def _divisor(self, length: int) -> float:
        power: float = float(length) ** self.settings.length_penalty
        return power

    def _is_decided(self, best_total: float) -> bool:
        """Return whether no beam is expected to rank above the results."""
        if len(self.results) < self.width:
            return False
        match self.settings.early_stopping:
            case EarlyStopping.FIRST:
                return True
            case EarlyStopping.NEVER if self.settings.length_penalty > 0:
                length = (
                    self.max_tokens
                )  # logprobs are negative: the greatest length gives the highest score
            case _:
                length = self.length
        return best_total / self._divisor(length) <= self.results[-1].rank_score

    def _place(self, going_on: Sequence[tuple[int, _Beam]]) -> list[int]:
        """Number the new beams: the first that continues an old beam keeps its number."""
        parents = [-1] * self.width
        moved: list[tuple[int, _Beam]] = []
        for parent, beam in going_on:
            if parents[parent] >= 0:
                moved.append((parent, beam))
            else:
                parents[parent], self._beams[parent] = parent, beam
        # if there are too few continuations, copies of the best one with a total of -inf fill up
        first, best = going_on[0]
        spare: Iterator[tuple[int, _Beam]] = iter(moved)
        for number, parent in enumerate(parents):
            if parent < 0:
                parents[number], self._beams[number] = next(
                    spare, (first, _Beam(-inf, best.newest))
                )
        return parents

    def _fill_results(self) -> None:
        """Repeat the last result if there are fewer sequences than beams."""
        self.results += [self.results[-1]] * (self.width - len(self.results))
