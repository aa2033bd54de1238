"""Shape of the parts of Inkling's attention beside queries, keys and values."""

from dataclasses import dataclass

__all__ = ["RelativeShape"]


@dataclass(frozen=True, slots=True)
class RelativeShape:
    """Addends of scores that depend on the distance, and convolutions of what attention reads and
    returns.

    A convolution adds the weighted inputs of the last tokens to its own input, channel by channel.
    """

    rank: int
    """Numbers that a token has for each head, the factors of the table's rows"""
    extent: int
    """Columns of the table: distances that have an addend. Farther tokens have none"""
    conv_width: int
    """Tokens that the convolutions of keys, values and the output read"""
    growth: float = 0.0
    """Scores are multiplied by 1 + growth * log(max(1, count / period)), where `count` is the
    number of the query's token, from 1; 0: they are not"""
    period: int = 1
