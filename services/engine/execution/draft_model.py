"""Draft model, which makes draft tokens one after another for several sequences at once.

Leviathan, Kalman, Matias, "Fast inference from transformers via speculative decoding" (2023). Here
the draft tokens are the most likely ones, and a draft token is accepted if it is the token that
would have been drawn anyway.
"""

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from itertools import takewhile
from typing import NamedTuple, TypeAlias

import numpy as np
import torch
from torch import Tensor

from services.engine.batch.buckets import (
    MixedSize,
    decode_sizes,
    least_size,
    mixed_sizes,
    row_bucket,
)
from services.engine.batch.filling import fill_lengths, fill_output_rows, fill_slots
from services.engine.batch.staging import Staging
from services.engine.batch.step_batch import OutputRows, PaddedStep, StepBatch
from services.engine.batch.transfer import Laps, to_device
from services.engine.execution.first_steps import run_first_steps
from services.engine.execution.model_runner import StepCapacity
from services.engine.execution.step_graphs import StepGraphs
from services.engine.model.attention import KVCache
from services.engine.model.model import Model
from services.engine.scheduling.draft_plan import DraftLimits, DraftPart, DraftResult, PassTime

__all__ = ["MOST_GRAPH_TOKENS", "DraftModel", "Ids", "Place", "count_longer"]

MOST_GRAPH_TOKENS = 256
"""Most tokens of a pass over several tokens of each sequence with a graph; longer passes read
prompts"""

Ids: TypeAlias = np.ndarray[tuple[int], np.dtype[np.int32]]


class Place(NamedTuple):
    """Place of one row of a pass."""

    position: int
    slot: int
    context: int
    """Number of tokens that it sees"""


class DraftModel:
    """A model that makes draft tokens, and its pages.

    The pages have a block for each block of the first cache group of the engine's model, with the
    same number, so that the block tables of sequences serve both.

    A pass writes the tokens that it has drawn where the next one reads them. So the host launches
    all passes of a draft without waiting, and reads the draft tokens once.
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
    ) -> None:
        """vocabulary_size: number of ids of the engine's model. pass_tokens: most tokens of a pass.

        clock, host_clock: return seconds; they time passes and what the host does around them.

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
        """Graphs of passes over one token of each sequence"""
        self._chunk_graphs: StepGraphs | None = None
        """Graphs of passes over several tokens of each sequence"""
        self._sizes: Sequence[MixedSize] = ()
        """Sizes to which such passes are padded, largest first"""
        self._spare = [cache.num_blocks - 1]
        """Block that padded rows write to"""
        self.captures: Sequence[Callable[[], None]] = ()
        """Captures of the graphs of each size, the largest first"""
        self.limits = DraftLimits(decoder.spec.context_length, pass_tokens)

    def reserve(self, capacity: StepCapacity, num_blocks: int) -> None:
        """Pad passes, and run them as CUDA graphs on a GPU; those that read prompts stay as they
        are.

        capacity: size of the largest pass. num_blocks: most blocks of the tables of a pass, which
        bound the sizes of graphs. Padding writes to the last block of the cache.
        """
        rows = row_bucket(capacity.sequences)
        tokens = max(capacity.tokens, rows)
        self._sizes = self._chunk_sizes(min(tokens, MOST_GRAPH_TOKENS), rows, capacity.blocks)
        widest = max([capacity.blocks, *(size.width for size in self._sizes)])
        self._staging.reserve(tokens, rows, widest)
        self._decoder.reserve(tokens, rows)
        self._graphs = self._make_graphs(is_first=False)
        self._chunk_graphs = StepGraphs(self._decoder, self._cache, self._run_chunks)
        sizes = decode_sizes(capacity.sequences, capacity.blocks, num_blocks)
        chunks = [partial(self._capture_chunks, size) for size in self._sizes]
        self.captures = [*chunks, *(partial(self._capture, *size) for size in sizes)]

    def _chunk_sizes(self, tokens: int, rows: int, blocks: int) -> Sequence[MixedSize]:
        """Return the sizes of passes over several tokens of each sequence, as `mixed_sizes`."""
        return mixed_sizes(tokens, rows, blocks)

    def warm_up(self) -> None:
        """Run the first passes, which take longer than later ones, and capture all graphs."""
        run_first_steps(self._decoder, self._cache)
        for capture in self.captures:
            capture()

    @torch.inference_mode()
    def _capture(self, rows: int, width: int) -> None:
        """Capture the graphs of passes of a size. width: columns of the block tables."""
        assert self._graphs is not None
        self._graphs.capture(self._build_padding(rows, width))

    @torch.inference_mode()
    def _capture_chunks(self, size: MixedSize) -> None:
        """Capture the graph of passes over several tokens of each sequence, of a size."""
        assert self._chunk_graphs is not None
        self._chunk_graphs.capture(self._build([], [], [], [], size=size))

    def _make_graphs(self, *, is_first: bool) -> StepGraphs:
        """Return graphs of `_pass`."""
        return StepGraphs(self._decoder, self._cache, partial(self._pass, is_first=is_first))

    def _build_padding(self, rows: int, least_blocks: int) -> StepBatch:
        """Return a batch of padded rows alone. least_blocks: parameter of `Staging.lay_out`."""
        return self._build([], [], [], [], padding=rows, least_blocks=least_blocks)

    @torch.inference_mode()
    def make(self, parts: Sequence[DraftPart]) -> DraftResult:
        """Compute the parts, and make their draft tokens.

        A part gets fewer tokens than planned if the next one is no id of the engine's model.
        """
        if not parts:
            return DraftResult([], [])
        order = sorted(range(len(parts)), key=lambda i: -parts[i].length)
        placed = [parts[i] for i in order]
        laps = Laps(self._decoder.device, self._clock)
        drawn: list[Tensor] = []
        for ids in self._passes(placed):
            drawn.append(ids)
            laps.end()
        tokens = iter(torch.cat(drawn).tolist())
        made: list[list[int]] = [[] for _ in parts]
        for number, ids in enumerate(drawn):
            for i, token in zip(order[: len(ids)], tokens, strict=False):
                if len(made[i]) == number and 0 <= token < self._vocabulary_size:
                    made[i].append(token)
        counts = [sum(part.count for part in parts), *map(len, drawn[1:])]
        return DraftResult(made, list(map(PassTime, counts, laps.seconds())))

    def _passes(self, parts: Sequence[DraftPart]) -> Iterator[Tensor]:
        """Launch the passes. Yield what each has drawn for the first parts, as `_draw` does.

        parts: those with the most draft tokens come first.
        """
        self._begin(parts)
        longest = max(parts[0].length, 1)
        ids = [part.sequence.tokens[part.start : part.end] for part in parts]
        if all(part.count == 1 for part in parts):
            batch, first = self._lay_out(ids, parts, 0, self._padding(len(parts))), 0
        else:
            drawn = self._draw_behind_chunks(ids, parts)
            yield drawn[: count_longer(parts, 0)]
            parts, first = parts[: count_longer(parts, 1)], 1
            if not parts:
                return
            unknown = [np.zeros(1, dtype=np.int32)] * len(parts)
            batch = self._lay_out(unknown, parts, 1, self._padding(len(parts)))
            self._write_ids(batch, drawn[: len(parts)])
        places = self._places(parts, range(first, longest), len(batch.token_ids))
        moves = to_device(torch.tensor(places), self._decoder.device)
        for number in range(first, longest):
            going = count_longer(parts, number)
            if number > first:
                count = going if self._graphs is None else len(batch.token_ids)
                now = places[number - first][:count]
                batch = batch.first_decodes([place.context for place in now])
                _move(batch, moves[number - first, :count])
            drawn = self._run(batch, is_first=not number, is_last=number == longest - 1)
            yield drawn[:going]

    def _begin(self, parts: Sequence[DraftPart]) -> None:
        """Prepare the first pass over these parts, in the order of the batch."""

    def _draw_behind_chunks(self, ids: Sequence[Ids], parts: Sequence[DraftPart]) -> Tensor:
        """Run `_run_chunks`, as a graph if there is one for so many tokens."""
        size = self._size_of(parts)
        batch = self._lay_out(ids, parts, 0, size=size)
        if size is None or self._chunk_graphs is None:
            return self._run_chunks(batch, count_longer(parts, 0))
        return self._chunk_graphs.run(batch).clone()

    def _size_of(self, parts: Sequence[DraftPart]) -> MixedSize | None:
        """Return the size to which a pass over several tokens of each sequence is padded.

        None = it is not padded, because there is no size for so many tokens.
        """
        tokens, count = sum(part.count for part in parts), len(parts)
        blocks = max(len(each.sequence.tables[0].blocks) - each.first_block for each in parts)
        return least_size(self._sizes, tokens, count, count, blocks)

    def _run_chunks(self, batch: StepBatch, drafting: int | None = None) -> Tensor:
        """Compute several tokens of each sequence. Return the ids that are drawn, as `_draw` does.

        drafting: number of sequences for which ids are drawn, the first ones; None = all.
        """
        hidden = self._compute(batch, is_first=True)[:drafting]
        self._keep_own(hidden)
        return self._draw(hidden)

    def _run(self, batch: StepBatch, *, is_first: bool, is_last: bool) -> Tensor:
        """Run `_pass`, as a graph if there are graphs."""
        graphs = self._graphs_of(is_first=is_first)
        if graphs is None:
            return self._pass(batch, is_first=is_first, is_last=is_last)
        return graphs.run(batch).clone()

    def _graphs_of(self, *, is_first: bool) -> StepGraphs | None:
        """Return the graphs of first passes or of later ones; None = there are none."""
        return self._graphs

    def _pass(self, batch: StepBatch, *, is_first: bool, is_last: bool = False) -> Tensor:
        """Compute one token of each sequence. Return the ids that are drawn, as `_draw` does.

        Hands on to the next pass, unless this one is the last.
        """
        hidden = self._compute(batch, is_first=is_first)
        drawn = self._draw(hidden)
        if not is_last:
            self._write_ids(batch, drawn)
            self._keep_own(hidden)
        return drawn

    def _compute(self, batch: StepBatch, *, is_first: bool) -> Tensor:
        """Compute a batch. Return hidden states as `Model.forward` does."""
        return self._decoder.forward(batch, self._cache)

    def _keep_own(self, hidden: Tensor) -> None:
        """Keep of a pass's results what the next pass reads beside ids. A model reads nothing."""

    def _write_ids(self, batch: StepBatch, drawn: Tensor) -> None:
        """Write the ids that the next pass reads into its batch."""
        torch.clamp(drawn, 0, self._most_id, out=batch.token_ids[: drawn.shape[0]])

    def _places(
        self, parts: Sequence[DraftPart], numbers: Iterable[int], rows: int
    ) -> list[list[Place]]:
        """Return the places of all rows in passes over one token of each sequence.

        numbers: those of the passes. rows: number of rows, with padding.
        """
        padding = [Place(0, self._spare[0] * self._cache.block_size, 1)]
        return [
            [
                self._place(part, number) if number < max(part.length, 1) else padding[0]
                for part in parts
            ]
            + padding * (rows - len(parts))
            for number in numbers
        ]

    def _place(self, part: DraftPart, number: int) -> Place:
        """Return the place of a sequence's last token in a pass. number: that of the pass."""
        position, size = part.end - 1 - self._rows_before + number, self._cache.block_size
        block = part.sequence.tables[0].blocks[position // size]
        context = position + 1 - part.first_block * size
        return Place(position, block * size + position % size, context)

    def _padding(self, count: int) -> int:
        """Return the number of rows to add to a pass over one token of each sequence."""
        return 0 if self._graphs is None else row_bucket(count) - count

    def _lay_out(
        self,
        ids: Sequence[Ids],
        parts: Sequence[DraftPart],
        number: int,
        padding: int = 0,
        size: MixedSize | None = None,
    ) -> StepBatch:
        """Return the batch of a pass over consecutive tokens of some sequences.

        ids: int32 [tokens] of each sequence. number: number of the pass, from 0. padding, size:
        parameters of `_build`.
        """
        skipped = [part.first_block * self._cache.block_size for part in parts]
        tables = [
            part.sequence.tables[0].blocks[part.first_block :]
            if part.first_block
            else part.sequence.tables[0].blocks
            for part in parts
        ]
        ends = [self._place(part, number).context for part in parts]
        return self._build(ids, ends, tables, skipped, padding=padding, size=size)

    def _build(
        self,
        ids: Sequence[Ids],
        ends: Sequence[int],
        tables: Sequence[list[int]],
        skipped: Sequence[int],
        *,
        padding: int = 0,
        least_blocks: int = 1,
        size: MixedSize | None = None,
    ) -> StepBatch:
        """Return the batch of a pass.

        ends: number of tokens up to each sequence's last one. skipped: number of tokens before
        those. tables: blocks from there on. padding: number of rows to add if each sequence has one
        token. least_blocks: parameter of `Staging.lay_out`. size: size to which a pass over several
        tokens of each sequence is padded.
        """
        counts = [len(each) for each in ids] + [1] * padding
        ends, tables = [*ends, *[1] * padding], [*tables, *[self._spare] * padding]
        tokens = sum(counts)
        if size is not None:
            tables += [self._spare] * (size.sequences - len(counts))
            tokens, least_blocks = size.tokens, size.width
        fields = self._staging.lay_out(tokens, tables, least_blocks)
        # Ids that only the engine's model has stand for parts of images, or are never drawn.
        known = sum(map(len, ids))
        fields.token_ids[known:] = 0
        if ids:
            np.minimum(np.concatenate(ids), self._most_id, out=fields.token_ids[:known])
        fill_lengths(fields, counts, ends)
        fill_slots(fields, counts, self._cache.block_size, [self._spare])
        if any(skipped):
            fields.positions[:known] += np.repeat(skipped, counts[: len(ids)])
        num_decodes = (
            0 if size is not None else len(list(takewhile(lambda count: count == 1, counts)))
        )
        is_partial = size is not None or num_decodes < len(counts)
        if is_partial:
            fill_output_rows(fields, [1] * len(counts))
        if size is not None:
            fields.counts[:] = num_decodes, len(counts)
        staged = self._staging.send()
        outputs = None
        if is_partial:
            indices = staged.output_rows[: len(counts) if size is None else size.sequences]
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
            padded=None if size is None else PaddedStep(staged.counts, size.most_chunks),
        )

    def _draw(self, hidden: Tensor) -> Tensor:
        """Return the most likely id behind each row, int64 [rows]; -1 for NaN on a CPU."""
        if not hidden.shape[0]:
            return torch.empty(0, dtype=torch.int64, device=hidden.device)
        if self._decoder.has_argmax:
            return self._decoder.argmax(hidden)
        return self._decoder.logits(hidden).argmax(-1)


def count_longer(parts: Sequence[DraftPart], length: int) -> int:
    """Return the number of parts with more draft tokens than `length`."""
    return sum(part.length > length for part in parts)


def _move(batch: StepBatch, places: Tensor) -> None:
    """Move the rows of a batch on the device. places: [rows, 3], the numbers of `Place`."""
    positions, slots, contexts = places.unbind(1)
    batch.positions.copy_(positions)
    batch.slots.copy_(slots)
    batch.context_lengths.copy_(contexts)
