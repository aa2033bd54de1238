"""Distances between tokens: the buckets of T5 and MPNet, and the slopes of ALiBi."""

import math

import torch
from torch import Tensor

__all__ = ["NUM_BUCKETS", "alibi_slopes", "distance_buckets"]

NUM_BUCKETS = 32
"""Number of buckets: half for keys up to the query, half for keys after it"""
_FARTHEST = 128
"""Least distance of the last bucket"""


def distance_buckets(distances: Tensor) -> Tensor:
    """Return the bucket of each distance: near ones have their own, far ones share by logarithm.

    distances: int64, place of the key minus that of the query. Source: Raffel et al., "Exploring
    the Limits of Transfer Learning with a Unified Text-to-Text Transformer", 2020.
    """
    half = NUM_BUCKETS // 2
    exact = half // 2
    apart = distances.abs()
    # the logarithm of 0 is not used
    ratio = torch.log(apart.float() / exact) / math.log(_FARTHEST / exact)
    far = (exact + (ratio.clamp(min=0) * (half - exact)).long()).clamp(max=half - 1)
    return torch.where(apart < exact, apart, far) + half * (distances > 0)


def alibi_slopes(num_heads: int, bias: float) -> Tensor:
    """Return each head's slope, by which its scores fall for each token of distance.

    Returns float32 [heads]. bias: exponent of the smallest slope, 2 ** -bias. Heads beyond a power
    of two have the odd exponents of twice as many. Source: Press et al., "Train Short, Test Long:
    Attention with Linear Biases Enables Input Length Extrapolation", 2022
    (https://arxiv.org/abs/2108.12409).
    """
    whole = 2 ** (num_heads.bit_length() - 1)
    exponents = [-bias * (head + 1) / whole for head in range(whole)]
    exponents += [-bias * (2 * head + 1) / (2 * whole) for head in range(num_heads - whole)]
    return 2.0 ** torch.tensor(exponents)
