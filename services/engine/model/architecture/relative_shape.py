"""Shape of the parts that only Inkling's attention has."""

from dataclasses import dataclass

__all__ = ["RelativeShape"]


@dataclass(frozen=True, slots=True)
class RelativeShape:
    """Addends of scores by distance, and convolutions of attention's inputs and outputs.

    A convolution adds the weighted inputs of the last tokens to its own input, channel by channel.
    """

    rank: int
    """Count of a token's numbers for each head, which are factors of the table's rows"""
    extent: int
    """Number of the table's columns: distances with an addend. Farther tokens have none"""
    conv_width: int
    """Number of tokens that the convolutions of keys, values and the output read"""
    growth: float = 0.0
    """Scores are multiplied by 1 + growth * log(max(1, count / period)), where `count` is the
    number of the query's token, from 1; 0: scores are not multiplied"""
    period: int = 1
