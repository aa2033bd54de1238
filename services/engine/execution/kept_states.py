"""Hidden states of running sequences, which a draft head has not read yet."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from services.engine.scheduling.sequence import SequenceState, TokenSequence
from services.engine.scheduling.step_plan import StepPlan

__all__ = ["KeptStates"]

_LEAST_ROWS = 32
"""Rows of a sequence that are kept in any case"""


@dataclass(slots=True)
class _Rows:
    """Consecutive rows of one sequence."""

    start: int
    """Index of the first token"""
    parts: list[Tensor] = field(default_factory=list)
    """[tokens, width] each"""
    count: int = 0
    """Number of tokens in all parts"""

    def cut_end(self, end: int) -> None:
        """Drop the rows from the token `end` on."""
        while self.parts and self.start + self.count > end:
            last = self.parts.pop()
            self.count -= last.shape[0]
            if (left := end - self.start - self.count) > 0:
                self.parts.append(last[:left])
                self.count += left

    def cut_start(self, start: int) -> None:
        """Drop whole parts that end before or at the token `start`."""
        dropped = 0
        while self.start < start and dropped < len(self.parts):
            count = self.parts[dropped].shape[0]
            if self.start + count > start:
                break
            self.start += count
            self.count -= count
            dropped += 1
        del self.parts[:dropped]


class KeptStates:
    """Hidden states of the newest tokens of each running sequence.

    The oldest ones are dropped where they would take too much memory.
    """

    def __init__(self, most_rows: int) -> None:
        """most_rows: most rows that are kept of all sequences together."""
        self._most_rows = most_rows
        self._kept: dict[TokenSequence, _Rows] = {}

    def keep(
        self,
        plan: StepPlan,
        tapped: Sequence[Tensor],
        wanted: Collection[TokenSequence] | None = None,
    ) -> Mapping[TokenSequence, int]:
        """Copy hidden states of a step.

        tapped: [tokens, hidden_size] each. wanted: sequences whose rows are kept; None = all.
        Returns the index of the first token that is kept of each of these sequences.
        """
        for gone in [each for each in self._kept if each.state is not SequenceState.RUNNING]:
            del self._kept[gone]
        firsts: dict[TokenSequence, int] = {}
        share = max(self._most_rows // max(len(self._kept), 1), _LEAST_ROWS)
        decodes = len(plan.decodes)
        if wanted is None and decodes:
            rows = torch.cat([each[:decodes] for each in tapped], dim=1)
            for sequence, row in zip(plan.decodes, rows[:, None].unbind(), strict=True):
                firsts[sequence] = self._add(sequence, _newest(sequence), row, share)
        elif wanted:
            for i, sequence in enumerate(plan.decodes):
                if sequence in wanted:
                    row = torch.cat([each[i : i + 1] for each in tapped], dim=1)
                    firsts[sequence] = self._add(sequence, _newest(sequence), row, share)
        end = decodes
        for chunk in plan.chunks:
            start, end = end, end + chunk.count
            if wanted is not None and chunk.sequence not in wanted:
                continue
            first = max(start, end - share)
            rows_of_chunk = torch.cat([each[first:end] for each in tapped], dim=1)
            begin = chunk.start + first - start
            firsts[chunk.sequence] = self._add(chunk.sequence, begin, rows_of_chunk, share)
        return firsts

    def rows(self, sequence: TokenSequence, start: int, end: int) -> Tensor:
        """Return the hidden states [end - start, width] of consecutive tokens, which are kept.

        Earlier ones are dropped: no head reads them again.
        """
        kept = self._kept[sequence]
        kept.cut_start(start)
        whole = kept.parts[0] if len(kept.parts) == 1 else torch.cat(kept.parts)
        return whole[start - kept.start : end - kept.start]

    def _add(self, sequence: TokenSequence, start: int, rows: Tensor, most: int) -> int:
        """Keep rows from the token `start` on. Return the index of the first kept token.

        most: most rows that are kept of the sequence.
        """
        kept = self._kept.get(sequence)
        if kept is None or not kept.start <= start <= kept.start + kept.count:
            kept = self._kept[sequence] = _Rows(start)
        kept.cut_end(start)
        kept.parts.append(rows)
        kept.count += rows.shape[0]
        if kept.count > most:
            kept.cut_start(start + rows.shape[0] - most)
        return kept.start


def _newest(sequence: TokenSequence) -> int:
    """Return the index of the newest token, which may be in flight."""
    return sequence.length + sequence.in_flight - 1
