"""Feeder of sequences to a decoder."""

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from services.engine.batch.step_batch import OutputRows, PaddedStep, StateSegments, StepBatch
from services.engine.model.model import Model
from tests.unit.engine.checkpoints.shapes import VOCABULARY


class Driver:
    """Feeder of sequences to a decoder, in chunks, with KV blocks in random order."""

    def __init__(
        self,
        decoder: Model,
        sequences: Sequence[Tensor],
        block_size: int = 32,
        *,
        padded: bool = False,
        adapters: Sequence[int] = (),
    ) -> None:
        """padded: pad steps with chunks, as on a GPU; adapters: one for each sequence."""
        self._adapters = adapters
        self._decoder = decoder
        self._sequences = sequences
        self._size = block_size
        needed = [-(-len(tokens) // block_size) for tokens in sequences]
        generator = torch.Generator().manual_seed(11)
        shuffled = torch.randperm(sum(needed) + 3, generator=generator).to(torch.int32)
        self._tables = torch.zeros(len(sequences), max(needed), dtype=torch.int32)
        for index, count in enumerate(needed):
            first = sum(needed[:index])
            self._tables[index, :count] = shuffled[first : first + count]
        runs = sum(len(tokens) for tokens in sequences)  # each writes a slot of its own
        blocks = len(shuffled) + 1  # the last one is spare
        self.cache = decoder.allocate_cache(blocks, block_size, runs)
        self._free_slots = list(range(runs))
        self._snapshots: list[dict[int, int]] = [{} for _ in sequences]
        """By sequence, the slot of the states behind some numbers of its tokens"""
        self._padded = padded
        self._done = [0] * len(sequences)
        self.logits = [torch.empty(0, decoder.spec.vocab_size) for _ in sequences]
        """Logits so far, [tokens, vocabulary] for each sequence; NaN: not computed"""

    def blocks_of(self, sequence: int) -> set[int]:
        """Return the blocks that hold a sequence's tokens so far."""
        count = -(-self._done[sequence] // self._size)
        return set(self._tables[sequence, :count].tolist())

    def share(self, sequence: int, other: int, tokens: int) -> None:
        """Let `sequence` reuse the blocks of `tokens` first tokens that it shares with `other`."""
        blocks = tokens // self._size
        self._tables[sequence, :blocks] = self._tables[other, :blocks]
        self._done[sequence] = blocks * self._size
        self._snapshots[sequence] = dict(self._snapshots[other])
        self.logits[sequence] = self.logits[other][: self._done[sequence]]

    def step(self, chunks: Sequence[tuple[int, int]], kept: Sequence[int] | None = None) -> None:
        """Run a batch of (sequence, number of next tokens), decodes first.

        kept: number of each chunk's last tokens whose logits are computed; None: all.
        """
        batch = self.batch(chunks)
        counts = batch.query_lengths_host
        if kept is not None:
            batch, counts = replace(batch, output_rows=keep_last(counts, kept)), tuple(kept)
        if self._padded and not batch.is_decode:
            batch = pad(batch, (self.cache.num_blocks - 1) * self._size)
        hidden = self._decoder.forward(batch, self.cache)[: sum(counts)]
        logits = torch.split(self._decoder.logits(hidden), list(counts))
        for (index, count), rows in zip(chunks, logits, strict=True):
            self._done[index] += count
            unknown = torch.full((count - len(rows), rows.shape[1]), torch.nan)
            self.logits[index] = torch.cat((self.logits[index], unknown, rows))

    def advance(self, chunks: Sequence[tuple[int, int]]) -> None:
        """Count the tokens of a `batch` as computed, without their logits."""
        for index, count in chunks:
            self._done[index] += count

    def batch(self, chunks: Sequence[tuple[int, int]]) -> StepBatch:
        spans = [(i, self._done[i], self._done[i] + count) for i, count in chunks]
        positions = torch.cat([torch.arange(start, end) for _, start, end in spans])
        lengths = torch.tensor([count for _, count in chunks])
        rows = torch.tensor([index for index, _ in chunks])
        contexts = [end for _, _, end in spans]
        tables = self._tables[rows, : -(-max(contexts) // self._size)]
        owners = torch.repeat_interleave(torch.arange(len(chunks)), lengths)
        blocks = tables[owners, positions // self._size].long()
        return StepBatch(
            token_ids=torch.cat([self._sequences[i][start:end] for i, start, end in spans]),
            positions=positions,
            slots=blocks * self._size + positions % self._size,
            query_starts=torch.cat((torch.zeros(1), lengths.cumsum(0))).to(torch.int32),
            context_lengths=torch.tensor(contexts, dtype=torch.int32),
            block_tables=tables,
            num_decodes=_leading_ones(lengths.tolist()),
            query_lengths_host=tuple(lengths.tolist()),
            context_lengths_host=tuple(contexts),
            adapters_host=tuple(self._adapters[i] for i, _ in chunks) if self._adapters else (),
            states=self._runs(spans) if self.cache.states else None,
        )

    def _runs(self, spans: Sequence[tuple[int, int, int]]) -> StateSegments:
        """Return the runs of sequences' tokens, which are cut at the ends of blocks."""
        lengths, sources, targets = [], [], []
        for sequence, start, end in spans:
            snapshots, place = self._snapshots[sequence], start
            while place < end:
                sources.append(snapshots.get(place, -1) if place else -1)
                upto = min(end, (place // self._size + 1) * self._size)
                snapshots[upto] = self._free_slots.pop()
                targets.append(snapshots[upto])
                lengths.append(upto - place)
                place = upto
        starts = torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)
        read, written = (torch.tensor(each, dtype=torch.int32) for each in (sources, targets))
        return StateSegments(starts, read, written, tuple(lengths))


def pad(batch: StepBatch, spare_slot: int) -> StepBatch:
    """Return a batch with rows and sequences that stand for nothing, and write to a slot."""
    tokens, sequences, more = len(batch.token_ids), len(batch.context_lengths), 5

    def behind(tensor: Tensor, count: int, filling: int) -> Tensor:
        return torch.cat((tensor, tensor.new_full((count, *tensor.shape[1:]), filling)))

    outputs = batch.output_rows
    if outputs is None:
        rows = torch.arange(tokens)
        outputs = OutputRows(rows, batch.query_starts, batch.query_lengths_host)
    kept = len(outputs.indices)
    padded = replace(
        batch,
        token_ids=behind(batch.token_ids, more, 0),
        positions=behind(batch.positions, more, 0),
        slots=behind(batch.slots, more, spare_slot),
        query_starts=behind(batch.query_starts, more, tokens),
        context_lengths=behind(batch.context_lengths, more, 0),
        block_tables=behind(batch.block_tables, more, -1),
        output_rows=OutputRows(
            behind(outputs.indices, more, 0),
            behind(outputs.starts, more, kept),
            outputs.lengths_host,
        ),
        padded=PaddedStep(
            torch.tensor([batch.num_decodes, sequences], dtype=torch.int32),
            sequences - batch.num_decodes + 1,
        ),
    )
    groups = [(padded.slots, padded.block_tables) for _ in batch.further_groups]
    return padded.with_groups([slots for slots, _ in groups], [tables for _, tables in groups])


def keep_last(lengths: Sequence[int], kept: Sequence[int]) -> OutputRows:
    """Return the last `kept` rows of sequences of these lengths."""
    ends = torch.tensor(lengths).cumsum(0).tolist()
    rows = [torch.arange(end - count, end) for end, count in zip(ends, kept, strict=True)]
    starts = torch.tensor([0, *kept]).cumsum(0).to(torch.int32)
    return OutputRows(torch.cat(rows), starts, tuple(kept))


def _leading_ones(lengths: list[int]) -> int:
    return next((i for i, length in enumerate(lengths) if length != 1), len(lengths))


def random_tokens(count: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(VOCABULARY, (count,), generator=generator)
