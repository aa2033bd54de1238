"""MXFP4: 4-bit floats in groups that share a power of two (OCP Microscaling Formats v1.0)."""

import torch
from torch import Tensor

__all__ = ["GROUP_SIZE", "decode"]

GROUP_SIZE = 32
"""Weights that share a scale"""

_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_VALUES = torch.tensor([*_MAGNITUDES, *(-value for value in _MAGNITUDES)], dtype=torch.bfloat16)
_PAIRS = torch.stack((_VALUES.repeat(16), _VALUES.repeat_interleave(16)), dim=1)
"""[256, 2]: the two values in a byte, the lower half's first"""
_EXPONENT_BIAS = 127


def decode(blocks: Tensor, scales: Tensor) -> Tensor:
    """Decode uint8 blocks [outputs, groups, 16] and their uint8 scales [outputs, groups].

    Returns bfloat16 [outputs, groups * 32]. Decoding is exact: bfloat16 holds every value.
    """
    values = _PAIRS[blocks.int()].flatten(2)
    exponents = scales.int() - _EXPONENT_BIAS
    return torch.ldexp(values.float(), exponents[:, :, None]).flatten(1).to(torch.bfloat16)
