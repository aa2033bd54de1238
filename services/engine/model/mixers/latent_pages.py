"""Reading of pages of latents: blocks of sequences, and decodes of similar work."""

from collections.abc import Iterator

import torch
from torch import Tensor

from services.engine.batch.step_batch import StepBatch
from services.engine.model.architecture.latent_spec import LatentSpec

__all__ = ["PIECE", "LatentBuffer", "decode_groups", "latent_numbers", "pieces", "sequence_pages"]

PIECE = 1 << 24
"""Most numbers of gathered latents, scores, or keys and values in memory at once"""

_PARTS = 32
"""Most parts of a context in the kernel of decodes (kMostParts of latent_attention.cpp)"""


class LatentBuffer:
    """Memory for the latents that a layer reads, which all layers share: to allocate it for each
    layer would take longer than to read the latents."""

    def __init__(self) -> None:
        self._blocks: Tensor | None = None

    def gather(self, pages: Tensor, blocks: Tensor) -> Tensor:
        """Copy blocks of `pages`, int64 [n]; valid until the next call.

        Returns [n * block_size, width].
        """
        memory, count = self._blocks, len(blocks)
        if memory is None or len(memory) < count or memory.shape[1:] != pages.shape[1:]:
            memory = self._blocks = pages.new_empty(count, *pages.shape[1:])
        torch.index_select(pages, 0, blocks, out=memory[:count])
        return memory[:count].flatten(0, 1)


def latent_numbers(spec: LatentSpec, tokens: int, sequences: int, context: int) -> int:
    """Return the most numbers that a layer's attention holds at once, an indexer's excepted.

    tokens: number of a step's; sequences: number that decode; context: longest sequence's length.
    """
    page, pair, heads = spec.page_width, 2 * spec.head_width, spec.num_heads
    gathered = min(max(PIECE, context * page), max(1, sequences) * context * page)
    # keys and values, and both before they are padded to the width of a query
    expanded = 2 * min(max(PIECE, context * pair), heads * context * pair)
    # a mask of bytes, which torch converts to numbers
    masks = 2 * min(max(PIECE, heads * context), tokens * heads * context)
    # in float32, by the kernel of decodes: queries, and a state for each part of a context
    own = 2 * heads * (spec.absorbed_width + _PARTS * (spec.latent_width + 2))
    decoded = min(max(PIECE, own), sequences * own)
    absorbed = sum(not spec.expands(length) for length in range(1, tokens + 1))
    queries = 3 * max(sequences, absorbed) * heads * page + 4 * tokens * heads * spec.head_width
    return gathered + expanded + masks + queries + decoded


def pieces(count: int, numbers: int) -> Iterator[slice]:
    """Divide `count` rows or heads, each of which takes `numbers` numbers of memory."""
    step = max(1, PIECE // numbers)
    for first in range(0, count, step):
        yield slice(first, min(first + step, count))


def decode_groups(batch: StepBatch, width: int) -> Iterator[tuple[slice, int]]:
    """Divide the sequences that decode into groups that are padded to their longest context.

    width: count of numbers in memory for each token of a context. Yields sequences and the longest
    context.
    """
    lengths, first = batch.context_lengths_host, 0
    while first < batch.num_decodes:
        longest, last = lengths[first], first + 1
        while last < batch.num_decodes:
            next_longest = max(longest, lengths[last])
            if (last + 1 - first) * next_longest * width > PIECE:
                break
            longest, last = next_longest, last + 1
        yield slice(first, last), longest
        first = last


def sequence_pages(buffer: LatentBuffer, pages: Tensor, batch: StepBatch, sequence: int) -> Tensor:
    """Return the numbers that the pages hold of a sequence's tokens, [context, width]."""
    context, size = batch.context_lengths_host[sequence], pages.shape[1]
    table = batch.block_tables[sequence, : -(-context // size)].long()
    return buffer.gather(pages, table)[:context]
