"""Tiled layout of activations."""

from torch import Tensor

from services.engine.kernels.library import InstructionSet, instruction_set

__all__ = ["TILE", "from_tiles", "rows_at_once"]

TILE = 32
"""Rows and columns of a block of activations; also the inputs that a tile product sums over"""

_VECTOR_ROWS = 16
"""Rows that AVX-512 BF16 multiplies in little more time than reading the weights takes"""


def rows_at_once() -> int:
    """Return how many rows a product computes at once: with fewer it takes as long."""
    return TILE if instruction_set() == InstructionSet.AMX else _VECTOR_ROWS


def from_tiles(tiles: Tensor) -> Tensor:
    """Return [rows, width] from whole blocks in tiles, row by row."""
    count, width = tiles.shape
    blocks = tiles.view(count // TILE, width // TILE, TILE, TILE).transpose(1, 2)
    return blocks.reshape(count, width)
