"""Sizes and variants of Mamba's first form (https://arxiv.org/abs/2312.00752)."""

from collections.abc import Set
from dataclasses import dataclass, replace

__all__ = ["SelectiveShape"]


@dataclass(frozen=True, slots=True)
class SelectiveShape:
    """Sizes and variant of a Mamba layer. With tensor parallelism, those of one rank."""

    channels: int
    """Width of the convolution, of the state and of the output"""
    state_width: int
    """Count of the state's numbers for each channel"""
    step_rank: int
    """Width between the two products that make the time steps"""
    conv_width: int
    """Tokens that the convolution reads for one of its outputs; at least 2"""
    has_conv_bias: bool
    has_bias: bool
    """True if the products that read the residual and that add to it have a bias"""
    has_norms: bool
    """True if time steps, input factors (B) and output factors (C) have an RMSNorm each"""
    norm_epsilon: float
    heads: int = 1
    """Number of equal parts of the channels, each with its own time steps and factors (Zamba)"""

    @property
    def factors(self) -> tuple[int, int, int]:
        """Widths of the second product's outputs: time steps, then both kinds of factors."""
        return self.step_rank, self.state_width, self.state_width

    @property
    def widths(self) -> Set[int]:
        """Widths of the activations."""
        return {self.channels // self.heads, self.step_rank}

    @property
    def head(self) -> "SelectiveShape":
        """The shape of one head."""
        return replace(self, channels=self.channels // self.heads, heads=1)

    def part(self, count: int) -> "SelectiveShape":
        """Return the shape of one of `count` equal parts. Raises ValueError if there are none."""
        if self.head.channels % count:
            raise ValueError(
                f"the channels of a Mamba head ({self.head.channels}) are no multiple of {count}"
            )
        return replace(self, channels=self.channels // count)
