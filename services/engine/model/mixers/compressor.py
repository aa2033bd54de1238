"""Compression of tokens to entries (CSA and HCA of DeepSeek V4)."""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import rms_norm

from services.engine.model.architecture.compressed_spec import CompressionSpec
from services.engine.model.mixers.interleaved import rotate
from services.engine.model.operators.rotation import Rotary

__all__ = ["Compressor", "CompressorWeights"]


@dataclass(frozen=True, slots=True)
class CompressorWeights:
    """Weights of one compressor beside the product that makes vectors and scores of tokens."""

    position_bias: Tensor
    """float32 [rate, series * width], added to the scores by the tokens' places in an entry"""
    norm: Tensor
    """[width]"""


class Compressor:
    """Sums of tokens' vectors, each number of which is weighted by a softmax over its scores."""

    def __init__(
        self,
        spec: CompressionSpec,
        width: int,
        weights: CompressorWeights,
        rotary: Rotary,
        epsilon: float,
    ) -> None:
        """width: count of an entry's numbers."""
        self._spec = spec
        self._width = width
        self._weights = weights
        self._rotary = rotary
        self._epsilon = epsilon

    def compress(self, tokens: Tensor, firsts: Tensor) -> Tensor:
        """Return the entries of tokens, [n, width].

        tokens: [n, series * rate, 2 * series * width], each token's vectors, then their scores;
        firsts: int64 [n], index in its sequence of the first token that does not overlap. Tokens
        before the first one of a text don't exist: their content has no effect.
        """
        spec, width = self._spec, self._width
        vectors, scores = tokens.float().chunk(2, dim=2)
        scores = scores + self._weights.position_bias.repeat(spec.series, 1)
        if spec.overlaps:  # the first half lends its first series, the second half its second one
            vectors, scores = (_halves(each, spec.rate, width) for each in (vectors, scores))
            is_missing = (firsts == 0)[:, None, None]
            scores[:, : spec.rate].masked_fill_(is_missing, -torch.inf)
            vectors[:, : spec.rate].masked_fill_(is_missing, 0)
        sums = (vectors * scores.softmax(dim=1)).sum(dim=1).to(tokens.dtype)
        entries = rms_norm(sums, (width,), self._weights.norm, self._epsilon)
        rotation = self._rotary.empty(len(firsts))
        self._rotary.compute(firsts, rotation)
        rotate(entries[:, None], rotation)
        return entries


def _halves(numbers: Tensor, rate: int, width: int) -> Tensor:
    """Return [n, 2 * rate, width] of [n, 2 * rate, 2 * width]."""
    return torch.cat((numbers[:, :rate, :width], numbers[:, rate:, width:]), dim=1)
