"""The operators in tiles with weights in int8: half the bytes that a decode step reads."""

import torch
from torch import Tensor

from services.engine.kernels.library import DTYPES, Format
from services.engine.model.operators.interface import Projection
from services.engine.model.operators.native_operators import Packed, TiledOperators

__all__ = ["Int8Operators"]


class Int8Operators(TiledOperators):
    """Products read weights rounded to int8, with a scale for each output.

    The kernels widen them to bfloat16, which holds every int8: activations and sums are as exact as
    with weights in bfloat16.
    """

    def exact_projection(self, weight: Tensor, bias: Tensor | None) -> Projection:
        return self.packed_projection(super().pack((weight,)), weight.shape, bias)

    def pack(self, weights: tuple[Tensor, ...]) -> Packed:
        outputs, inputs = weights[0].shape
        elements = self.packed_elements(weights)
        tiles = self.arena.take(elements, torch.int8)
        scales = torch.zeros(elements // inputs, dtype=torch.float32)
        for first, weight in enumerate(weights):
            weight = weight.contiguous()
            self.native.pack_int8(
                DTYPES[weight.dtype],
                weight.data_ptr(),
                tiles.data_ptr(),
                scales.data_ptr(),
                outputs,
                inputs,
                first,
                len(weights),
            )
        return Packed(Format.INT8, tiles, scales)
