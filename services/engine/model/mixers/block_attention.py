"""Attention to blocks of tokens that an indexer chooses, in torch."""

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.nn.functional import pad, scaled_dot_product_attention

from services.engine.batch.step_batch import StepBatch
from services.engine.model.architecture.layers import AttentionSpec
from services.engine.model.mixers.latent_pages import PIECE, LatentBuffer, pieces, sequence_pages

__all__ = ["BlockAttention", "best_blocks", "block_numbers"]


def block_numbers(spec: AttentionSpec, tokens: int, context: int) -> int:
    """Return the most numbers that the attention of a layer holds at once.

    tokens: number of a step's tokens; context: length of the longest sequence.
    """
    scores = min(max(PIECE, spec.num_heads * context), tokens * spec.num_heads * context)
    # numbers of products, of a mask, and of the softmax's inputs and outputs
    return context * spec.page_width + 5 * scores


def best_blocks(scores: Tensor, ends: Tensor, size: int, count: int, last: int) -> Tensor:
    """Return which blocks each row attends to, bool [rows, heads, blocks].

    scores: float32 [rows, heads, context]; ends: int64 [rows], a row sees the tokens below its end;
    size: number of a block's tokens. A row gets `count` blocks: its own and those before it, `last`
    in all, and then the best of the others.
    """
    context = scores.shape[2]
    blocks = -(-context // size)
    places = torch.arange(context, device=scores.device)
    scores = scores.masked_fill((places >= ends[:, None])[:, None], -torch.inf)
    scores = pad(scores, (0, blocks * size - context), value=-torch.inf)
    ranks = scores.view(*scores.shape[:2], blocks, size).amax(dim=3)
    if last:
        own = (ends - 1) // size
        near = (own[:, None] - torch.arange(last, device=own.device)).clamp(min=0)
        ranks.scatter_(2, near[:, None].expand(-1, ranks.shape[1], -1), torch.inf)
    found = ranks.topk(min(count, blocks), dim=2)
    chosen = torch.zeros_like(ranks, dtype=torch.bool)
    return chosen.scatter_(2, found.indices, found.values > -torch.inf)


class BlockAttention:
    """Attention of one layer, whose pages hold keys, values and an index key of each token.

    A short chunk reads the chosen blocks alone. A longer one reads all and masks the others,
    because together its queries choose most of them. A context that has no more blocks than are
    chosen needs no choice.
    """

    def __init__(self, spec: AttentionSpec, buffer: LatentBuffer) -> None:
        """buffer: memory that all layers share."""
        assert spec.index is not None
        self._spec = spec
        self._index = spec.index
        self._buffer = buffer

    def attend(
        self, queries: Tensor, index_queries: Tensor, pages: Tensor, batch: StepBatch, out: Tensor
    ) -> None:
        """Fill `out` [rows, heads * head_dim].

        queries: [rows, heads, head_dim]; index_queries: [rows, kv_heads, index width]; pages:
        [blocks, block_size, page_width], which hold the step's tokens.
        """
        start, heads = 0, self._spec.num_kv_heads
        by_head = queries.view(len(queries), heads, queries.shape[1] // heads, queries.shape[2])
        for sequence, length in enumerate(batch.query_lengths_host):
            rows = slice(start, start + length)
            start += length
            mine = (by_head[rows], index_queries[rows])
            for part, attended in self._of_sequence(*mine, pages, batch, sequence):
                out[rows][part] = attended.flatten(1)

    def _of_sequence(
        self, queries: Tensor, index_queries: Tensor, pages: Tensor, batch: StepBatch, sequence: int
    ) -> Iterator[tuple[slice, Tensor]]:
        """Yield rows of a sequence and their attention, [rows, kv_heads, group, head_dim]."""
        spec, index = self._spec, self._index
        context, length = batch.context_lengths_host[sequence], len(queries)
        ends = torch.arange(context - length + 1, context + 1, device=pages.device)
        size, count = index.block_tokens, index.chosen_blocks
        has_choice = context > size * count
        cached = 2 * spec.num_kv_heads * spec.head_dim
        if has_choice and length * size * count < context:
            keys = sequence_pages(self._buffer, pages[..., cached:], batch, sequence)
            chosen = self._choose(index_queries, keys, ends)
            yield slice(length), self._gathered(queries, chosen, pages, batch, sequence, ends)
            return
        tokens = sequence_pages(self._buffer, pages, batch, sequence)
        keys, values = tokens[:, :cached].view(context, 2, spec.num_kv_heads, -1).unbind(1)
        keys, values = keys.transpose(0, 1), values.transpose(0, 1)
        places = torch.arange(context, device=pages.device)
        for rows in pieces(length, spec.num_heads * context):
            visible = (places < ends[rows, None])[:, None]
            if has_choice:
                chosen = self._choose(index_queries[rows], tokens[:, cached:], ends[rows])
                visible = visible & chosen.repeat_interleave(size, dim=2)[..., :context]
            mine = queries[rows]
            mask = visible[:, :, None].expand(*mine.shape[:3], context).flatten(1, 2)
            attended = scaled_dot_product_attention(
                mine.flatten(1, 2).transpose(0, 1),
                keys,
                values,
                attn_mask=mask.transpose(0, 1),
                scale=spec.scale,
                enable_gqa=True,
            )
            yield rows, attended.transpose(0, 1).view(mine.shape)

    def _choose(self, queries: Tensor, keys: Tensor, ends: Tensor) -> Tensor:
        """Return the chosen blocks, bool [rows, kv_heads, blocks]. keys: [context, width]."""
        index = self._index
        scores = queries.float() @ keys.float().T
        return best_blocks(scores, ends, index.block_tokens, index.chosen_blocks, index.last_blocks)

    def _gathered(
        self,
        queries: Tensor,
        chosen: Tensor,
        pages: Tensor,
        batch: StepBatch,
        sequence: int,
        ends: Tensor,
    ) -> Tensor:
        """Attend to the chosen blocks alone, which are as many for each row and head."""
        spec, size = self._spec, self._index.block_tokens
        context, heads = batch.context_lengths_host[sequence], spec.num_kv_heads
        numbers = chosen.nonzero()[:, 2].view(len(queries), heads, -1)
        places = numbers[..., None] * size + torch.arange(size, device=pages.device)
        places = places.flatten(2)
        mask = (places < ends[:, None, None])[:, :, None]
        places = places.clamp(max=context - 1)
        table, page = batch.block_tables[sequence].long(), pages.shape[1]
        slots = table[places // page] * page + places % page
        cached = pages.flatten(0, 1)[:, : 2 * heads * spec.head_dim]
        keys, values = cached.view(len(cached), 2, heads, -1).unbind(1)
        head = torch.arange(heads, device=pages.device)[:, None]
        return scaled_dot_product_attention(
            queries, keys[slots, head], values[slots, head], attn_mask=mask, scale=spec.scale
        )
