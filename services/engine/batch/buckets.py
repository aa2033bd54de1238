"""Sizes that decode steps are padded to on a GPU.

A captured graph serves one size, and attention's kernel is compiled for the number of rows and the
width of the block tables. So there are few of each.
"""

__all__ = ["row_bucket", "table_width"]

_DENSE = 16
"""Rows from which on there is a size between each two powers of two"""
_LEAST_WIDTH = 16
"""Blocks: a thousand tokens of 64 to a block"""


def row_bucket(rows: int) -> int:
    """The least of 1, 2, 4, 8, 16, 24, 32, 48, 64, … that holds so many rows."""
    power = 1 << (rows - 1).bit_length()
    between = power * 3 // 4
    return between if power > _DENSE and rows <= between else power


def table_width(blocks: int) -> int:
    """Columns of the block tables where the longest sequence has so many: 16, 64, 256, …"""
    width = _LEAST_WIDTH
    while width < blocks:
        width *= 4
    return width
