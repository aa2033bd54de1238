"""Tiled layout of activations."""

from torch import Tensor

from services.engine.kernels.library import InstructionSet, instruction_set

__all__ = ["TILE", "from_tiles", "rows_at_once"]

TILE = 32
"""Number of rows and of columns of a block of activations, and of inputs of a tile product"""

_VECTOR_ROWS = 16
"""Number of rows that AVX-512 BF16 multiplies in about the time of reading the weights"""


def rows_at_once() -> int:
    """Return the number of rows that a product computes at once; fewer rows take as long."""
    return TILE if instruction_set() == InstructionSet.AMX else _VECTOR_ROWS


def from_tiles(tiles: Tensor) -> Tensor:
    """Return [rows, width] from whole blocks in tiles, row by row."""
    count, width = tiles.shape
    blocks = tiles.view(count // TILE, width // TILE, TILE, TILE).transpose(1, 2)
    return blocks.reshape(count, width)
