"""MXFP4: 4-bit floats in groups that share a power of two (OCP Microscaling Formats v1.0)."""

from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = ["DOUBLED", "GROUP_SIZE", "Mxfp4Weight", "decode", "exponents"]

GROUP_SIZE = 32
"""Number of weights that share a scale"""

_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_VALUES = torch.tensor([*_MAGNITUDES, *(-value for value in _MAGNITUDES)], dtype=torch.bfloat16)
_PAIRS = torch.stack((_VALUES.repeat(16), _VALUES.repeat_interleave(16)), dim=1)
"""[256, 2]: the two values in a byte, the lower half's first"""
_EXPONENT_BIAS = 127
DOUBLED = tuple(int(2 * value) for value in _VALUES.tolist())
"""Twice the number that each code stands for"""


@dataclass(frozen=True, slots=True)
class Mxfp4Weight:
    """An encoded weight [outputs, inputs]."""

    blocks: Tensor
    """uint8 [outputs, groups, 16]; the lower half of a byte holds the first of two inputs"""
    scales: Tensor
    """uint8 [outputs, groups], exponents of 2 plus 127"""

    @staticmethod
    def from_gguf(rows: Tensor) -> "Mxfp4Weight":
        """Rearrange rows of GGUF blocks, uint8 [outputs, bytes], on their device.

        A block is its scale and 16 bytes, whose lower halves hold the first 16 inputs.
        """
        blocks = rows.view(len(rows), -1, 1 + GROUP_SIZE // 2)
        halves = blocks[:, :, 1:]
        codes = torch.cat((halves & 15, halves >> 4), dim=2)
        return Mxfp4Weight(codes[:, :, 0::2] | codes[:, :, 1::2] << 4, blocks[:, :, 0])

    @property
    def shape(self) -> tuple[int, int]:
        outputs, groups = self.scales.shape
        return outputs, groups * GROUP_SIZE

    def decode(self) -> Tensor:
        """Return the numbers in bfloat16, which holds all of them."""
        return decode(self.blocks, self.scales)

    def rows(self, index: Tensor | slice) -> "Mxfp4Weight":
        """Return some outputs."""
        return Mxfp4Weight(self.blocks[index], self.scales[index])

    def columns(self, number: int, count: int) -> "Mxfp4Weight | None":
        """Return part `number` of `count` equal parts of the inputs; None if a group is cut."""
        if self.scales.shape[1] % count:
            return None
        parts = (self.blocks, self.scales)
        return Mxfp4Weight(*(part.chunk(count, dim=1)[number] for part in parts))


def decode(blocks: Tensor, scales: Tensor) -> Tensor:
    """Decode uint8 blocks [outputs, groups, 16] and their uint8 scales [outputs, groups].

    Returns bfloat16 [outputs, groups * 32]. Decoding is exact: bfloat16 holds every value.
    """
    values = _PAIRS.to(blocks.device)[blocks.int()].flatten(2)
    exponents = scales.int() - _EXPONENT_BIAS
    return torch.ldexp(values.float(), exponents[:, :, None]).flatten(1).to(torch.bfloat16)


def exponents(scales: Tensor) -> Tensor:
    """Return the scales of doubled codes, uint8 exponents of 2 plus 127; 0 means the number 0.

    That rounds scales below 2^-125, which no weight has, to 0.
    """
    return scales - (scales > 0).to(torch.uint8)
