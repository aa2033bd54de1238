"""Draft tokens of a head, which reads hidden states of the engine's model."""

import time
from collections.abc import Callable, Collection, Mapping, Sequence

import torch
from torch import Tensor

from services.engine.batch.buckets import row_bucket
from services.engine.batch.step_batch import StepBatch
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
    ) -> None:
        """targets: id of the engine's model for each id of the head; empty = the same ids.

        most_kept: most rows of hidden states that are kept.
        """
        super().__init__(head, cache, vocabulary_size, pass_tokens, clock, host_clock)
        self._first_graphs: StepGraphs | None = None
        """Graphs of passes that read hidden states of the engine's model"""
        self._states = torch.zeros(0, head.states_width, dtype=head.dtype, device=head.device)
        """Hidden states of the engine's model that the next pass reads"""
        self._reserved_states = self._states
        """Memory of those that graphs read"""
        self._own_states = torch.zeros(0, head.own_width, dtype=head.dtype, device=head.device)
        """Hidden states that the head has made, which the next pass reads"""
        self.limits = DraftLimits(
            head.spec.context_length, pass_tokens, kind, layers=head.draft_layers
        )
        self._head = head
        self._most_id = vocabulary_size - 1
        behind = [*targets, -1] if targets else []  # an index of -1 names the last one
        self._targets = torch.tensor(behind, dtype=torch.int64, device=head.device)
        """Id of the engine's model for each id of the head, and -1 for -1; empty = the same ids"""
        self._kept = KeptStates(most_kept)

    def reserve(self, capacity: StepCapacity, num_blocks: int) -> None:
        super().reserve(capacity, num_blocks)
        self._first_graphs = self._make_graphs(is_first=True)
        rows = row_bucket(capacity.sequences)
        self._reserve_states(max([rows, *(size.tokens for size in self._sizes)]))
        self._own_states = self._own_states.new_zeros(rows, self._head.own_width)

    def _reserve_states(self, rows: int) -> None:
        """Allocate the hidden states of the engine's model that graphs read."""
        self._reserved_states = self._states.new_zeros(rows, self._head.states_width)
        self._states = self._reserved_states

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
        if len(self._states) <= len(self._reserved_states):
            self._reserved_states[: len(self._states)] = self._states
            self._states = self._reserved_states

    def _compute(self, batch: StepBatch, *, is_first: bool) -> Tensor:
        states = (self._states if is_first else self._own_states)[: len(batch.token_ids)]
        return self._head.run(batch, self._cache, states, is_own=not is_first)

    @torch.inference_mode()
    def _capture(self, rows: int, width: int) -> None:
        super()._capture(rows, width)
        assert self._first_graphs is not None
        self._first_graphs.capture(self._build_padding(rows, width))

    def _graphs_of(self, *, is_first: bool) -> StepGraphs | None:
        return self._first_graphs if is_first else self._graphs

    def _keep_own(self, hidden: Tensor) -> None:
        following = self._head.following_states(hidden)
        if self._graphs is None:
            self._own_states = following
        else:
            self._own_states[: len(following)] = following

    def _draw(self, hidden: Tensor) -> Tensor:
        ids = super()._draw(hidden)
        return self._targets[ids] if self._targets.shape[0] else ids
