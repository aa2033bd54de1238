"""Drafter, which chooses the draft tokens that a step computes behind the newest tokens."""

from collections.abc import Iterator, Sequence
from itertools import takewhile

from services.engine.scheduling.sequence import TokenSequence
from services.engine.scheduling.step_plan import SchedulerLimits

__all__ = ["Drafter"]

_MAX_ALONE = 15
"""Most draft tokens of a stream that runs alone"""
_MAX_FORCED = 16
"""Most forced tokens of one stream in a step, because each of them takes a row of logits"""


class Drafter:
    """Draft tokens of the running sequences: proposed by n-grams, or forced by a grammar."""

    def __init__(self, running: Sequence[TokenSequence], limits: SchedulerLimits) -> None:
        """running: the scheduler's list of running sequences."""
        self._running = running
        self._limits = limits

    @property
    def width(self) -> int:
        """Number of tokens to propose per stream, so few that the step takes little longer.

        A step over half of the rows of a tile takes little longer than over one row: 5 % with AMX.
        A single stream may propose more: its draft length adapts to recent acceptance.
        """
        if not self._limits.speculate:
            return 0
        streams = sum(sequence.uncomputed == 1 for sequence in self._running)
        if streams == 1:
            return _MAX_ALONE
        return max(self._limits.rows_at_once // 2 - streams, 0) // max(streams, 1)

    def draft(self, sequence: TokenSequence, width: int) -> list[int]:
        """Return the draft tokens that follow a sequence's newest token."""
        if sequence.in_flight or not sequence.request.draws_independently:
            return []
        if sequence.forced:
            most = min(_MAX_FORCED, self._limits.max_logit_rows // len(self._running) - 1)
            return list(sequence.forced[: min(most, sequence.room)])
        if not width:
            return []
        if sequence.request.command.checked.constrained:
            position, draft = sequence.speculation.reported
            return list(draft[:width]) if position == sequence.position else []
        return _propose(sequence, width)

    def report(self) -> Iterator[tuple[TokenSequence, Sequence[int]]]:
        """Propose tokens for constrained sequences, which need masks before they are computed."""
        width = self.width
        for sequence in self._running if width else ():
            is_new = sequence.speculation.reported[0] != sequence.position
            is_due = is_new and sequence.mask is None and sequence.uncomputed == 1
            if sequence.request.command.checked.constrained and is_due:
                draft = _propose(sequence, width)
                sequence.speculation.reported = sequence.position, draft
                if draft:
                    yield sequence, draft

    def count_accepted(self, sequence: TokenSequence, draft: Sequence[int]) -> int:
        """Return how many draft tokens were drawn and computed. The newest token never counts."""
        drawn = sequence.tokens[sequence.num_computed : -1].tolist()
        pairs = zip(draft, drawn, strict=False)
        accepted = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
        sequence.speculation.learn(len(draft), accepted)
        return accepted


def _propose(sequence: TokenSequence, width: int) -> list[int]:
    if not sequence.request.draws_independently:
        return []
    return sequence.speculation.propose(sequence.tokens, min(width, sequence.room))
