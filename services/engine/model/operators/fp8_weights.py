"""Weights in FP8 (E4M3, https://arxiv.org/abs/2209.05433) with a scale for each output or group."""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

__all__ = ["FP8", "LARGEST", "Fp8Rounding", "Fp8Weight"]

FP8 = torch.float8_e4m3fn
LARGEST = 448.0
"""Largest number of E4M3"""

_SIGNIFICANDS = (448.0, 416.0, 384.0, 352.0, 320.0, 288.0, 256.0, 240.0)
"""Largest numbers of E4M3, one for each significand: all others are these times powers of two"""
_TINY = 1e-30
"""Groups below this magnitude become zeros, because their scale would be subnormal"""
_AT_ONCE = 1 << 24
"""Number of weights that are rounded at a time, to bound the memory"""


@dataclass(frozen=True, slots=True)
class Fp8Weight:
    """A rounded weight. A number times the scale of its output and group is the weight."""

    numbers: Tensor
    """float8_e4m3fn [outputs, inputs]"""
    scales: Tensor
    """float32 [groups, outputs]"""


@dataclass(frozen=True, slots=True)
class Fp8Rounding:
    """Rounding to the nearest, with a scale for each output, or each `group` of its inputs.

    Of eight scales that use E4M3 up to its end, each group takes the one that rounds it best.
    Weights that are E4M3 numbers times a scale already, as in an FP8 checkpoint, thereby keep their
    numbers, if no group has two scales.
    """

    group: int | None = None
    """Number of inputs that share a scale; None: all inputs of an output"""

    def group_inputs(self, inputs: int) -> int:
        """Return how many of `inputs` share a scale."""
        return inputs if self.group is None else self.group

    def round(self, weight: Tensor) -> Fp8Weight:
        """Round `weight` [outputs, inputs], of any floating dtype."""
        inputs = weight.shape[1]
        rows = max(1, _AT_ONCE // inputs)
        group = self.group_inputs(inputs)
        parts = [_round(part.float(), group) for part in torch.split(weight, rows)]
        numbers, scales = zip(*parts, strict=True)
        return Fp8Weight(torch.cat(numbers).view(FP8), torch.cat(scales).T.contiguous())


def _round(weight: Tensor, group: int) -> tuple[Tensor, Tensor]:
    """Return numbers as bytes, because torch computes little with FP8, and their scales."""
    outputs, inputs = weight.shape
    groups = -(-inputs // group)
    grouped = pad(weight, (0, groups * group - inputs)).reshape(outputs, groups, group)
    largest = grouped.abs().amax(dim=2, keepdim=True)
    numbers, scale, error = _rounded(grouped, largest, _SIGNIFICANDS[0])
    for significand in _SIGNIFICANDS[1:]:
        other = _rounded(grouped, largest, significand)
        is_better = other[2] < error
        numbers = torch.where(is_better, other[0], numbers)
        scale = torch.where(is_better, other[1], scale)
        error = torch.where(is_better, other[2], error)
    return numbers.flatten(1)[:, :inputs].contiguous(), scale.squeeze(2)


def _rounded(grouped: Tensor, largest: Tensor, significand: float) -> tuple[Tensor, Tensor, Tensor]:
    """Return bytes, scales and squared errors if the largest weight becomes `significand`."""
    scale = torch.where(largest > _TINY, largest / significand, 1.0)
    numbers = (grouped / scale).to(FP8)
    error = (numbers.float() * scale - grouped).square().sum(dim=2, keepdim=True)
    return numbers.view(torch.uint8), scale, error
