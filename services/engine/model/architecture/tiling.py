"""Choice between the tiled kernels and the other operators."""

import torch

from services.engine.kernels.library import InstructionSet, native
from services.engine.kernels.tiles import TILE
from services.engine.model.architecture.spec import ModelSpec

__all__ = ["runs_in_tiles"]

_MAX_HEAD_DIM = 512
"""Largest head dimension that fits the attention kernel's buffers"""


def runs_in_tiles(spec: ModelSpec, dtype: torch.dtype, device: torch.device) -> bool:
    """Return whether the tiled kernels (AMX, AVX-512 BF16) run this model on this machine.

    They run all of its products and its attention, or none: activations between them are in a tiled
    layout (src/kernels.h) that no other operator reads.
    """
    if native is None or native.instruction_set() < InstructionSet.AVX512_BF16:
        return False
    widths = {spec.hidden_size, *(layer.feed_forward.width for layer in spec.layers)}
    widths |= {layer.feed_forward.inner_width for layer in spec.layers}
    widths = widths.union(*(layer.mixer.widths for layer in spec.layers))
    widths |= {layer.input_width for layer in spec.layers}
    blocks = [layer.shared_block for layer in spec.layers if layer.shared_block is not None]
    widths |= {rank for block in blocks for rank in (block.attention_rank, block.gate_rank)}
    widths |= {layer.altup.laurel_rank for layer in spec.layers if layer.altup is not None}
    fits = all(width % TILE == 0 for width in widths) and spec.widest_head <= _MAX_HEAD_DIM
    fits = fits and not spec.has_pair_scores
    return device.type == "cpu" and dtype == torch.bfloat16 and fits
