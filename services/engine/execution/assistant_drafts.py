"""Draft tokens of an assistant, which reads the pages of the engine's model."""

import time
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import torch

from services.engine.batch.buckets import MixedSize
from services.engine.batch.staging import Staging
from services.engine.batch.step_batch import StepBatch
from services.engine.execution.draft_model import Ids, Place
from services.engine.execution.head_drafts import HeadDrafts
from services.engine.model.assistant_head import AssistantHead
from services.engine.model.attention import KVCache
from services.engine.scheduling.draft_plan import DraftPart
from services.engine.scheduling.speculation import DraftKind

__all__ = ["LEAST_KEPT", "AssistantDrafts"]

LEAST_KEPT = 32
"""Rows of hidden states that are kept of a sequence; an assistant reads the newest alone"""
_FIRST_BLOCK = [0]
"""Table of a padded row"""


class AssistantDrafts(HeadDrafts):
    """An assistant that makes draft tokens from the keys and values of the tokens before."""

    def __init__(
        self,
        head: AssistantHead,
        cache: KVCache,
        vocabulary_size: int,
        pass_tokens: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """cache: that of the engine's model."""
        own = head.pages_of(cache)
        kind, clocks = DraftKind.MODEL, (clock, time.monotonic)
        super().__init__(head, own, vocabulary_size, pass_tokens, kind, (), LEAST_KEPT, *clocks)
        self.limits = replace(self.limits, shares_pages=True)
        self._staging = Staging(head.device, len(cache.groups))

    @torch.inference_mode()
    def warm_up(self) -> None:
        tables = [[0]] * len(self._cache.groups)
        batch = self._batch([np.zeros(1, dtype=np.int32)], [1], tables)
        states = torch.zeros(
            1, self._head.states_width, dtype=self._head.dtype, device=self._head.device
        )
        hidden = self._head.run(batch, self._cache, states, is_own=False)
        self._draw(hidden)
        self._head.following_states(hidden)
        for capture in self.captures:
            capture()

    def _chunk_sizes(self, tokens: int, rows: int, blocks: int) -> Sequence[MixedSize]:
        """Return none: each pass computes the newest token of each sequence alone."""
        return ()

    def _lay_out(
        self,
        ids: Sequence[Ids],
        parts: Sequence[DraftPart],
        number: int,
        padding: int = 0,
        size: MixedSize | None = None,
    ) -> StepBatch:
        tables = [table.blocks for part in parts for table in part.sequence.tables]
        contexts = [self._place(part, number).context for part in parts]
        return self._batch(ids, contexts, tables, padding=padding)

    def _place(self, part: DraftPart, number: int) -> Place:
        """Return the place of the newest token, which all its draft tokens have."""
        return Place(part.end - 1, 0, part.end - 1)

    def _build_padding(self, rows: int, least_blocks: int) -> StepBatch:
        return self._batch([], [], [], padding=rows, least_blocks=least_blocks)

    def _batch(
        self,
        ids: Sequence[Ids],
        contexts: Sequence[int],
        tables: Sequence[list[int]],
        *,
        padding: int = 0,
        least_blocks: int = 1,
    ) -> StepBatch:
        """Return a batch of one row for each sequence, at the position behind its context.

        contexts: number of tokens that each row sees. tables, least_blocks: as in
        `Staging.lay_out`. padding: number of rows to add, which read one token and write nothing.
        """
        tables = [*tables, *[_FIRST_BLOCK] * (padding * len(self._cache.groups))]
        contexts = [*contexts, *[1] * padding]
        count = len(contexts)
        fields = self._staging.lay_out(count, tables, least_blocks)
        known = np.concatenate([*ids, np.zeros(padding, dtype=np.int32)])
        np.minimum(known, self._most_id, out=fields.token_ids)
        fields.query_starts[:] = np.arange(count + 1)
        fields.context_lengths[:] = contexts
        fields.positions[:] = contexts
        fields.slots[:] = 0
        staged = self._staging.send()
        slots, tables_of_groups = staged.slots.unbind(), staged.block_tables.unbind(1)
        batch = StepBatch(
            token_ids=staged.token_ids,
            positions=staged.positions,
            slots=slots[0],
            query_starts=staged.query_starts,
            context_lengths=staged.context_lengths,
            block_tables=tables_of_groups[0],
            num_decodes=count,
            query_lengths_host=(1,) * count,
            context_lengths_host=tuple(contexts),
        )
        return batch.with_groups(slots[1:], tables_of_groups[1:])
