"""Attention to the last tokens of a sequence and to entries that stand for earlier ones."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from services.engine.batch.step_batch import StepBatch
from services.engine.model.architecture.compressed_spec import CompressedSpec
from services.engine.model.mixers.compressed_pages import entry_slots, token_slots
from services.engine.model.mixers.indexer import index_scores
from services.engine.model.mixers.interleaved import rotate
from services.engine.model.mixers.latent_pages import PIECE
from services.engine.model.mixers.token_choice import best_places
from services.engine.model.operators.rotation import Rotary

__all__ = ["QUERY_ROWS", "CompressedAttention", "IndexQueries", "compressed_numbers"]

QUERY_ROWS = 256
"""Most query rows whose scores are in memory at once"""


@dataclass(frozen=True, slots=True)
class IndexQueries:
    """Queries by which an indexer chooses entries."""

    queries: Tensor
    """[rows, heads, width]"""
    head_weights: Tensor
    """float32 [rows, heads]"""

    def scores(self, rows: slice, keys: Tensor) -> Tensor:
        """Return the scores of entries, float32 [rows, entries]. keys: float32 [entries, width]."""
        return index_scores(self.queries[rows].float(), self.head_weights[rows], keys)


@dataclass(frozen=True, slots=True)
class _Entries:
    """Entries of one sequence."""

    vectors: Tensor
    """[slots, entry_width], entries of all sequences"""
    slots: Tensor
    """int64 [entries], slots of this sequence's entries"""
    index_keys: Tensor | None
    """float32 [entries, width]; None: the layer has no indexer"""


class CompressedAttention:
    """Attention of one layer, computed for some query rows of a sequence at a time."""

    def __init__(self, spec: CompressedSpec, sinks: Tensor, rotary: Rotary) -> None:
        """sinks: float32 [heads]."""
        self._spec = spec
        self._sinks = sinks
        self._rotary = rotary

    def attend(
        self,
        queries: Tensor,
        index: IndexQueries | None,
        batches: tuple[StepBatch, StepBatch],
        pages: tuple[Tensor, Tensor | None],
        out: Tensor,
    ) -> None:
        """Fill `out` [rows, heads, head_dim], rotated back.

        queries: [rows, heads, head_dim]; batches: the step in the groups of entries and of tokens;
        pages: those of tokens, [blocks, block_size, page_width], and of entries, [blocks, entries
        of a block, entry_width], or None if there are no entries.
        """
        by_entry, by_token = batches
        tokens, entries = pages
        start = 0
        for sequence, length in enumerate(by_token.query_lengths_host):
            context = by_token.context_lengths_host[sequence]
            mine = None
            if entries is not None:
                table = by_entry.block_tables[sequence : sequence + 1]
                mine = self._entries(table, context, entries, tokens.shape[1])
            table = by_token.block_tables[sequence : sequence + 1]
            for rows in self._pieces(length, context):
                first = context - length + rows.start
                places = torch.arange(first, context - length + rows.stop, device=tokens.device)
                some = slice(start + rows.start, start + rows.stop)
                keys, visible = self._window(table, places, first, tokens)
                if mine is not None:
                    chosen, are_seen = self._chosen(mine, index, some, places)
                    keys = torch.cat((keys, chosen))
                    visible = torch.cat((visible, are_seen), dim=1)
                out[some] = self._attend(queries[some], keys, visible)
                rotation = self._rotary.empty(len(places))
                self._rotary.compute(places, rotation)
                rotate(out[some], rotation, backwards=True)
            start += length

    def _attend(self, queries: Tensor, keys: Tensor, visible: Tensor) -> Tensor:
        """Return [rows, heads, head_dim]. keys: float32 [n, head_dim]; visible: bool [rows, n]."""
        scores = torch.matmul(queries.float(), keys.mT).mul_(self._spec.scale)
        scores.masked_fill_(~visible[:, None], -torch.inf)
        sinks = self._sinks[:, None].expand(len(scores), -1, 1)
        weights = torch.cat((scores, sinks), dim=2).softmax(dim=2)[..., :-1]
        return torch.matmul(weights, keys).to(queries.dtype)

    def _window(
        self, table: Tensor, places: Tensor, first: int, pages: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Return the vectors of the tokens that some rows see, and a mask of those each row sees.

        places: int64 [rows], indices of the rows' tokens, the first of which is `first`.
        """
        least = max(0, first - self._spec.window + 1)
        tokens = torch.arange(least, first + len(places), device=pages.device)
        slots = token_slots(table, tokens[None], pages.shape[1])[0]
        keys = pages.flatten(0, 1)[:, : self._spec.head_dim][slots].float()
        distances = places[:, None] - tokens
        return keys, (distances >= 0) & (distances < self._spec.window)

    def _entries(self, table: Tensor, context: int, pages: Tensor, block_size: int) -> _Entries:
        spec = self._spec.compression
        assert spec is not None
        numbers = torch.arange(1, context // spec.rate + 1, device=pages.device)
        ends = numbers * spec.rate - 1
        slots = entry_slots(table, ends[None], block_size, spec.rate)[0]
        vectors, keys = pages.flatten(0, 1), None
        if spec.index is not None and len(slots) > spec.attended_entries:
            keys = vectors[:, self._spec.head_dim :][slots].float()
        return _Entries(vectors, slots, keys)

    def _chosen(
        self, entries: _Entries, index: IndexQueries | None, rows: slice, places: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Return the vectors of the entries that some rows see, and a mask of those each sees."""
        spec = self._spec.compression
        assert spec is not None
        counts, slots = (places + 1) // spec.rate, entries.slots
        numbers = torch.arange(len(slots), device=slots.device)
        visible = numbers < counts[:, None]
        if entries.index_keys is not None and index is not None:
            scores = index.scores(rows, entries.index_keys)
            best = best_places(scores, counts, spec.attended_entries)
            # rows that see fewer entries repeat their last one, or have -1 if they see none
            visible &= torch.zeros_like(visible).scatter_(1, best.clamp(min=0), True)
            if len(visible) == 1 and int(counts[0]) >= spec.attended_entries:
                slots, visible = slots[best[0]], visible[:, best[0]]
        return entries.vectors[:, : self._spec.head_dim][slots].float(), visible

    def _pieces(self, length: int, context: int) -> Iterator[slice]:
        step = _rows_at_once(self._spec, context)
        for first in range(0, length, step):
            yield slice(first, min(first + step, length))


def _rows_at_once(spec: CompressedSpec, context: int) -> int:
    """Return how many query rows of a sequence are computed at once."""
    heads, keys = spec.num_heads, spec.window + QUERY_ROWS
    if spec.compression is not None:
        keys += context // spec.compression.rate
        if spec.compression.index is not None:
            heads = max(heads, spec.compression.index.num_heads)
    return max(1, min(QUERY_ROWS, PIECE // (heads * keys)))


def compressed_numbers(spec: CompressedSpec, tokens: int, context: int) -> int:
    """Return the most numbers of float32 that a layer holds at once.

    tokens: number of a step's tokens; context: length of the longest sequence.
    """
    rows = min(tokens, _rows_at_once(spec, context))
    keys, width, scores, made = spec.window + rows, spec.head_dim, 0, 0
    if spec.compression is not None:
        entries = context // spec.compression.rate
        keys += entries
        made = 2 * min(PIECE, 4 * tokens * spec.compression.series * spec.compressed_width)
        index = spec.compression.index
        if index is not None:
            scores = entries * (2 * index.width + rows * (index.num_heads + 8))
    # vectors as stored, as float32, and joined; scores with and without sinks, and their softmax
    attended = 3 * keys * width + rows * (spec.num_heads * (3 * keys + 4 * width) + 4 * keys)
    # outputs by group and their products
    joined = tokens * (spec.num_heads * width + 2 * spec.groups * spec.group_width)
    return scores + max(attended, made, joined)
