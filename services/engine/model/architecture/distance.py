"""Distances between tokens in the buckets of T5 and MPNet."""

import math

import torch
from torch import Tensor

__all__ = ["NUM_BUCKETS", "distance_buckets"]

NUM_BUCKETS = 32
"""Half for keys up to the query, half for keys after it"""
_FARTHEST = 128
"""Distance from which on all are in the last bucket"""


def distance_buckets(distances: Tensor) -> Tensor:
    """Return the bucket of each distance: near ones have their own, far ones share by logarithm.

    distances: int64, place of the key less that of the query. Source: Raffel et al., "Exploring the
    Limits of Transfer Learning with a Unified Text-to-Text Transformer", 2020.
    """
    half = NUM_BUCKETS // 2
    exact = half // 2
    apart = distances.abs()
    # the logarithm of 0 is not used
    ratio = torch.log(apart.float() / exact) / math.log(_FARTHEST / exact)
    far = (exact + (ratio.clamp(min=0) * (half - exact)).long()).clamp(max=half - 1)
    return torch.where(apart < exact, apart, far) + half * (distances > 0)
