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

    def forward(self, plan: StepPlan) -> Tensor:
        """Compute every chunk. Returns hidden states [tokens, hidden], in the order of the chunks.

        Valid until the next call.
        """
        return self._decoder.forward(self._batch(plan), self._cache)

    def logits(self, hidden: Tensor, rows: list[int]) -> Tensor:
        """float32 [len(rows), vocabulary] of some rows of `forward`'s result."""
        index = torch.tensor(rows, dtype=torch.int64, device=hidden.device)
        return self._decoder.logits(hidden.index_select(0, index))

    def _batch(self, plan: StepPlan) -> StepBatch:
        chunks = plan.chunks
        counts = np.array([chunk.count for chunk in chunks], dtype=np.int32)
        starts = np.zeros(len(chunks) + 1, dtype=np.int32)
        np.cumsum(counts, out=starts[1:])
        ends = np.array([chunk.end for chunk in chunks], dtype=np.int32)
        widest = max(len(chunk.sequence.blocks) for chunk in chunks)
        tables = np.zeros((len(chunks), widest), dtype=np.int32)
        ids = np.empty(starts[-1], dtype=np.int64)
        for i, chunk in enumerate(chunks):
            sequence = chunk.sequence
            tables[i, : len(sequence.blocks)] = sequence.blocks
            known = sequence.tokens[chunk.start : chunk.end - len(chunk.draft)]
            ids[starts[i] : starts[i] + len(known)] = known
            if chunk.draft:
                ids[starts[i] + len(known) : starts[i + 1]] = chunk.draft
        owners = np.repeat(np.arange(len(chunks)), counts)
        positions = np.arange(starts[-1], dtype=np.int64) + (ends - starts[1:])[owners]
        size = self._cache.block_size
        slots = tables[owners, positions // size].astype(np.int64) * size + positions % size
        device = self._decoder.device

        def tensor(array: "np.ndarray[tuple[int, ...], np.dtype[np.integer]]") -> Tensor:
            return torch.from_numpy(array).to(device)

        return StepBatch(
            token_ids=tensor(ids),
            positions=tensor(positions),
            slots=tensor(slots),
            query_starts=tensor(starts),
            context_lengths=tensor(ends),
            block_tables=tensor(tables),
            num_decodes=plan.num_decodes,
            logit_rows=tensor(starts[1:].astype(np.int64) - 1),
            query_lengths_host=tuple(counts.tolist()),
            context_lengths_host=tuple(ends.tolist()),
        )
