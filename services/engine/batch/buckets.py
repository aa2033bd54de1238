"""Sizes to which steps on a GPU are padded.

Each size needs its own CUDA graphs, and a decode step its own compiled attention kernel, so there
are few sizes.
"""

from collections.abc import Callable, Iterator

__all__ = ["TOKEN_BUCKETS", "decode_sizes", "row_bucket", "table_width", "token_bucket"]

TOKEN_BUCKETS = (64, 128, 256, 384, 512, 768, 1024)
"""Padded numbers of tokens of steps with prompts, ascending. Up to a few hundred tokens, padding
costs a GPU no time; a larger step takes longer than its launches, so it needs no graphs"""

_DENSE = 16
"""Number of rows above which there is one more size between two powers of two"""
_LEAST_WIDTH = 16
"""Number of columns of the narrowest block tables: 1,024 tokens in blocks of 64"""


def row_bucket(rows: int) -> int:
    """Return the least of 1, 2, 4, 8, 16, 24, 32, 48, 64, … that is at least `rows`."""
    power = 1 << (rows - 1).bit_length()
    between = power * 3 // 4
    return between if power > _DENSE and rows <= between else power


def table_width(blocks: int) -> int:
    """Return the columns of block tables whose longest row has `blocks`: 16, 64, 256, …"""
    width = _LEAST_WIDTH
    while width < blocks:
        width *= 4
    return width


def token_bucket(tokens: int) -> int:
    """Return the least of `TOKEN_BUCKETS` that is at least `tokens`, which must not exceed all."""
    return next(size for size in TOKEN_BUCKETS if size >= tokens)


def decode_sizes(most_rows: int, most_blocks: int, num_blocks: int) -> list[tuple[int, int]]:
    """Return rows and table widths of all padded decode steps that can occur, largest first.

    most_blocks: number of blocks of the longest sequence. num_blocks: number of blocks of the KV
    cache, which must hold the blocks of all rows.
    """
    widths = list(_up_to(table_width(most_blocks), lambda width: table_width(width + 1)))
    sizes = []
    rows_before = 0
    for rows in _up_to(row_bucket(most_rows), lambda rows: row_bucket(rows + 1)):
        for before, width in zip((0, *widths), widths, strict=False):
            # the smallest step of this size has one long row, and one block in each other row
            if before + 1 + rows_before <= num_blocks:
                sizes.append((rows, width))
        rows_before = rows
    return sorted(sizes, reverse=True)


def _up_to(last: int, following: Callable[[int], int]) -> Iterator[int]:
    size = following(0)
    while size < last:
        yield size
        size = following(size)
    yield last
