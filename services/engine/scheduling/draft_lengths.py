"""Numbers of draft tokens of a step, from what they cost and how likely they are accepted.

The expected tokens of a step, divided by its seconds, are to be as many as possible. The j-th draft
token of a sequence is used if it and all before it are accepted: with probability rate ** j. The
seconds are measured, by the number of rows, for steps with and without draft tokens. Where a draft
model makes the tokens, the seconds of its passes count, too.
"""

import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache, partial
from itertools import accumulate, repeat
from operator import mul

from services.engine.scheduling.step_cost import StepTimes

__all__ = ["DraftLengths", "MadeDraft", "MadeLengths"]

_LEAST_GAIN = 1.02
"""Least expected gain of a step with draft tokens, because estimates have errors"""
_LEAST_PROBABILITY = 0.05
"""Least probability that a draft token is used: less is lost in the errors of estimates"""
_NEAR = 4
"""Most size classes between a number of rows and a measured one that stands for it"""
_FRESH_STEPS = 32
"""Steps after which a measurement that keeps steps from drafting is doubted: times change"""


@dataclass(frozen=True, slots=True)
class MadeDraft:
    """Draft that a draft model may make for one sequence."""

    rate: float
    """Estimated probability that its next token is accepted"""
    most: int
    """Most tokens"""
    rows: int
    """Number of tokens that the model computes to make the first one"""
    further_rows: int = 1
    """Number of tokens that it computes to make each further one"""


@dataclass(frozen=True, slots=True)
class MadeLengths:
    """Numbers of tokens that a draft model is to make."""

    lengths: Sequence[int]
    """Number for each draft"""
    seconds: float
    """Estimated seconds of the draft model's passes"""
    saved: float
    """Seconds that the step and these passes are expected to save, above 0 if a length is"""


class DraftLengths:
    """Measured seconds of steps by rows, and the draft tokens that are worth their time."""

    def __init__(self, rows_at_once: int) -> None:
        """rows_at_once: rows that are assumed to take as long as one row, until it is measured."""
        self._rows_at_once = rows_at_once
        self._plain = StepTimes()
        """Seconds of steps without draft tokens"""
        self._drafting = StepTimes()
        """Seconds of steps with draft tokens"""
        self._idle = 0
        """Number of steps since the last draft"""

    def learn(self, rows: int, drafted: int, seconds: float, steps: int = 1) -> None:
        """Update the estimates with a step without prompts. rows: tokens, drafted ones included.

        steps: number of steps since the last call.
        """
        (self._drafting if drafted else self._plain).learn(rows, seconds)
        self._idle = 0 if drafted else self._idle + steps
        if self._idle > _FRESH_STEPS:
            self._drafting.forget()
            self._idle = 0

    def least_rate(self, streams: int, most: int) -> float:
        """Return the lowest acceptance at which a draft token can be worth its time.

        It is a cheap bound before anything is proposed: that of one draft token, or of one for each
        stream. most: most draft tokens of the step. The rate is above 1 if no token is worth it.
        """
        plain = self.plain_seconds(streams)
        least = math.inf
        for count in {1, streams} if most else ():
            gain = _LEAST_GAIN * self._slowdown(streams, streams + min(count, most), plain)
            least = min(least, (gain - 1) * streams / min(count, most))
        return least

    def choose(self, streams: int, drafts: Sequence[tuple[float, int]]) -> Sequence[int]:
        """Return the number of draft tokens to compute of each draft.

        streams: sequences of the step, with and without drafts. drafts: the rate and the number of
        tokens of each draft.
        """
        gains = [
            (-probability, i)
            for i, (rate, count) in enumerate(drafts)
            for probability in accumulate(repeat(rate, count), mul)
            if probability >= _LEAST_PROBABILITY
        ]
        gains.sort()
        expected = list(accumulate(-probability for probability, _ in gains))
        plain = self.plain_seconds(streams)
        best, chosen = _LEAST_GAIN, 0
        for count in self._counts(streams, len(gains)):
            slowdown = self._slowdown(streams, streams + count, plain)
            gain = (1 + expected[count - 1] / streams) / slowdown
            if gain > best:
                best, chosen = gain, count
        lengths = [0] * len(drafts)
        for _, i in gains[:chosen]:
            lengths[i] += 1
        return lengths

    def choose_made(
        self,
        streams: int,
        drafts: Sequence[MadeDraft],
        pass_seconds: Callable[[int], float],
        overhead: float = 0.0,
    ) -> MadeLengths:
        """Return the number of tokens that a draft model is to make for each draft.

        streams: sequences of the step, with and without drafts. pass_seconds: returns the seconds
        of a pass of the draft model, by its tokens. overhead: seconds that a step with drafts takes
        besides. No token is worth its time as long as no step of about so many streams was measured
        without drafts.
        """
        plain = self.plain_seconds(streams)
        if plain is None:
            return MadeLengths([0] * len(drafts), 0.0, 0.0)
        gains = [
            (probability, depth, i)
            for i, draft in enumerate(drafts)
            for depth, probability in enumerate(accumulate(repeat(draft.rate, draft.most), mul))
            if probability >= _LEAST_PROBABILITY
        ]
        # Passes are few if all drafts are equally long, and rows if the likeliest tokens are made.
        orders = (sorted(gains, key=lambda g: (g[1], -g[0])), sorted(gains, key=lambda g: -g[0]))
        seconds_of, slowdown = cache(pass_seconds), cache(partial(self.slowdown, streams))
        best, made = _LEAST_GAIN, MadeLengths([0] * len(drafts), 0.0, 0.0)
        for order in orders:
            expected, chosen = 0.0, 0
            rows = [0] * (1 + max((draft.most for draft in drafts), default=0))
            for count, (probability, depth, i) in enumerate(order, start=1):
                expected += probability
                rows[depth] += drafts[i].further_rows if depth else drafts[i].rows
                if count < len(order) and count % len(drafts) and not _is_last_of_size(count):
                    continue  # estimate few of many numbers of rows
                drafting = overhead + sum(map(seconds_of, filter(None, rows)))
                took = slowdown(streams + count) * plain + drafting
                worth = (1 + expected / streams) * plain
                if worth / took > best:
                    best, chosen = worth / took, count
                    found = drafting, worth - took
            if chosen:
                lengths = Counter(i for _, _, i in order[:chosen])
                made = MadeLengths([lengths[i] for i in range(len(drafts))], *found)
        return made

    def plain_seconds(self, streams: int) -> float | None:
        """Return the seconds of a step without drafts; None = no step of this size was measured."""
        return self._plain.nearest(streams, _NEAR)

    def _counts(self, streams: int, most: int) -> Iterator[int]:
        """Yield the numbers of draft tokens at which one more is estimated to take longer."""
        for rows in range(streams + 1, streams + most):
            if rows % self._rows_at_once == 0 or _is_last_of_size(rows):
                yield rows - streams
        if most:
            yield most

    def _gain(self, streams: int, expected: float, rows: int) -> float:
        """Return the tokens per second of a step with drafts, relative to one without."""
        return (1 + expected / streams) / self.slowdown(streams, rows)

    def slowdown(self, streams: int, rows: int) -> float:
        """Return the seconds of a step with drafts, relative to one of `streams` rows without."""
        return self._slowdown(streams, rows, self.plain_seconds(streams))

    def _slowdown(self, streams: int, rows: int, plain: float | None) -> float:
        """Do the same. plain: seconds of a step without drafts; None = not measured."""
        if plain is not None:
            measured = self._drafting.between(rows, (streams, plain))
            if measured is None:
                measured = self._drafting.nearest(rows, _NEAR)
            if measured is not None:
                return max(measured / plain, 1.0)
        return math.ceil(rows / self._rows_at_once) / math.ceil(streams / self._rows_at_once)


@cache
def _is_last_of_size(count: int) -> bool:
    """Return whether one more belongs to a larger size class."""
    return StepTimes.size(count) != StepTimes.size(count + 1)
