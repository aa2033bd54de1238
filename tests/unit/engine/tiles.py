"""Conversion of tiled activations for tests."""

from torch import Tensor

from services.engine.kernels.tiles import TILE

__all__ = ["to_rows"]


def to_rows(tiles: Tensor) -> Tensor:
    """Invert `to_tiles`, padding included."""
    blocks = tiles.view(-1, tiles.shape[1] // TILE, TILE, TILE).transpose(1, 2)
    return blocks.reshape(tiles.shape)
