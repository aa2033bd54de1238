"""Weights in groups of codes, as quantized checkpoints store them."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from math import gcd
from typing import Protocol, TypeAlias

import torch
from torch import Tensor

__all__ = [
    "QuantizedWeight",
    "StoredRows",
    "Weight",
    "decoded",
    "joined",
    "rounded",
    "split",
]


@dataclass(frozen=True, slots=True)
class QuantizedWeight:
    """weight[o, i] = scales[o, i // group] * codes[o, i] + offsets[o, i // group], in float32."""

    codes: Tensor
    """uint8 [outputs, inputs], below 2 ** bits"""
    bits: int
    """4 or 8"""
    scales: Tensor
    """float32 [outputs, inputs / group]"""
    offsets: Tensor
    """float32 [outputs, inputs / group]: minus the scale times the code of zero"""
    order: Tensor | None = None
    """int64 [inputs]: input i is column order[i] of `codes`; None = in order"""

    @property
    def shape(self) -> tuple[int, int]:
        """Outputs and inputs."""
        outputs, inputs = self.codes.shape
        return outputs, inputs

    @property
    def group(self) -> int:
        """Inputs that share a scale."""
        return self.codes.shape[1] // self.scales.shape[1]

    def decode(self) -> Tensor:
        """Return the weight, float32 [outputs, inputs]."""
        codes = self.codes.float().view(*self.scales.shape, -1)
        weight = (codes * self.scales[..., None] + self.offsets[..., None]).view(self.shape)
        return weight if self.order is None else weight[:, self.order]

    def rows(self, index: Tensor | slice) -> "QuantizedWeight":
        """Return some outputs."""
        parts = (self.codes[index], self.scales[index], self.offsets[index])
        return QuantizedWeight(parts[0], self.bits, parts[1], parts[2], self.order)

    def in_groups_of(self, group: int) -> "QuantizedWeight":
        """Return the same weight in groups that divide the present ones."""
        count = self.group // group
        if count == 1:
            return self
        scales, offsets = (part.repeat_interleave(count, 1) for part in (self.scales, self.offsets))
        return QuantizedWeight(self.codes, self.bits, scales, offsets)

    def times(self, factor: float) -> "QuantizedWeight":
        """Return the weight times a factor."""
        if factor == 1:
            return self
        scales, offsets = self.scales * factor, self.offsets * factor
        return QuantizedWeight(self.codes, self.bits, scales, offsets, self.order)

    def columns(self, number: int, count: int) -> "QuantizedWeight | None":
        """Return part `number` of `count` equal parts of the inputs; None if a group is cut."""
        if self.order is not None or self.scales.shape[1] % count:
            return None
        codes, scales, offsets = (
            each.chunk(count, dim=1)[number] for each in (self.codes, self.scales, self.offsets)
        )
        return QuantizedWeight(codes, self.bits, scales, offsets)


class StoredRows(Protocol):
    """Rows of a weight in the format of its file."""

    def decode(self, index: Tensor) -> Tensor:
        """Return the rows `index` (int64 [n]), float32 [n, inputs]."""


Weight: TypeAlias = Tensor | QuantizedWeight


def decoded(weight: Weight) -> Tensor:
    """Return the weight as a tensor."""
    return weight if isinstance(weight, Tensor) else weight.decode()


def joined(weights: Sequence[Weight]) -> Weight:
    """Return the outputs of all weights, in codes if all have codes.

    The smallest groups and the longest codes among them hold all of them.
    """
    if len(weights) == 1:
        return weights[0]
    quantized = [each for each in weights if isinstance(each, QuantizedWeight)]
    if len(quantized) < len(weights) or any(each.order is not None for each in quantized):
        return torch.cat([decoded(each) for each in weights])
    group = gcd(*(each.group for each in quantized))
    finer = [each.in_groups_of(group) for each in quantized]
    return QuantizedWeight(
        torch.cat([each.codes for each in finer]),
        max(each.bits for each in finer),
        torch.cat([each.scales for each in finer]),
        torch.cat([each.offsets for each in finer]),
    )


def rounded(weight: Tensor, bits: int, group: int) -> QuantizedWeight:
    """Round a weight [outputs, inputs] to the nearest codes, with scales that float16 holds.

    `bits`: 8 for codes of -127 to 127 times the scale; 4 for -8 to 7, where the scale has the sign
    that gives the largest number the code -8.
    """
    groups = weight.float().view(len(weight), -1, group)
    largest = groups.gather(2, groups.abs().argmax(2, keepdim=True))
    scales = (largest.abs() / 127 if bits == 8 else largest / -8).half().float()
    zero, least, most = (128, 1, 255) if bits == 8 else (8, 0, 15)
    codes = (groups / torch.where(scales == 0, 1, scales) + zero).round().clamp(least, most)
    scales = scales[..., 0]
    return QuantizedWeight(codes.to(torch.uint8).view(weight.shape), bits, scales, -zero * scales)


def split(weight: Weight, sizes: Sequence[int]) -> Sequence[Weight]:
    """Return parts with `sizes` outputs each."""
    if isinstance(weight, Tensor):
        return weight.split_with_sizes(list(sizes))
    ends = [*accumulate(sizes)]
    return [weight.rows(slice(end - size, end)) for size, end in zip(sizes, ends, strict=True)]
