"""What our kernels compute in tiles, and how these lie."""

import torch
from torch import Tensor

from services.engine.kernels.library import InstructionSet, instruction_set, native
from services.engine.model.spec import ModelSpec

__all__ = ["TILE", "rows_at_once", "runs_in_tiles", "to_rows", "to_tiles"]

TILE = 32
"""Rows and columns of a block of activations; inputs that one product of tiles sums over"""

_VECTOR_ROWS = 16
"""Rows that AVX-512 BF16 multiplies in little more time than weights take to arrive"""
_MOST_HEAD_DIM = 256
"""What the attention kernel has buffers for"""


def runs_in_tiles(spec: ModelSpec, dtype: torch.dtype, device: torch.device) -> bool:
    """Whether our kernels compute a model's products and attention, on AMX or AVX-512 BF16.

    Between them activations are kept in tiles (src/kernels.h), which only they understand.
    """
    if native is None or native.instruction_set() < InstructionSet.AVX512_BF16:
        return False
    widths = [spec.hidden_size, spec.intermediate_size, spec.head_dim]
    if spec.experts is not None:
        widths.append(spec.experts.width)
    fits = all(width % TILE == 0 for width in widths) and spec.head_dim <= _MOST_HEAD_DIM
    return device.type == "cpu" and dtype == torch.bfloat16 and fits


def rows_at_once() -> int:
    """Rows that a product computes at once: with fewer it takes as long."""
    return TILE if instruction_set() == InstructionSet.AMX else _VECTOR_ROWS


def to_tiles(rows: Tensor) -> Tensor:
    """[rows, width] in tiles, rows padded with zeros to whole blocks: what products read."""
    count, width = rows.shape
    padded = rows.new_zeros((-(-count // TILE) * TILE, width))
    padded[:count] = rows
    blocks = padded.view(-1, TILE, width // TILE, TILE).transpose(1, 2)
    return blocks.reshape(padded.shape)


def to_rows(tiles: Tensor) -> Tensor:
    """The inverse of `to_tiles`, padding included."""
    blocks = tiles.view(-1, tiles.shape[1] // TILE, TILE, TILE).transpose(1, 2)
    return blocks.reshape(tiles.shape)
