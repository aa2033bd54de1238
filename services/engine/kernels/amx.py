"""What runs on AMX, and how it keeps activations."""

import torch
from torch import Tensor

from services.engine.kernels.library import InstructionSet, native
from services.engine.model.spec import ModelSpec

__all__ = ["TILE", "runs_on_amx", "to_rows", "to_tiles"]

TILE = 32
"""Rows and columns of a block of activations; inputs that one product of tiles sums over"""

_MOST_HEAD_DIM = 256
"""What the attention kernel has buffers for"""


def runs_on_amx(spec: ModelSpec, dtype: torch.dtype, device: torch.device) -> bool:
    """Whether AMX computes a model's products and attention.

    Between them activations are kept in tiles (src/kernels.h), which only they understand.
    """
    if native is None or native.instruction_set() != InstructionSet.AMX:
        return False
    widths = [spec.hidden_size, spec.intermediate_size, spec.head_dim]
    if spec.experts is not None:
        widths.append(spec.experts.width)
    fits = all(width % TILE == 0 for width in widths) and spec.head_dim <= _MOST_HEAD_DIM
    return device.type == "cpu" and dtype == torch.bfloat16 and fits


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
