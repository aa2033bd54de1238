"""Draft model, which makes draft tokens one after another for several sequences at once.

Leviathan, Kalman, Matias, "Fast inference from transformers via speculative decoding" (2023). Here
the draft tokens are the most likely ones, and a draft token is accepted if it is the token that
would have been drawn anyway.
"""

import time
from collections.abc import Callable, Sequence
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor

from services.engine.batch.buckets import decode_sizes, row_bucket
from services.engine.batch.staging import Staging
from services.engine.batch.step_batch import OutputRows, StepBatch
from services.engine.batch.transfer import Mark, to_device
from services.engine.execution.first_steps import run_first_steps
from services.engine.execution.model_runner import StepCapacity
from services.engine.execution.step_graphs import StepGraphs
from services.engine.model.attention import KVCache
from services.engine.model.model import Model
from services.engine.scheduling.draft_plan import DraftLimits, DraftPart, DraftResult, PassTime

__all__ = ["DraftModel"]

T = TypeVar("T")


class DraftModel:
    """A model that makes draft tokens, and its pages.

    The pages have a block for each block of the first cache group of the engine's model, with the
    same number, so that the block tables of sequences serve both.
    """

    _rows_before = 0
    """Number of tokens between the token of a row and the one whose id the row reads"""

    def __init__(
        self,
        decoder: Model,
        cache: KVCache,
        vocabulary_size: int,
        pass_tokens: int,
        clock: Callable[[], float] = time.monotonic,
        host_clock: Callable[[], float] = time.monotonic,
        capacity: StepCapacity | None = None,
    ) -> None:
        """vocabulary_size: number of ids of the engine's model. pass_tokens: most tokens of a pass.

        clock, host_clock: return seconds; they time passes and what the host does around them.
        capacity: size of the largest pass if passes over one token of each sequence are padded, and
        run as CUDA graphs on a GPU; None = they are not. Padding writes to the last block of the
        cache.

        The ids of both models mean the same, as far as both have them.
        """
        self._decoder = decoder
        self._cache = cache
        self._vocabulary_size = vocabulary_size
        self._most_id = decoder.spec.vocab_size - 1
        """Largest id with an embedding"""
        self._clock = clock
        self.host_clock = host_clock
        self._staging = Staging(decoder.device)
        self._graphs: StepGraphs | None = None
        self._spare = [cache.num_blocks - 1]
        """Block that padded rows write to"""
        self.graph_sizes: Sequence[tuple[int, int]] = ()
        """Rows and table widths of padded passes, largest first"""
        self.limits = DraftLimits(decoder.spec.context_length, pass_tokens)
        if capacity is not None:
            rows = row_bucket(capacity.sequences)
            tokens = max(capacity.tokens, rows)
            self._staging.reserve(tokens, rows, capacity.blocks)
            decoder.reserve(tokens, rows)
            self._graphs = StepGraphs(decoder, cache)
            sequences, blocks = capacity.sequences, capacity.blocks
            self.graph_sizes = decode_sizes(sequences, blocks, cache.num_blocks)

    def warm_up(self) -> None:
        """Run the first passes, which take longer than later ones, and capture all graphs."""
        run_first_steps(self._decoder, self._cache)
        self.capture(self.graph_sizes)

    @torch.inference_mode()
    def capture(self, sizes: Sequence[tuple[int, int]]) -> None:
        """Capture the graphs of padded passes, of some of `graph_sizes`."""
        assert self._graphs is not None or not sizes
        for rows, width in sizes:
            self._capture(self._build_padding(rows, width))

    def _capture(self, batch: StepBatch) -> None:
        """Capture all graphs of a padded batch's size."""
        assert self._graphs is not None
        self._graphs.capture(batch)

    def _build_padding(self, rows: int, least_blocks: int) -> StepBatch:
        """Return a batch of padded rows alone. least_blocks: parameter of `Staging.lay_out`."""
        return self._build([], [], [], [], padding=rows, least_blocks=least_blocks)

    @torch.inference_mode()
    def make(self, parts: Sequence[DraftPart]) -> DraftResult:
        """Compute the parts, and make their draft tokens.

        A part gets fewer tokens than planned if the next one is no id of the engine's model.
        """
        order = sorted(range(len(parts)), key=lambda i: parts[i].count > 1)
        made: list[list[int]] = [[] for _ in parts]
        passes: list[PassTime] = []
        growing = order
        before = self._rows_before
        starts = [parts[i].start - before for i in order]
        self._begin([parts[i] for i in order])
        ids = [parts[i].sequence.tokens[parts[i].start : parts[i].end] for i in order]
        while growing:
            began = self._clock()
            hidden = self._forward(ids, starts, [parts[i] for i in growing])
            rows = [row for row, i in enumerate(growing) if parts[i].length]
            drawn = self._most_likely(hidden, rows)
            passes.append(PassTime(sum(map(len, ids)), self._clock() - began))
            going: list[int] = []
            for row, token in zip(rows, drawn, strict=True):
                i = growing[row]
                if 0 <= token < self._vocabulary_size:
                    made[i].append(token)
                    if len(made[i]) < parts[i].length:
                        going.append(row)
            if going:
                self._follow(hidden, going)
            growing = [growing[row] for row in going]
            starts = [parts[i].end + len(made[i]) - 1 - before for i in growing]
            ids = [np.array(made[i][-1:], dtype=np.int32) for i in growing]
        return DraftResult(made, passes)

    def _begin(self, parts: Sequence[DraftPart]) -> None:
        """Prepare the first pass over these parts, in the order of the batch."""

    def _compute(self, batch: StepBatch) -> Tensor:
        """Compute a batch. Return hidden states as `Model.forward` does."""
        return self._decoder.forward(batch, self._cache)

    @property
    def _present_graphs(self) -> StepGraphs | None:
        """Graphs of the present pass if each sequence has one token in it; None = there are none"""
        return self._graphs

    def _run_padded(self, run: Callable[[StepBatch], T], batch: StepBatch) -> T:
        """Capture or run the graph of a padded batch, as `run` does."""
        return run(batch)

    def _follow(self, hidden: Tensor, rows: Sequence[int]) -> None:
        """Prepare the next pass, which continues some rows of `_compute`'s result."""

    def _forward(
        self,
        ids: Sequence[np.ndarray[tuple[int], np.dtype[np.int32]]],
        starts: Sequence[int],
        parts: Sequence[DraftPart],
    ) -> Tensor:
        """Compute consecutive tokens of some sequences. Return the last one's hidden states.

        ids: int32 [tokens] of each sequence, those with one token first. starts: index of each
        one's first row. parts: part of each sequence.
        """
        graphs = self._present_graphs
        if graphs is None or any(len(each) > 1 for each in ids):
            return self._compute(self._lay_out(ids, starts, parts))
        padding = row_bucket(len(ids)) - len(ids)
        return self._run_padded(graphs.run, self._lay_out(ids, starts, parts, padding))

    def _lay_out(
        self,
        ids: Sequence[np.ndarray[tuple[int], np.dtype[np.int32]]],
        starts: Sequence[int],
        parts: Sequence[DraftPart],
        padding: int = 0,
    ) -> StepBatch:
        """Return the batch of `_forward`. padding: parameter of `_build`."""
        size = self._cache.block_size
        skipped = [part.first_block * size for part in parts]
        tables = [
            part.sequence.tables[0].blocks[part.first_block :]
            if part.first_block
            else part.sequence.tables[0].blocks
            for part in parts
        ]
        ends = [
            start + len(each) - skip for start, each, skip in zip(starts, ids, skipped, strict=True)
        ]
        return self._build(ids, ends, tables, skipped, padding=padding)

    def _build(
        self,
        ids: Sequence[np.ndarray[tuple[int], np.dtype[np.int32]]],
        ends: Sequence[int],
        tables: Sequence[list[int]],
        skipped: Sequence[int],
        *,
        padding: int = 0,
        least_blocks: int = 1,
    ) -> StepBatch:
        """Return the batch of a pass.

        ends: number of tokens up to each sequence's last one. skipped: number of tokens before
        those. tables: blocks from there on. padding: number of rows to add if each sequence has one
        token. least_blocks: parameter of `Staging.lay_out`.
        """
        size = self._cache.block_size
        counts = [len(each) for each in ids] + [1] * padding
        ends, tables = [*ends, *[1] * padding], [*tables, *[self._spare] * padding]
        fields = self._staging.lay_out(sum(counts), tables, least_blocks)
        # Ids that only the engine's model has stand for parts of images, or are never drawn.
        known = np.concatenate([*ids, np.zeros(padding, dtype=np.int32)])
        np.minimum(known, self._most_id, out=fields.token_ids)
        fields.query_starts[0] = 0
        np.cumsum(counts, out=fields.query_starts[1:])
        fields.context_lengths[:] = ends
        owners = np.repeat(np.arange(len(counts)), counts)
        shifts = (fields.context_lengths - fields.query_starts[1:])[owners]
        np.add(np.arange(len(owners)), shifts, out=fields.positions)
        blocks, offsets = np.divmod(fields.positions, size)
        places = fields.block_tables[owners, 0, blocks].astype(np.int64)
        np.add(places * size, offsets, out=fields.slots[0])
        if any(skipped):
            positions = fields.positions
            np.add(positions, np.repeat([*skipped, *[0] * padding], counts), out=positions)
        num_decodes = counts.count(1)
        is_partial = num_decodes < len(counts)
        if is_partial:
            fields.output_starts[:] = np.arange(len(counts) + 1)
            fields.output_rows[: len(counts)] = fields.query_starts[1:] - 1
        staged = self._staging.send()
        outputs = None
        if is_partial:
            indices = staged.output_rows[: len(counts)]
            outputs = OutputRows(indices, staged.output_starts, (1,) * len(counts))
        return StepBatch(
            token_ids=staged.token_ids,
            positions=staged.positions,
            slots=staged.slots[0],
            query_starts=staged.query_starts,
            context_lengths=staged.context_lengths,
            block_tables=staged.block_tables[:, 0],
            num_decodes=num_decodes,
            query_lengths_host=tuple(counts),
            context_lengths_host=tuple(ends),
            output_rows=outputs,
        )

    def _most_likely(self, hidden: Tensor, rows: list[int]) -> list[int]:
        """Return the most likely id behind some rows; -1 for NaN on a CPU."""
        if not rows:
            Mark(hidden.device).wait()  # so that the time of the pass is known
            return []
        if len(rows) < len(hidden):
            hidden = hidden[to_device(torch.tensor(rows), hidden.device)]
        if self._decoder.has_argmax:
            ids: list[int] = self._decoder.argmax(hidden).tolist()
            return ids
        found: list[int] = self._decoder.logits(hidden).argmax(-1).tolist()
        return found
