"""Sizes to which decode steps on a GPU are padded.

Each size needs its own CUDA graph and its own compiled attention kernel, so there are few sizes.
"""

__all__ = ["row_bucket", "table_width"]

_DENSE = 16
"""Rows above which there is one more size between two powers of two"""
_LEAST_WIDTH = 16
"""Blocks; 1,024 tokens in blocks of 64"""


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
