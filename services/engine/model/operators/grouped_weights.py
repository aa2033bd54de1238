"""Weights of a mixture on a GPU: the same products of all experts, side by side."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import triton
from torch import Tensor
from torch.nn.functional import pad

from services.engine.model.checkpoint.mxfp4 import GROUP_SIZE, Mxfp4Weight
from services.engine.model.operators.fp8_weights import FP8, Fp8Rounding

__all__ = ["PACKED_INPUTS", "GroupedWeights"]

PACKED_INPUTS = 2 * GROUP_SIZE
"""Number of inputs of MXFP4 that lie together, and that a program multiplies at a time"""

_MOST_ROWS = 128


@dataclass(frozen=True, slots=True)
class GroupedWeights:
    """The same products of all experts."""

    weight: Tensor
    """[experts, products * outputs, inputs]; for MXFP4, uint8 in the form that _pack returns"""
    scales: Tensor | None
    """[experts, groups, products * outputs]: exponents of 2 plus 127 in uint8 for MXFP4, float32
    for FP8; None: weights have no scales"""
    bias: Tensor | None
    """[experts, products * outputs]"""
    rounding: Fp8Rounding | None
    """Rounding to FP8 of weights that are not MXFP4; None: they are not rounded"""

    @staticmethod
    def allocate(
        weights: Sequence[Tensor | Mxfp4Weight],
        bias: Tensor | None,
        count: int,
        dtype: torch.dtype,
        device: torch.device,
        rounding: Fp8Rounding | None,
    ) -> "GroupedWeights":
        """Allocate space for `count` experts like the one with these products."""
        first = weights[0]
        outputs, inputs = sum(weight.shape[0] for weight in weights), first.shape[1]
        weight_dtype, scales = dtype, None
        if isinstance(first, Mxfp4Weight):
            chunks = triton.cdiv(inputs, PACKED_INPUTS)
            weight_dtype, inputs = torch.uint8, chunks * PACKED_INPUTS // 2
            groups = chunks * PACKED_INPUTS // GROUP_SIZE
            scales = torch.empty((count, groups, outputs), dtype=torch.uint8, device=device)
        elif rounding is not None:
            weight_dtype, groups = FP8, triton.cdiv(inputs, rounding.group_inputs(inputs))
            scales = torch.empty((count, groups, outputs), dtype=torch.float32, device=device)
        return GroupedWeights(
            torch.empty((count, outputs, inputs), dtype=weight_dtype, device=device),
            scales,
            None if bias is None else torch.empty((count, outputs), dtype=dtype, device=device),
            rounding,
        )

    def put(
        self,
        number: int,
        weights: Sequence[Tensor | Mxfp4Weight],
        biases: Sequence[Tensor | None],
    ) -> None:
        """Copy one expert's products."""
        first = 0
        for weight, bias in zip(weights, biases, strict=True):
            part = slice(first, first + weight.shape[0])
            numbers, scales = self._converted(weight)
            self.weight[number, part] = numbers
            if self.scales is not None and scales is not None:
                self.scales[number, :, part] = scales
            if self.bias is not None and bias is not None:
                self.bias[number, part] = bias.to(self.bias.device, self.bias.dtype)
            first = part.stop

    def _converted(self, weight: Tensor | Mxfp4Weight) -> tuple[Tensor, Tensor | None]:
        """Return numbers [outputs, inputs] and scales [groups, outputs] as they are stored."""
        device = self.weight.device
        if not isinstance(weight, Tensor):
            return _pack(weight, device)
        if self.rounding is None:
            return weight.to(device, self.weight.dtype), None
        rounded = self.rounding.round(weight.to(device))
        return rounded.numbers, rounded.scales

    @property
    def fp8_groups(self) -> int:
        """Number of FP8 scales of an output; 0: the weights are not FP8."""
        return self.scales.shape[1] if self.scales is not None and self.weight.dtype == FP8 else 0

    @property
    def group_inputs(self) -> int:
        """Number of inputs that share an FP8 scale."""
        inputs = self.weight.shape[2]
        return inputs if self.rounding is None else self.rounding.group_inputs(inputs)

    @property
    def most_rows(self) -> int:
        """Most rows of a block that the kernels multiply."""
        return _MOST_ROWS

    @property
    def nbytes(self) -> int:
        return self.weight.nbytes + (0 if self.scales is None else self.scales.nbytes)


def _pack(weight: Mxfp4Weight, device: torch.device) -> tuple[Tensor, Tensor]:
    """Arrange MXFP4 for the kernel, whose loads are then contiguous.

    A byte of the result [outputs, inputs / 2] holds equally numbered inputs of two groups.
    The scales become [groups, outputs]. Inputs are padded to pairs of groups with zeros.
    """
    blocks, scales = weight.blocks.to(device), weight.scales.to(device)
    outputs, groups = scales.shape
    codes = torch.stack((blocks & 15, blocks >> 4), dim=3).flatten(1)
    codes = pad(codes, (0, -groups * GROUP_SIZE % PACKED_INPUTS)).view(outputs, -1, 2, GROUP_SIZE)
    packed = (codes[:, :, 0] | codes[:, :, 1] << 4).flatten(1)
    return packed, pad(scales, (0, groups % 2)).T
