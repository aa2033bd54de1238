"""Draft tokens of a head that has a layer of its own for each of them."""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from services.engine.batch.transfer import Mark
from services.engine.execution.head_drafts import HeadDrafts
from services.engine.model.layered_head import LayeredHead
from services.engine.scheduling.draft_plan import DraftPart, DraftResult, PassTime

__all__ = ["LayeredDrafts"]


class LayeredDrafts(HeadDrafts):
    """A `LayeredHead` that makes draft tokens, its pages, and the hidden states it reads.

    All layers compute the same rows, one layer after another: the rows of new tokens, and the last
    rows of the pass before. In the pass before, the deeper layers read draft tokens or zeros in
    those rows, because the tokens were not known yet.
    """

    _head: LayeredHead

    @torch.inference_mode()
    def make(self, parts: Sequence[DraftPart]) -> DraftResult:
        if not parts:
            return DraftResult([], [])
        began, depth = self._clock(), self.limits.layers
        made: list[list[int]] = [[] for _ in parts]
        starts = [part.start - self._rows_before for part in parts]
        counts = [part.count for part in parts]
        states = self._states_of(parts, starts)
        growing = [i for i, part in enumerate(parts) if part.length]
        for number in range(depth):
            ids = [
                _read_ids(part, number, drafted) for part, drafted in zip(parts, made, strict=True)
            ]
            batch = self._lay_out(ids, starts, parts)
            hidden, states = self._head.run_layer(number, batch, self._cache, states)
            drawn = self._most_likely(hidden, growing) if growing else []
            for i, token in zip(growing, drawn, strict=True):
                if 0 <= token < self._vocabulary_size:
                    made[i].append(token)
            growing = [i for i in growing if number < len(made[i]) < parts[i].length]
        Mark(hidden.device).wait()  # so that the time of the pass is known
        return DraftResult(made, [PassTime(sum(counts), self._clock() - began)])

    def _states_of(self, parts: Sequence[DraftPart], starts: Sequence[int]) -> Tensor:
        """Return the hidden states of the engine's model that the parts read.

        starts: index of each part's first row.
        """
        rows = [
            self._kept.rows(part.sequence, start, part.end - 1)
            for part, start in zip(parts, starts, strict=True)
        ]
        return rows[0] if len(rows) == 1 else torch.cat(rows)


def _read_ids(
    part: DraftPart, number: int, drafted: Sequence[int]
) -> np.ndarray[tuple[int], np.dtype[np.int32]]:
    """Return the token that each row of a layer reads: a known one, a draft token, or 0.

    A row that reads a 0 makes no draft token, and the next pass computes it again.
    """
    known = part.sequence.tokens[part.start + number : part.end + number]
    missing = part.count - len(known)
    behind = np.zeros(missing, dtype=np.int32)
    used = drafted[max(number - missing, 0) : number]
    behind[: len(used)] = used
    return np.concatenate([known, behind])
