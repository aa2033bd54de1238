"""Sizes of a real-gated linear recurrent unit (RG-LRU, https://arxiv.org/abs/2402.19427)."""

from collections.abc import Set
from dataclasses import dataclass, replace

__all__ = ["GatedUnitShape"]


@dataclass(frozen=True, slots=True)
class GatedUnitShape:
    """Sizes of a gated unit behind a short convolution; with tensor parallelism, of one rank."""

    heads: int
    head_width: int
    """Number of channels of a head, whose gates read these channels alone"""
    conv_width: int
    """Tokens that the convolution reads for one of its outputs; at least 2"""

    @property
    def channels(self) -> int:
        return self.heads * self.head_width

    @property
    def widths(self) -> Set[int]:
        """Widths of the activations."""
        return {self.channels}

    def part(self, count: int) -> "GatedUnitShape":
        """Return the shape of one of `count` equal parts. Raises ValueError if there are none."""
        if self.heads % count:
            raise ValueError(f"num_attention_heads ({self.heads}) is not a multiple of {count}")
        return replace(self, heads=self.heads // count)
