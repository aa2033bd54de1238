"""Division of a step's sequences at the borders of chunked attention."""

from dataclasses import replace

import torch

from services.engine.batch.step_batch import StepBatch
from services.engine.batch.transfer import to_device

__all__ = ["in_chunks"]


def in_chunks(batch: StepBatch, size: int, block_size: int) -> StepBatch:
    """Return `batch` with each chunk of `size` tokens as a sequence of its own.

    size: number of tokens, a multiple of block_size. Positions count from the start of the chunk,
    so that a backend of causal attention lets each query see only its own chunk. A decode has one
    chunk: no decision may depend on lengths, because CUDA graphs contain its launches.
    """
    if batch.is_decode:
        starts = (batch.context_lengths - 1).clamp(min=0) // size * size
        return replace(
            batch,
            context_lengths=batch.context_lengths - starts,
            context_lengths_host=tuple((n - 1) % size + 1 for n in batch.context_lengths_host),
            block_tables=_tables_from(batch.block_tables, starts, size, block_size),
            prefixes=None,
            output_rows=None,
        )
    if max(batch.context_lengths_host) <= size:
        return batch
    pieces = [
        (sequence, start, max(start, context - length), min(context, start + size))
        for sequence, (length, context) in enumerate(
            zip(batch.query_lengths_host, batch.context_lengths_host, strict=True)
        )
        for start in range((context - length) // size * size, context, size)
    ]
    lengths = tuple(end - first for _, _, first, end in pieces)
    contexts = tuple(end - start for _, start, _, end in pieces)
    owners, starts, query_starts, context_lengths, ends = (
        to_device(torch.tensor(each, dtype=torch.int32), batch.block_tables.device)
        for each in (
            [sequence for sequence, *_ in pieces],
            [start for _, start, *_ in pieces],
            [sum(lengths[:number]) for number in range(len(lengths) + 1)],
            contexts,
            [place - start + 1 for _, start, first, end in pieces for place in range(first, end)],
        )
    )
    return replace(
        batch,
        query_starts=query_starts,
        context_lengths=context_lengths,
        block_tables=_tables_from(batch.block_tables[owners.long()], starts, size, block_size),
        query_lengths_host=lengths,
        context_lengths_host=contexts,
        prefixes=None,
        output_rows=None,
        visible_ends=ends,
    )


def _tables_from(
    tables: torch.Tensor, starts: torch.Tensor, size: int, block_size: int
) -> torch.Tensor:
    """Return the part of each row of `tables` that holds `size` tokens from `starts` on."""
    width = tables.shape[1]
    places = torch.arange(min(width, size // block_size), device=tables.device)
    columns = (starts.long() // block_size)[:, None] + places
    return tables.gather(1, columns.clamp(max=width - 1))
