"""Speculation: draft tokens of one sequence, and how likely the next one is accepted.

A step over a few more tokens costs little more than one over one token, because it reads the same
weights. So draft tokens are computed with the newest token, and accepted if they are the tokens
that would have been drawn anyway. The output is the same as without speculation.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from services.engine.scheduling.predicted_text import PredictedText
from services.engine.scheduling.prompt_lookup import NgramIndex

__all__ = ["MOST_DRAFTED", "Acceptance", "Draft", "DraftKind", "DraftTotals", "Speculation"]

MOST_DRAFTED = 15
"""Most draft tokens of a sequence in a step"""
_PRIOR, _PRIOR_WEIGHT = 0.6, 2.0
"""Acceptance that is assumed at first, and the number of draft tokens that it counts as"""
_MEMORY = 0.9
"""Weight of earlier drafts against the newest: about ten drafts are remembered"""
_FORGETTING = 0.98
"""The same for a token without a draft, so that a sequence tries again after some tens of tokens"""


class DraftKind(Enum):
    """Source of draft tokens."""

    NGRAM = "ngram"
    """Earlier occurrences of the newest tokens"""
    PREDICTION = "prediction"
    """The text that the client expects"""
    MODEL = "draft_model"
    """A smaller model with the same vocabulary"""
    EAGLE = "eagle"
    """An EAGLE-3 head, which reads the model's hidden states"""
    MTP = "mtp"
    """A layer of the checkpoint that predicts the token after the next one"""


class Draft(NamedTuple):
    """Proposed tokens of one sequence."""

    kind: DraftKind
    tokens: Sequence[int]


@dataclass(slots=True)
class DraftTotals:
    """Numbers of drafts, of their tokens, and of the accepted ones."""

    drafts: int = 0
    drafted: int = 0
    accepted: int = 0

    def add(self, drafted: int, accepted: int) -> None:
        """Count a draft."""
        self.drafts += 1
        self.drafted += drafted
        self.accepted += accepted


class Acceptance:
    """Share of draft tokens that were accepted lately, of those before the first rejected one."""

    def __init__(self, memory: float = _MEMORY) -> None:
        """memory: weight of earlier drafts against the newest."""
        self._memory = memory
        self._accepted = self._tried = 0.0
        self._length = 0
        """Length of the sequence behind the newest draft"""

    def rate(self, prior: float = _PRIOR, length: int = 0) -> float:
        """Return the estimated probability that the next draft token is accepted.

        prior: the probability before any draft. length: present length of the sequence. The
        estimate moves towards `prior` with each token that follows the newest draft.
        """
        if not self._tried:
            return prior
        kept = self._kept(length)
        tried = kept * self._tried + _PRIOR_WEIGHT
        return (kept * self._accepted + prior * _PRIOR_WEIGHT) / tried

    def learn(self, proposed: int, accepted: int, length: int = 0) -> None:
        """Update the estimate with a draft. length: that of the sequence before the draft."""
        kept = self._memory * self._kept(length)
        self._accepted = kept * self._accepted + accepted
        self._tried = kept * self._tried + accepted + (accepted < proposed)
        self._length = length + accepted + 1

    def _kept(self, length: int) -> float:
        """Return the weight of the drafts so far once the sequence has a length."""
        kept: float = _FORGETTING ** max(length - self._length, 0)
        return kept


class Speculation:
    """Draft sources of one sequence, and what became of their tokens."""

    def __init__(self, prediction: Sequence[int] = (), prompt_length: int = 0) -> None:
        """prediction: tokens that the client expects as the answer behind the prompt's tokens."""
        self.reported: tuple[int, Draft | None] = (-1, None)
        """Position and tokens of the draft whose masks were requested"""
        self.made: tuple[int, Draft | None] = (-1, None)
        """Length of the sequence, and the draft that a draft model or a head has made behind it"""
        self.computed: DraftKind | None = None
        """Source of the draft that the newest step computed; None = a grammar forced its tokens"""
        self.counts = {kind: DraftTotals() for kind in DraftKind}
        """Drafts of the sequence, by their source"""
        self._index = NgramIndex()
        self._prediction = PredictedText(prediction) if len(prediction) else None
        self._prompt_length = prompt_length
        self._acceptances: dict[DraftKind, Acceptance] = {}
        """Acceptance of each source that has proposed a draft"""

    @property
    def has_prediction(self) -> bool:
        """True if the client expects a text."""
        return self._prediction is not None

    def rate(self, length: int) -> float:
        """Return the highest probability that a token from the text or from n-grams is accepted.

        length: length of the sequence.
        """
        rate = self.rate_of(DraftKind.NGRAM, length)
        if self._prediction is None:
            return rate
        return max(rate, self.rate_of(DraftKind.PREDICTION, length))

    def rate_of(self, kind: DraftKind, length: int, prior: float = _PRIOR) -> float:
        """Return the estimated probability that a source's next draft token is accepted.

        length: length of the sequence. prior: the probability before the first draft.
        """
        acceptance = self._acceptances.get(kind)
        return prior if acceptance is None else acceptance.rate(prior, length)

    def propose(
        self, tokens: npt.NDArray[np.int32], most: int, *, looks_up: bool = True
    ) -> Draft | None:
        """Return at most `most` draft tokens; None = there are none.

        tokens: int32 [length], the sequence so far. looks_up: whether n-grams may propose tokens.
        Tokens that a draft model has made go first, because it makes them where they are expected
        to be better. The expected text goes before n-grams.
        """
        length, made = self.made
        if made is not None and length == len(tokens):
            return Draft(made.kind, made.tokens[:most])
        return self.propose_free(tokens, most, looks_up=looks_up)

    def propose_free(
        self, tokens: npt.NDArray[np.int32], most: int, *, looks_up: bool = True
    ) -> Draft | None:
        """Return at most `most` draft tokens that no model has to make; None = there are none."""
        if self._prediction is not None:
            expected = self._prediction.propose(tokens[self._prompt_length :], most)
            if expected:
                return Draft(DraftKind.PREDICTION, expected)
        found = self._index.propose(tokens, most) if looks_up else []
        return Draft(DraftKind.NGRAM, found) if found else None

    def learn(self, kind: DraftKind, proposed: int, accepted: int, length: int) -> None:
        """Count a draft, and adapt to its outcome. length: that of the sequence before it."""
        self.counts[kind].add(proposed, accepted)
        self._acceptances.setdefault(kind, Acceptance()).learn(proposed, accepted, length)
