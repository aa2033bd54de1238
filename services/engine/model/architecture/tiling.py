"""Which models our kernels compute in tiles."""

import torch

from services.engine.kernels.library import InstructionSet, native
from services.engine.kernels.tiles import TILE
from services.engine.model.architecture.spec import ModelSpec

__all__ = ["runs_in_tiles"]

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
