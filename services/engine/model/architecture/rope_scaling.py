"""Changes of RoPE's frequencies that checkpoints state, beside their base and their width."""

from dataclasses import dataclass
from typing import TypeAlias

__all__ = [
    "DividedRope",
    "Llama3Rope",
    "LongRope",
    "PartialRope",
    "RopeScaling",
    "StretchedRope",
    "YarnRope",
]


@dataclass(frozen=True, slots=True)
class DividedRope:
    """All frequencies are divided by the same number."""

    factor: float


@dataclass(frozen=True, slots=True)
class StretchedRope:
    """The lowest frequency is divided by `factor`, higher ones by smaller powers of it."""

    factor: float


@dataclass(frozen=True, slots=True)
class PartialRope:
    """The first pairs alone rotate, with the frequencies of a whole head divided by a number."""

    pairs: int
    factor: float


@dataclass(frozen=True, slots=True)
class Llama3Rope:
    """Long wavelengths are stretched, short ones stay, those between are interpolated."""

    factor: float
    low: float
    """Number of turns within `original` tokens below which a wavelength is long"""
    high: float
    """Number of turns within `original` tokens above which a wavelength is short"""
    original: float
    """Context length before the scaling"""


@dataclass(frozen=True, slots=True)
class YarnRope:
    """NTK-by-parts interpolation of YaRN (https://arxiv.org/abs/2309.00071)."""

    factor: float
    low: float
    """Pair up to which frequencies stay"""
    high: float
    """Pair from which frequencies are divided by `factor`"""


@dataclass(frozen=True, slots=True)
class LongRope:
    """Each frequency is divided by a number of its own (https://arxiv.org/abs/2402.13753)."""

    divisors: tuple[float, ...]


RopeScaling: TypeAlias = (
    DividedRope | StretchedRope | PartialRope | Llama3Rope | YarnRope | LongRope
)
