"""Sizes of lightning attention (https://arxiv.org/abs/2405.17381)."""

from collections.abc import Set
from dataclasses import dataclass, replace

__all__ = ["LightningShape"]


@dataclass(frozen=True, slots=True)
class LightningShape:
    """Sizes of a lightning attention layer. With tensor parallelism, those of one rank."""

    heads: int
    head_dim: int
    """Width of a head's query, of its key and of its value"""
    norm_width: int
    """Number of outputs of all ranks, which are normed together"""
    slope: float
    """Factor that this layer puts on the heads' rates of decay"""

    @property
    def outputs(self) -> int:
        """Width of the output: all heads."""
        return self.heads * self.head_dim

    @property
    def widths(self) -> Set[int]:
        """Widths of the activations."""
        return {self.outputs}

    def part(self, count: int) -> "LightningShape":
        """Return the shape of one of `count` equal parts. Raises ValueError if there are none."""
        if self.heads % count:
            raise ValueError(f"num_attention_heads ({self.heads}) is not a multiple of {count}")
        return replace(self, heads=self.heads // count)
