"""Tiles of the attention kernels over pages, by shape. The figures are tuned on an H200."""

import math
from dataclasses import dataclass, replace

__all__ = [
    "MAX_SPAN",
    "MAX_SPLITS",
    "MIN_SPAN",
    "Tile",
    "count_padded_splits",
    "count_programs",
    "count_splits",
    "decode_tile",
    "fp8_tile",
    "power_of_two",
    "prefill_tile",
]

MAX_SPLITS = 64
"""Most parts of one context; the kernel that merges them holds as many at once"""
MIN_SPAN = 128
"""Least keys of a part: a shorter one costs more to merge than it saves"""
MAX_SPAN = 2048
"""Most keys of a part of the longest context, so that short contexts don't wait for it"""
_PROGRAMS = 2
"""Number of programs that fill a multiprocessor"""
_MOST_PROGRAMS = 8192
"""Most programs of a padded launch, which end at once where a step has less for them to do"""
_SCRATCH = 64 << 20
"""Bytes of the float32 parts that one call may allocate"""
_DECODE_ROWS = 64
"""Most query heads that a program of a decode holds"""
_WIDE_ROWS = 32
"""The same for heads wider than 256, where 64 would exceed an L4's shared memory"""


@dataclass(frozen=True, slots=True)
class Tile:
    """Part of the attention that one program computes at a time."""

    rows: int
    """Number of queries × query heads that share a key head; a power of two, at least 16"""
    heads: int
    """Number of query heads in `rows`"""
    keys: int
    """Number of keys read at a time; a power of two that divides a page"""
    warps: int
    stages: int
    """Depth of the pipeline that loads keys and values"""

    @property
    def queries(self) -> int:
        """Number of queries of a program."""
        return self.rows // self.heads


def decode_tile(group: int, head_dim: int) -> Tile:
    """Return the tile for few queries. group: number of query heads that share a key head."""
    parts = -(-group // (_WIDE_ROWS if head_dim > 256 else _DECODE_ROWS))
    heads = -(-group // parts)
    rows = max(16, power_of_two(heads))
    if head_dim > 256:
        return Tile(rows, heads, keys=16, warps=4 if rows == 16 else 8, stages=2)
    if head_dim > 128:
        return Tile(rows, heads, keys=32, warps=4 if rows == 16 else 8, stages=3)
    if rows == 16:
        return Tile(rows, heads, keys=64, warps=2, stages=2)
    return Tile(rows, heads, keys=64, warps=4, stages=3)


def prefill_tile(group: int, head_dim: int) -> Tile:
    """Return the tile for many queries. It fits the 99 KB of shared memory of an L4."""
    few = decode_tile(group, head_dim)
    if head_dim > 256:
        return Tile(_WIDE_ROWS, few.heads, keys=16, warps=8, stages=2)
    if head_dim > 128:
        return Tile(max(64, few.rows), few.heads, keys=32, warps=8, stages=2)
    return Tile(64, few.heads, keys=64, warps=4, stages=3)


def fp8_tile(tile: Tile) -> Tile:
    """Return the tile for keys and values in FP8.

    They have half the bytes, so one more tile is on its way. Their conversion takes registers, of
    which more warps have more. Compilers found these figures; no card has measured them yet.
    """
    return replace(tile, warps=max(tile.warps, 8 if tile.rows >= 64 else 4), stages=tile.stages + 1)


def count_splits(
    tiles: int,
    rows: int,
    heads: int,
    head_dim: int,
    tokens: int,
    *,
    multiprocessors: int,
    evens: bool = True,
) -> int:
    """Return the number of parts that each context is divided into, a power of two.

    tiles: number of programs without a division; rows × heads × head_dim: shape of the output;
    tokens: length of the longest context; multiprocessors: number of the GPU's; evens: divide long
    contexts even if that many programs fill the GPU. The result depends on shapes and the GPU
    alone, so that a captured graph holds it.
    """
    wanted = -(-count_programs(multiprocessors) // tiles)
    if evens:
        wanted = max(wanted, -(-tokens // MAX_SPAN))
    return _bounded(wanted, rows * heads * head_dim, tokens)


def count_padded_splits(
    tiles: int,
    heads: int,
    shape: tuple[int, int, int],
    tokens: int,
    multiprocessors: int,
    *,
    evens: bool,
) -> int:
    """Return the most parts that a context of a padded step is divided into, a power of two.

    tiles: number of the launch's tiles of queries, of which a step may use one alone; heads: number
    of programs for each; shape: rows, heads and width of the output. The other parameters are those
    of `count_splits`. The kernel decides how many of the parts a step has.
    """
    wanted = min(-(-count_programs(multiprocessors) // heads), _MOST_PROGRAMS // (tiles * heads))
    if evens:
        wanted = max(wanted, -(-tokens // MAX_SPAN))
    return _bounded(wanted, math.prod(shape), tokens)


def count_programs(multiprocessors: int) -> int:
    """Return the number of programs that fill a GPU."""
    return _PROGRAMS * multiprocessors


def _bounded(wanted: int, numbers: int, tokens: int) -> int:
    """Return the greatest power of two up to `wanted` parts that scratch memory and spans allow.

    numbers: float32 numbers of one part of all rows.
    """
    most = min(MAX_SPLITS, tokens // MIN_SPAN, _SCRATCH // (4 * numbers))
    return 1 << (max(1, min(wanted, most)).bit_length() - 1)


def power_of_two(number: int) -> int:
    """Return the least power of two that is at least `number`."""
    return 1 << (number - 1).bit_length()
