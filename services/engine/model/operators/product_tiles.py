"""Tiles of products on a GPU, and the number of programs that divide a tile's inputs among them."""

from dataclasses import dataclass

__all__ = ["MOST_DIVIDED", "MOST_PARTS", "ProductTile", "count_parts"]

MOST_DIVIDED = 64
"""Most rows of a tile whose inputs programs divide: the sums of more take too many registers"""
MOST_PARTS = 8
"""Most programs among which the inputs of a tile are divided"""
_LEAST_STEPS = 4
"""Fewest pieces of inputs that a program reads, to fill its pipeline"""
_PROGRAMS = 2
"""Number of programs on a multiprocessor that keep its share of the memory busy"""


@dataclass(frozen=True, slots=True)
class ProductTile:
    """Rows and outputs that one program multiplies, and its schedule. A run on a GPU tunes it."""

    rows: int
    outputs: int
    warps: int
    stages: int
    """Depth of the pipeline that loads rows and weights"""


def count_parts(tiles: int, pieces: int, multiprocessors: int) -> int:
    """Return the number of programs that divide the inputs of a tile, so that the GPU is full.

    tiles: number of tiles of outputs. pieces: number of pieces of a tile's inputs.
    """
    wanted = -(-_PROGRAMS * multiprocessors // tiles)
    return max(1, min(wanted, pieces // _LEAST_STEPS, MOST_PARTS))
