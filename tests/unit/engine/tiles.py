"""Conversion of tiled activations for tests."""

from torch import Tensor

from services.engine.kernels.tiles import TILE

__all__ = ["to_rows", "to_tiles"]


def to_tiles(rows: Tensor) -> Tensor:
    """Arrange [rows, width] in tiles, padded with rows of zeros to whole blocks."""
    count, width = rows.shape
    padded = rows.new_zeros((-(-count // TILE) * TILE, width))
    padded[:count] = rows
    blocks = padded.view(-1, TILE, width // TILE, TILE).transpose(1, 2)
    return blocks.reshape(padded.shape)


def to_rows(tiles: Tensor) -> Tensor:
    """Invert `to_tiles`, padding included."""
    blocks = tiles.view(-1, tiles.shape[1] // TILE, TILE, TILE).transpose(1, 2)
    return blocks.reshape(tiles.shape)
