"""Sizes of a gated short convolution (https://arxiv.org/abs/2511.23404)."""

from collections.abc import Set
from dataclasses import dataclass, replace

__all__ = ["ConvolutionShape"]


@dataclass(frozen=True, slots=True)
class ConvolutionShape:
    """Sizes of a gated short convolution; with tensor parallelism, those of one rank."""

    channels: int
    conv_width: int
    """Tokens that the convolution reads for one of its outputs; at least 2"""
    has_bias: bool
    """True if both products and the convolution have a bias"""

    @property
    def widths(self) -> Set[int]:
        """Widths of the activations."""
        return {self.channels}

    def part(self, count: int) -> "ConvolutionShape":
        """Return the shape of one of `count` equal parts. Raises ValueError if there are none."""
        if self.channels % count:
            raise ValueError(f"hidden_size ({self.channels}) is not a multiple of {count}")
        return replace(self, channels=self.channels // count)
