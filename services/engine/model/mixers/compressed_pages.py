"""Pages of compressed attention: places of tokens and of the entries that stand for them."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from services.engine.batch.step_batch import StepBatch
from services.engine.batch.transfer import to_device

__all__ = ["ClosedEntries", "closed_entries", "entry_slots", "token_slots"]


@dataclass(frozen=True, slots=True)
class ClosedEntries:
    """Entries whose last tokens are in a step."""

    sequences: Tensor
    """int64 [n], rows of the block tables"""
    ends: Tensor
    """int64 [n], index of each entry's last token in its sequence"""

    def pieces(self, count: int) -> "Iterator[ClosedEntries]":
        """Yield the entries in pieces of at most `count`."""
        for first in range(0, len(self.ends), count):
            some = slice(first, first + count)
            yield ClosedEntries(self.sequences[some], self.ends[some])


def closed_entries(batch: StepBatch, rate: int) -> ClosedEntries:
    """Return the entries of `rate` tokens that a step completes."""
    sequences: list[int] = []
    ends: list[int] = []
    contexts = zip(batch.query_lengths_host, batch.context_lengths_host, strict=True)
    for sequence, (length, context) in enumerate(contexts):
        start = context - length
        mine = range((start // rate + 1) * rate - 1, context, rate)
        sequences += [sequence] * len(mine)
        ends += mine
    device = batch.block_tables.device
    both = (torch.tensor(each, dtype=torch.int64) for each in (sequences, ends))
    return ClosedEntries(*(to_device(each, device) for each in both))


def token_slots(tables: Tensor, places: Tensor, block_size: int) -> Tensor:
    """Return the slots of tokens, int64 [n, count].

    tables: int32 [n, width], block tables; places: int64 [n, count], indices of tokens in their
    sequences.
    """
    blocks = tables.gather(1, places // block_size).long()
    return blocks * block_size + places % block_size


def entry_slots(tables: Tensor, ends: Tensor, block_size: int, rate: int) -> Tensor:
    """Return the slots of entries, int64 [n, count]. ends: int64 [n, count], their last tokens."""
    blocks = tables.gather(1, ends // block_size).long()
    return blocks * -(-block_size // rate) + ends % block_size // rate
