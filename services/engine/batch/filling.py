"""Integers of a staged step: where the tokens of each sequence begin, and where they lie."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from services.engine.batch.staging import HostFields

__all__ = ["fill_lengths", "fill_output_rows", "fill_slots"]


def fill_lengths(fields: HostFields, counts: Sequence[int], ends: Sequence[int]) -> None:
    """Fill in where the tokens of each sequence begin, and the lengths of contexts.

    counts: tokens of each sequence. ends: context length of each sequence. Sequences behind them
    are padding without tokens.
    """
    _fill_starts(fields.query_starts, counts)
    fields.context_lengths[: len(ends)] = ends
    fields.context_lengths[len(ends) :] = 0


def fill_slots(
    fields: HostFields, counts: Sequence[int], block_size: int, spare: Sequence[Sequence[int]]
) -> None:
    """Fill in positions and slots, for padding those of spare blocks. `fill_lengths` comes before.

    counts: tokens of each sequence. spare: the spare block of each cache group, in a list.
    """
    total, count = sum(counts), len(counts)
    positions, contexts = fields.positions[:total], fields.context_lengths[:count]
    owners = np.arange(count)
    if total > count:
        owners = np.repeat(owners, counts)
        shifts = (contexts - fields.query_starts[1 : count + 1])[owners]
        np.add(np.arange(total), shifts, out=positions)
    else:
        np.subtract(contexts, 1, out=positions)
    blocks, offsets = np.divmod(positions, block_size)
    slots = fields.block_tables[owners, :, blocks].astype(np.int64) * block_size
    np.add(slots, offsets[:, None], out=fields.slots[:, :total].T)
    if total < len(fields.positions):
        fields.positions[total:] = 0
        fields.slots[:, total:] = np.array(spare) * block_size


def fill_output_rows(fields: HostFields, outputs: Sequence[int]) -> None:
    """Fill in the last rows of each sequence; those of padding are the first.

    outputs: rows of each sequence. `fill_lengths` comes before.
    """
    starts, total = fields.output_starts, sum(outputs)
    _fill_starts(starts, outputs)
    # a row's distance from the last row of its sequence is the same in both numberings
    ends = slice(1, len(outputs) + 1)
    repeats = np.array(outputs, dtype=np.int64)
    shifts = np.repeat(fields.query_starts[ends] - starts[ends], repeats)
    np.add(np.arange(total), shifts, out=fields.output_rows[:total])
    fields.output_rows[total:] = 0


def _fill_starts(starts: npt.NDArray[np.signedinteger[Any]], counts: Sequence[int]) -> None:
    """Fill in where each sequence's rows begin; behind the last sequence there are no rows."""
    starts[0] = 0
    np.cumsum(np.array(counts, dtype=np.int64), out=starts[1 : len(counts) + 1])
    starts[len(counts) + 1 :] = starts[len(counts)]
