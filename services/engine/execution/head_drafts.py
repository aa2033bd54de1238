"""Draft tokens of a head, which reads hidden states of the engine's model."""

import time
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import TypeVar

import torch
from torch import Tensor

from services.engine.batch.buckets import row_bucket
from services.engine.batch.step_batch import StepBatch
from services.engine.batch.transfer import to_device
from services.engine.execution.draft_model import DraftModel
from services.engine.execution.kept_states import KeptStates
from services.engine.execution.model_runner import StepCapacity
from services.engine.execution.step_graphs import StepGraphs
from services.engine.model.attention import KVCache
from services.engine.model.draft_head import DraftHead
from services.engine.scheduling.draft_plan import DraftLimits, DraftPart
from services.engine.scheduling.sequence import TokenSequence
from services.engine.scheduling.speculation import DraftKind
from services.engine.scheduling.step_plan import StepPlan

__all__ = ["HeadDrafts"]

T = TypeVar("T")


class HeadDrafts(DraftModel):
    """A head that makes draft tokens, its pages of one layer, and the hidden states it reads.

    The row of a token has the hidden states of this token and the embedding of the next one. So
    the page of a token is written once the next token is known.
    """

    _rows_before = 1

    def __init__(
        self,
        head: DraftHead,
        cache: KVCache,
        vocabulary_size: int,
        pass_tokens: int,
        kind: DraftKind,
        targets: Sequence[int] = (),
        most_kept: int = 4096,
        clock: Callable[[], float] = time.monotonic,
        host_clock: Callable[[], float] = time.monotonic,
        capacity: StepCapacity | None = None,
    ) -> None:
        """targets: id of the engine's model for each id of the head; empty = the same ids.

        most_kept: most rows of hidden states that are kept. capacity: parameter of `DraftModel`.
        """
        super().__init__(head, cache, vocabulary_size, pass_tokens, clock, host_clock, capacity)
        rows = 0 if capacity is None else row_bucket(capacity.sequences)
        self._first_graphs = None if capacity is None else StepGraphs(head, cache)
        """Graphs of passes that read hidden states of the engine's model"""
        self._graph_states = {
            is_own: torch.zeros(rows, width, dtype=head.dtype, device=head.device)
            for is_own, width in ((False, head.states_width), (True, head.own_width))
        }
        """Hidden states that graphs read, by whether the head has made them"""
        self.limits = DraftLimits(
            head.spec.context_length, pass_tokens, kind, layers=head.draft_layers
        )
        self._head = head
        self._most_id = vocabulary_size - 1
        self._targets = targets
        self._kept = KeptStates(most_kept)
        self._states: Tensor | None = None
        """Hidden states that the next pass reads; None = there was no pass"""
        self._is_own = False
        """True if the head has made these states"""

    def keep(
        self,
        plan: StepPlan,
        tapped: Sequence[Tensor],
        wanted: Collection[TokenSequence] | None = None,
    ) -> Mapping[TokenSequence, int]:
        """Keep hidden states of a step, as `KeptStates.keep` does."""
        return self._kept.keep(plan, tapped, wanted)

    def _begin(self, parts: Sequence[DraftPart]) -> None:
        rows = [self._kept.rows(each.sequence, each.start - 1, each.end - 1) for each in parts]
        self._states = rows[0] if len(rows) == 1 else torch.cat(rows)
        self._is_own = False

    def _compute(self, batch: StepBatch) -> Tensor:
        assert self._states is not None
        return self._head.run(batch, self._cache, self._states, is_own=self._is_own)

    @property
    def _present_graphs(self) -> StepGraphs | None:
        return self._graphs if self._is_own else self._first_graphs

    def _capture(self, batch: StepBatch) -> None:
        for self._is_own in (False, True):
            assert self._present_graphs is not None
            self._run_padded(self._present_graphs.capture, batch)

    def _run_padded(self, run: Callable[[StepBatch], T], batch: StepBatch) -> T:
        states = self._graph_states[self._is_own][: len(batch.token_ids)]
        if self._states is not None:
            states[: len(self._states)] = self._states
        with self._head.reading(states, is_own=self._is_own):
            return run(batch)

    def _follow(self, hidden: Tensor, rows: Sequence[int]) -> None:
        index = to_device(torch.tensor(rows, dtype=torch.int64), hidden.device)
        self._states = self._head.following_states(hidden[index])
        self._is_own = True

    def _most_likely(self, hidden: Tensor, rows: list[int]) -> list[int]:
        ids = super()._most_likely(hidden, rows)
        if not self._targets:
            return ids
        return [self._targets[token] if token >= 0 else token for token in ids]
