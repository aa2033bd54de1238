"""Groups of a step's decodes whose contexts begin with the same blocks.

A GPU reads the keys of such a prefix once for the whole group.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

__all__ = ["Prefix", "find_prefixes", "most_prefixes"]

Integers: TypeAlias = npt.NDArray[np.signedinteger]

LEAST_ROWS = 32
"""Fewest decodes of a step that reads shared prefixes once"""
LEAST_TOKENS = 512
"""Fewest tokens of a shared prefix"""
LEAST_SHARERS = 16
"""Fewest decodes that share a prefix: the queries of one tile of the attention kernel"""
_MOST_DIVISIONS = 4
"""Most divisions of a group into groups with longer prefixes; each takes the host some 50 µs"""


@dataclass(frozen=True, slots=True)
class Prefix:
    """Blocks with which the contexts of some decodes begin."""

    rows: Integers
    """[n], row numbers of the decodes in the step, ascending"""
    blocks: int
    """Number of the blocks"""

    @property
    def saved_blocks(self) -> int:
        """Number of block reads that are saved if the prefix is read once."""
        return (len(self.rows) - 1) * self.blocks


def most_prefixes(rows: int) -> int:
    """Return the most prefixes that `rows` decodes can share."""
    return rows // LEAST_SHARERS


def find_prefixes(tables: Integers, lengths: Integers, block_size: int) -> list[Prefix]:
    """Return the prefixes that save reads if they are read once. No decode has two of them.

    tables: [rows, columns], blocks of each decode; entries past its blocks are arbitrary.
    lengths: [rows], tokens of each context. The last token of a context is in no prefix.
    The result is empty if the prefixes together save fewer reads than `LEAST_ROWS` decodes that
    share `LEAST_TOKENS` tokens.
    """
    least = -(-LEAST_TOKENS // block_size)
    most = (lengths - 1) // block_size
    long = np.flatnonzero(most >= least)
    if len(tables) < LEAST_ROWS or len(long) < LEAST_SHARERS:
        return []
    prefixes = [
        prefix
        for rows in _equal_rows(long, tables[long, least - 1])
        for prefix in _prefixes_of(rows, tables, most, least, _MOST_DIVISIONS)
    ]
    saved = sum(prefix.saved_blocks for prefix in prefixes)
    return prefixes if saved >= (LEAST_ROWS - 1) * least else []


def _prefixes_of(
    rows: Integers, tables: Integers, most: Integers, least: int, divisions: int
) -> list[Prefix]:
    """Return the prefixes of rows that have the same block in the last of `least` columns.

    most: [rows of the tables], largest number of each decode's shared blocks.
    """
    blocks = _count_common(tables[rows], int(most[rows].min()))
    if blocks < least:
        # The rows may share this block behind different ones: divide them by an earlier block.
        return _divided(rows, tables, most, blocks, least, divisions)
    whole = [Prefix(rows, blocks)]
    parts = _divided(rows[most[rows] > blocks], tables, most, blocks, blocks + 1, divisions)
    if not parts:
        return whole
    rest = np.setdiff1d(rows, np.concatenate([part.rows for part in parts]), assume_unique=True)
    if len(rest) >= LEAST_SHARERS:
        parts.append(Prefix(rest, blocks))
    return max(whole, parts, key=lambda some: sum(prefix.saved_blocks for prefix in some))


def _divided(
    rows: Integers, tables: Integers, most: Integers, column: int, least: int, divisions: int
) -> list[Prefix]:
    """Return the prefixes of rows that are divided by their blocks in a column."""
    if not divisions or not len(rows):
        return []
    return [
        prefix
        for part in _equal_rows(rows, tables[rows, column])
        for prefix in _prefixes_of(part, tables, most, least, divisions - 1)
    ]


def _equal_rows(rows: Integers, blocks: Integers) -> Iterator[Integers]:
    """Yield the rows that have the same block, if they are enough to share a prefix."""
    order = np.argsort(blocks, kind="stable")
    borders = np.flatnonzero(np.diff(blocks[order])) + 1
    for places in np.split(order, borders):
        if len(places) >= LEAST_SHARERS:
            yield rows[places]


def _count_common(tables: Integers, most: int) -> int:
    """Return the number of leading columns, at most `most`, in which all rows are equal."""
    differs = (tables[:, :most] != tables[0, :most]).any(axis=0)
    return int(differs.argmax()) if differs.any() else most
