"""Tokens that a device has drawn and that are still being copied to the host."""

from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor

from services.engine.batch.transfer import HostCopy, rows_of
from services.engine.messages import Score
from services.engine.sampling.row import NOTHING_ALLOWED, Row
from services.engine.sampling.sampler import Drawn, mark_nan, try_sample
from services.engine.sampling.score import PendingScores, score

__all__ = ["ArrivedTokens", "PendingTokens"]


class ArrivedTokens(NamedTuple):
    """Tokens on the host, one per row."""

    provisional: list[int]
    """Ids that the device drew; -1 for a row of NaN"""
    final: list[int]
    """Drawn ids; negative if no id is valid: the logits are NaN, or the limits allow no id"""
    scores: dict[int, Score]
    """Requested scores of the final tokens, by row"""


class PendingTokens:
    """One token per row, usable on the device before it reaches the host.

    A few draws need more candidates than the device examines. For these rows, the device's token is
    provisional: the host draws again, and results that the device computed from a wrong token are
    discarded.
    """

    def __init__(
        self, logits: Tensor, rows: Sequence[Row] | None, widths: Sequence[int | None] = ()
    ) -> None:
        """logits: float32 [rows, vocabulary], which may change after the call. rows: None = plain
        greedy. widths: candidates in each row's score, None = no score; () = no scores."""
        self._drawn = try_sample(logits, rows)
        self._exhausted = [i for i, row in enumerate(rows or ()) if row.allows_nothing]
        self._scored = [
            _ScoredRows(logits, self._drawn, [i for i, w in enumerate(widths) if w == width], width)
            for width in sorted({width for width in widths if width is not None})
        ]
        self._copy = HostCopy(mark_nan(logits, self.on_device))

    @property
    def on_device(self) -> Tensor:
        """Ids on the device: int64 [rows], valid even in rows of NaN."""
        return self._drawn.ids

    def wait(self) -> ArrivedTokens:
        """Wait for the device, and update the mirostat states of the rows. Call it once."""
        provisional: list[int] = self._copy.wait().tolist()
        final = list(provisional)
        for restricted in self._drawn.restricted:
            for i, token in restricted.repeat_unsettled():
                final[i] = token if provisional[i] >= 0 else provisional[i]
        for mirostat in self._drawn.mirostat:
            mirostat.observe()
        for i in self._exhausted:
            final[i] = NOTHING_ALLOWED
        scores: dict[int, Score] = {}
        for scored in self._scored:
            scores |= scored.wait(provisional, final)
        return ArrivedTokens(provisional, final, scores)


class _ScoredRows:
    """Scores of the rows with the same number of candidates."""

    def __init__(self, logits: Tensor, drawn: Drawn, rows: Sequence[int], width: int) -> None:
        part = rows_of(logits, rows)
        self._rows = rows
        self._width = width
        self._scores = PendingScores(part, rows_of(drawn.ids, rows), width)
        self._logits = part.clone() if drawn.restricted else None
        """Logits of the rows, for the scores of tokens that are drawn again"""

    def wait(self, provisional: Sequence[int], final: Sequence[int]) -> dict[int, Score]:
        """Wait for the device. Return the scores of the valid final tokens, by row."""
        scores = dict(zip(self._rows, self._scores.wait(), strict=True))
        for place, row in enumerate(self._rows):
            if self._logits is not None and final[row] not in (provisional[row], NOTHING_ALLOWED):
                part = self._logits[place : place + 1]
                [scores[row]] = score(part, [final[row]], self._width)
        return scores
