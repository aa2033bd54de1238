"""Sizes and variants of Mamba-2 (https://arxiv.org/abs/2405.21060)."""

from collections.abc import Set
from dataclasses import dataclass, replace

__all__ = ["MambaShape"]


@dataclass(frozen=True, slots=True)
class MambaShape:
    """Sizes and variant of a Mamba-2 layer. With tensor parallelism, those of one rank."""

    heads: int
    head_dim: int
    groups: int
    """Number of groups of neighbouring heads that share the factors of inputs and outputs (B, C)"""
    state_width: int
    """Number of factors of a group; the state of a head is [state_width, head_dim]"""
    conv_width: int
    """Tokens that the convolution reads for one of its outputs; at least 2"""
    has_conv_bias: bool
    has_bias: bool
    """True if the product that reads the residual has a bias"""
    has_output_bias: bool
    norm_width: int
    """Number of outputs normed together, those of other ranks included; 0: there is no norm"""
    norms_first: bool
    """True if the gate multiplies the normed outputs; False: gated outputs are normed"""
    norm_epsilon: float
    least_step: float
    most_step: float
    """Upper bound of the time steps, of which `least_step` is the lower one"""

    @property
    def outputs(self) -> int:
        """Width of the output: all heads."""
        return self.heads * self.head_dim

    @property
    def factors(self) -> int:
        """Width of the factors of all groups' inputs, and of their outputs."""
        return self.groups * self.state_width

    @property
    def channels(self) -> int:
        """Width of the convolution: all heads, then the factors of inputs and of outputs."""
        return self.outputs + 2 * self.factors

    @property
    def widths(self) -> Set[int]:
        """Widths of the activations."""
        return {self.channels, self.outputs}

    def part(self, count: int) -> "MambaShape":
        """Return the shape of one of `count` equal parts. Raises ValueError if there are none."""
        if self.heads % count:
            raise ValueError(
                f"the number of Mamba heads ({self.heads}) is not a multiple of {count}"
            )
        if self.groups % count and count % self.groups:
            raise ValueError(
                f"the number of Mamba groups ({self.groups}) is neither a multiple nor a divisor "
                f"of {count}"
            )
        groups = max(1, self.groups // count)
        return replace(self, heads=self.heads // count, groups=groups)
