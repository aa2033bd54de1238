"""Runs a step plan through the decoder."""

import numpy as np
import torch
from torch import Tensor

from services.engine.attention import KVCache
from services.engine.batch import StepBatch
from services.engine.model.decoder import Decoder
from services.engine.scheduler import StepPlan

__all__ = ["ModelRunner"]


class ModelRunner:
    """Turns plans into flat batches, and batches into hidden states and logits."""

    def __init__(self, decoder: Decoder, cache: KVCache) -> None:
        self._decoder = decoder
        self._cache = cache
        self._tables = _BlockTables()

    def forward(self, plan: StepPlan) -> Tensor:
        """Compute the plan. Returns hidden states [tokens, hidden], in the order of the plan.

        Valid until the next call.
        """
        return self._decoder.forward(self._batch(plan), self._cache)

    def logits(self, hidden: Tensor, rows: list[int]) -> Tensor:
        """float32 [len(rows), vocabulary] of some rows of `forward`'s result, in rising order."""
        if rows[-1] == len(rows) - 1:
            return self._decoder.logits(hidden[: len(rows)])
        index = torch.tensor(rows, dtype=torch.int64, device=hidden.device)
        return self._decoder.logits(hidden.index_select(0, index))

    def _batch(self, plan: StepPlan) -> StepBatch:
        decodes, chunks = plan.decodes, plan.chunks
        counts = [1] * len(decodes) + [chunk.count for chunk in chunks]
        ends = [sequence.length for sequence in decodes] + [chunk.end for chunk in chunks]
        starts = np.zeros(len(counts) + 1, dtype=np.int32)
        np.cumsum(counts, out=starts[1:])
        contexts = np.array(ends, dtype=np.int32)
        ids = np.empty(starts[-1], dtype=np.int64)
        ids[: len(decodes)] = [sequence.newest for sequence in decodes]
        for start, chunk in zip(starts[len(decodes) :].tolist(), chunks, strict=False):
            known = chunk.count - len(chunk.draft)
            ids[start : start + known] = chunk.sequence.tokens[chunk.start : chunk.start + known]
            ids[start + known : start + chunk.count] = chunk.draft
        tables = self._tables.of([s.blocks for s in decodes] + [c.sequence.blocks for c in chunks])
        owners = np.arange(len(counts))
        positions = contexts.astype(np.int64) - 1
        if chunks:
            owners = np.repeat(owners, counts)
            positions = np.arange(starts[-1]) + (contexts - starts[1:])[owners]
        blocks, offsets = np.divmod(positions, self._cache.block_size)
        slots = tables[owners, blocks].astype(np.int64) * self._cache.block_size + offsets
        device = self._decoder.device

        def tensor(array: "np.ndarray[tuple[int, ...], np.dtype[np.integer]]") -> Tensor:
            return torch.from_numpy(array).to(device)

        return StepBatch(
            token_ids=tensor(ids),
            positions=tensor(positions),
            slots=tensor(slots),
            query_starts=tensor(starts),
            context_lengths=tensor(contexts),
            block_tables=tensor(tables),
            num_decodes=len(decodes),
            query_lengths_host=tuple(counts),
            context_lengths_host=tuple(ends),
        )


class _BlockTables:
    """The block table of a step, kept from step to step: few sequences get a block in each."""

    def __init__(self) -> None:
        self._table = np.zeros((0, 0), dtype=np.int32)
        self._filled: list[tuple[list[int], int]] = []
        """By row, the blocks that it holds, and how many they were: a sequence's list only grows"""

    def of(self, tables: list[list[int]]) -> "np.ndarray[tuple[int, int], np.dtype[np.int32]]":
        """int32 [len(tables), widest], a view that is valid until the next call.

        Behind a sequence's blocks is what an earlier step left there.
        """
        widest = max(map(len, tables))
        rows, columns = self._table.shape
        if len(tables) > rows or widest > columns:
            rows, columns = max(rows, 2 * len(tables)), max(columns, 2 * widest)
            self._table = np.zeros((rows, columns), dtype=np.int32)
            self._filled = [([], 0)] * rows
        for row, blocks in enumerate(tables):
            held, count = self._filled[row]
            if held is not blocks or count != len(blocks):
                start = count if held is blocks else 0
                self._table[row, start : len(blocks)] = blocks[start:]
                self._filled[row] = (blocks, len(blocks))
        return self._table[: len(tables), :widest]
