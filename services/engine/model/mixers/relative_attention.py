"""Attention with addends of scores by distance, in torch."""

import torch
from torch import Tensor

from services.common.cached_prefix import window_start
from services.engine.batch.step_batch import StepBatch
from services.engine.model.architecture.layers import AttentionSpec
from services.engine.model.mixers.latent_pages import PIECE, LatentBuffer, pieces

__all__ = ["RelativeAttention", "relative_numbers"]


def relative_numbers(spec: AttentionSpec, tokens: int, context: int) -> int:
    """Return the most numbers of float32 that the attention of a layer holds at once.

    tokens: number of a step's tokens; context: length of the longest sequence.
    """
    if spec.window:
        context = min(context, spec.window + tokens)
    row = _row_numbers(spec, context)
    # Keys and values as they are gathered, and in float32. Pieces count twice: the allocator keeps
    # the memory of one, which is too small for the next one, whose context is longer.
    return 2 * context * spec.page_width + 2 * min(max(PIECE, row), tokens * row)


def _row_numbers(spec: AttentionSpec, context: int) -> int:
    """Return the count of a row's numbers: each head's, then distances and masks of all heads.

    A head has addends of all distances and of its scores, and the softmax's inputs and outputs.
    """
    assert spec.relative is not None
    return spec.num_heads * (4 * context + 2 * spec.relative.extent) + 6 * context


class RelativeAttention:
    """Attention of one layer, one sequence after another: softmax(scale * q·k + addend).

    A token's addends are a mixture of the rows of a table, whose columns are distances.
    """

    def __init__(self, spec: AttentionSpec, table: Tensor, buffer: LatentBuffer) -> None:
        """table: float32 [rank, extent]; buffer: memory that all layers share."""
        assert spec.relative is not None
        self._spec = spec
        self._relative = spec.relative
        self._table = table
        self._buffer = buffer

    def attend(
        self, queries: Tensor, states: Tensor, pages: Tensor, batch: StepBatch, out: Tensor
    ) -> None:
        """Fill `out` [rows, heads * head_dim].

        queries: [rows, heads, head_dim]; states: [rows, heads, rank], factors of the table's rows;
        pages: [blocks, block_size, page_width], which hold the step's tokens.
        """
        start, size, heads = 0, pages.shape[1], self._spec.num_heads
        for sequence, length in enumerate(batch.query_lengths_host):
            before = batch.context_lengths_host[sequence] - length
            seen = before + length - window_start(before, self._spec.window)
            for part in pieces(length, _row_numbers(self._spec, seen)):
                # a token sees those before `last`; blocks before the window may be other sequences'
                first = window_start(before + part.start, self._spec.window)
                last = before + part.stop
                block = first // size
                table = batch.block_tables[sequence, block : -(-last // size)].long()
                tokens = self._buffer.gather(pages, table)
                tokens = tokens[first - block * size : last - block * size]
                rows = slice(start + part.start, start + part.stop)
                places = torch.arange(first, last, device=pages.device)
                ends = torch.arange(before + part.start + 1, last + 1, device=pages.device)
                distances = ends[:, None] - 1 - places
                attended = self._of_rows(queries[rows], states[rows], tokens, distances, ends)
                out[rows].view(-1, heads, self._spec.head_dim).copy_(attended)
            start += length

    def _of_rows(
        self, queries: Tensor, states: Tensor, tokens: Tensor, distances: Tensor, ends: Tensor
    ) -> Tensor:
        """Return the attention of rows of a sequence, float32 [rows, heads, head_dim].

        tokens: [seen, page_width]; distances: int64 [rows, seen]; ends: int64 [rows], numbers of
        the rows' tokens in their sequence, counted from 1.
        """
        spec, (rows, seen) = self._spec, distances.shape
        keys, values = tokens.float().view(seen, 2, spec.num_kv_heads, -1).permute(1, 2, 0, 3)
        grouped = queries.float().view(rows, spec.num_kv_heads, -1, spec.head_dim).transpose(0, 1)
        scores = (grouped.flatten(1, 2) @ keys.transpose(1, 2)).mul_(spec.scale)
        scores = scores.view(spec.num_kv_heads, rows, -1, seen)
        addends = self._addends(states, distances)
        scores += addends.view(rows, spec.num_kv_heads, -1, seen).transpose(0, 1)
        del addends
        if growth := self._relative.growth:
            counts = (ends / self._relative.period).clamp(min=1)
            scores *= (1 + growth * counts.log())[:, None, None]
        hidden = distances < 0
        if spec.window:
            hidden |= distances >= spec.window
        weights = scores.masked_fill_(hidden[:, None], -torch.inf).softmax(dim=3)
        attended: Tensor = weights.flatten(1, 2) @ values
        return attended.view(grouped.shape).transpose(0, 1).flatten(1, 2)

    def _addends(self, states: Tensor, distances: Tensor) -> Tensor:
        """Return the addends of scores, float32 [rows, heads, seen]."""
        by_distance = states.float() @ self._table
        columns = distances.clamp(0, self._relative.extent - 1)
        columns = columns[:, None].expand(-1, self._spec.num_heads, -1)
        is_far = distances >= self._relative.extent
        return by_distance.gather(2, columns).masked_fill_(is_far[:, None], 0)
