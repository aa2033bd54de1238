"""Runs a step plan through the decoder."""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from services.engine.batch.buckets import row_bucket
from services.engine.batch.staging import Staging
from services.engine.batch.step_batch import Kept, StepBatch
from services.engine.batch.transfer import to_device
from services.engine.execution.decode_graphs import DecodeGraphs
from services.engine.model.attention import KVCache
from services.engine.model.decoder import Decoder
from services.engine.scheduling.scheduler import StepPlan
from services.engine.scheduling.sequence import Sequence

__all__ = ["SCORED_ROWS", "Drawn", "ModelRunner", "StepRoom", "most_logits"]

SCORED_ROWS = 256
"""Prompt rows whose logits exist at once"""


def most_logits(max_running: int) -> int:
    """Rows whose logits a step needs memory for: those of streams, or of a prompt's pieces."""
    return max(max_running, SCORED_ROWS)


@dataclass(frozen=True, slots=True)
class Drawn:
    """Newest tokens that are still on the device."""

    ids: Tensor
    """int64 [rows]"""
    places: Mapping[Sequence, int]
    """Where each sequence's newest token lies in `ids`"""


@dataclass(frozen=True, slots=True)
class StepRoom:
    """The most that one step can hold."""

    tokens: int
    sequences: int
    blocks: int
    """Of one sequence"""


class ModelRunner:
    """Turns plans into flat batches, and batches into hidden states and logits."""

    def __init__(
        self, decoder: Decoder, cache: KVCache, graphs_for: StepRoom | None = None
    ) -> None:
        """graphs_for: on a GPU, run decode steps as graphs, where no step is larger than that.

        Rows are then padded, and the last block of the cache is what padding writes to.
        """
        self._decoder = decoder
        self._cache = cache
        self._staging = Staging(decoder.device)
        self._spare = [cache.num_blocks - 1]
        self._graphs: DecodeGraphs | None = None
        self.device = decoder.device
        if graphs_for is not None:
            rows = row_bucket(graphs_for.sequences)
            self._staging.reserve(max(graphs_for.tokens, rows), rows, graphs_for.blocks)
            decoder.reserve(max(graphs_for.tokens, rows), rows)
            self._graphs = DecodeGraphs(decoder, cache)

    def forward(self, plan: StepPlan, drawn: Drawn | None = None) -> Tensor:
        """Compute the plan. Returns hidden states [rows, hidden], in the order of the plan: a row
        for each decode, and so many for each chunk as it keeps.

        Valid until the next call. `drawn`: of sequences with a token in flight, that token.
        """
        if self._graphs is None or plan.chunks:
            return self._decoder.forward(self._batch(plan, drawn), self._cache)
        padding = row_bucket(len(plan.decodes)) - len(plan.decodes)
        return self._graphs.run(self._batch(plan, drawn, padding))

    def logits(self, hidden: Tensor, rows: list[int]) -> Tensor:
        """float32 [len(rows), vocabulary] of some rows of `forward`'s result, in rising order.

        Valid until the next call.
        """
        return self._decoder.logits(_rows_of(hidden, rows))

    @property
    def finds_most_likely(self) -> bool:
        """Whether it has `most_likely`."""
        return self._decoder.has_argmax

    def most_likely(self, hidden: Tensor, rows: list[int]) -> list[int]:
        """The ids whose `logits` are highest, the first of equals; -1 where they are NaN."""
        ids: list[int] = self._decoder.argmax(_rows_of(hidden, rows)).tolist()
        return ids

    def wait(self) -> None:
        """Return when everything launched so far has run."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def _batch(self, plan: StepPlan, drawn: Drawn | None, padding: int = 0) -> StepBatch:
        """The plan's batch; `padding`: rows to add to a plan without chunks."""
        decodes, chunks = plan.decodes, plan.chunks
        # a padded row is a sequence of one token, in a block that is nobody's
        counts = [1] * (len(decodes) + padding) + [chunk.count for chunk in chunks]
        ends = [s.length + s.in_flight for s in decodes] + [chunk.end for chunk in chunks]
        ends += [1] * padding
        tables = [s.blocks for s in decodes] + [chunk.sequence.blocks for chunk in chunks]
        tables += [self._spare] * padding
        fields = self._staging.lay_out(sum(counts), tables)
        starts, contexts, ids = fields.query_starts, fields.context_lengths, fields.token_ids
        starts[0] = 0
        np.cumsum(counts, out=starts[1:])
        contexts[:] = ends
        ids[: len(decodes)] = [sequence.newest for sequence in decodes]
        ids[len(ids) - padding :] = 0
        for start, chunk in zip(starts[len(decodes) :].tolist(), chunks, strict=False):
            known = chunk.count - len(chunk.draft)
            ids[start : start + known] = chunk.sequence.tokens[chunk.start : chunk.start + known]
            ids[start + known : start + chunk.count] = chunk.draft
        owners = np.arange(len(counts))
        positions = fields.positions
        if chunks:
            owners = np.repeat(owners, counts)
            np.add(np.arange(len(ids)), (contexts - starts[1:])[owners], out=positions)
        else:
            np.subtract(contexts, 1, out=positions)
        blocks, offsets = np.divmod(positions, self._cache.block_size)
        slots = fields.block_tables[owners, blocks].astype(np.int64) * self._cache.block_size
        np.add(slots, offsets, out=fields.slots)
        if drawn is not None:
            fields.sources[: len(decodes)] = [
                drawn.places.get(s, -1) if s.in_flight else -1 for s in decodes
            ]
        kept_counts = [1] * (len(decodes) + padding) + [chunk.kept for chunk in chunks]
        if keeps_some := kept_counts != counts:
            kept_starts = fields.kept_starts
            kept_starts[0] = 0
            np.cumsum(kept_counts, out=kept_starts[1:])
            # each row is as far from the end of its sequence's as among those that are kept
            shifts = np.repeat(starts[1:] - kept_starts[1:], kept_counts)
            np.add(np.arange(len(shifts)), shifts, out=fields.kept[: len(shifts)])
        staged = self._staging.send()
        if drawn is not None:
            _take(staged.token_ids[: len(decodes)], staged.sources[: len(decodes)], drawn.ids)
        kept = None
        if keeps_some:
            rows = staged.kept[: sum(kept_counts)]
            kept = Kept(rows, staged.kept_starts, tuple(kept_counts))
        return StepBatch(
            token_ids=staged.token_ids,
            positions=staged.positions,
            slots=staged.slots,
            query_starts=staged.query_starts,
            context_lengths=staged.context_lengths,
            block_tables=staged.block_tables,
            num_decodes=len(decodes) + padding,
            query_lengths_host=tuple(counts),
            context_lengths_host=tuple(ends),
            kept=kept,
        )


def _rows_of(hidden: Tensor, rows: list[int]) -> Tensor:
    if rows[-1] == len(rows) - 1:
        return hidden[: len(rows)]
    index = to_device(torch.tensor(rows, dtype=torch.int64), hidden.device)
    return hidden.index_select(0, index)


def _take(token_ids: Tensor, sources: Tensor, drawn: Tensor) -> None:
    """Put what was drawn where a source is named. All int64; the first two [rows]."""
    token_ids.copy_(torch.where(sources < 0, token_ids, drawn[sources.clamp(min=0)]))
