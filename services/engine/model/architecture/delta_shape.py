"""Sizes and variants of the gated delta rule."""

from collections.abc import Set
from dataclasses import dataclass, replace
from enum import Enum

__all__ = ["DeltaShape", "OutputGate"]


class OutputGate(Enum):
    """Function applied to the gate that multiplies the normed output."""

    SILU = 0
    SIGMOID = 1


@dataclass(frozen=True, slots=True)
class DeltaShape:
    """Sizes and variant of a gated delta rule. With tensor parallelism, those of one rank."""

    key_heads: int
    value_heads: int
    """A multiple of `key_heads`: neighbouring value heads share a query and a key"""
    key_dim: int
    """Width of a head's query and of its key"""
    value_dim: int
    """Width of a head's value"""
    conv_width: int
    """Tokens that the convolution reads for one of its outputs; at least 2"""
    norm_epsilon: float
    gate: OutputGate = OutputGate.SILU
    decays_channels: bool = False
    """True if each channel of a key has a decay (KDA), False if each head has one"""
    doubles_beta: bool = False
    """True if beta is in (0, 2) instead of (0, 1): the state's eigenvalues may be negative"""

    least_decay: float = 0.0
    """Lower bound of the decays' logarithms, below 0; 0: there is none"""
    rank: int = 0
    """Width between the two products that make the output gate, and between those that make the
    decay; 0: each is one product"""

    def __post_init__(self) -> None:
        if self.value_heads % self.key_heads:
            raise ValueError(
                f"value_heads must be a multiple of key_heads, got {self.value_heads} and "
                f"{self.key_heads}"
            )
        if self.conv_width < 2:
            raise ValueError(f"conv_width must be at least 2, got {self.conv_width}")

    @property
    def channels(self) -> int:
        """Width of the convolution: all queries, all keys, then all values."""
        return 2 * self.key_heads * self.key_dim + self.value_heads * self.value_dim

    @property
    def decays(self) -> int:
        """Number of decays of a token."""
        return self.value_heads * (self.key_dim if self.decays_channels else 1)

    @property
    def outputs(self) -> int:
        """Width of the output: all value heads."""
        return self.value_heads * self.value_dim

    @property
    def widths(self) -> Set[int]:
        """Widths of the activations."""
        return {self.channels, self.outputs, self.rank}

    def part(self, count: int) -> "DeltaShape":
        """Return the shape of one of `count` equal parts. Raises ValueError if there are none."""
        if self.key_heads % count:
            raise ValueError(
                f"linear_num_key_heads ({self.key_heads}) is not a multiple of {count}"
            )
        return replace(
            self, key_heads=self.key_heads // count, value_heads=self.value_heads // count
        )
