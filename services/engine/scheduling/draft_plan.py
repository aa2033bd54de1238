"""Plan of the draft model's passes before a step."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from services.engine.scheduling.sequence import TokenSequence
from services.engine.scheduling.speculation import DraftKind

__all__ = ["DraftLimits", "DraftPart", "DraftResult", "PassTime"]


@dataclass(frozen=True, slots=True)
class DraftLimits:
    """Limits of a draft model."""

    context_length: int
    """Most tokens of a sequence"""
    pass_tokens: int
    """Most tokens of a pass"""
    kind: DraftKind = DraftKind.MODEL
    """Source of the draft tokens; all but a draft model read hidden states of the engine's model"""
    shares_pages: bool = False
    """True if it reads the pages of the engine's model, and its hidden states, too"""
    layers: int = 1
    """Number of layers of a head of which each makes one draft token, all in the first pass; 1: its
    passes make one token each"""


@dataclass(frozen=True, slots=True)
class DraftPart:
    """Tokens of one sequence that the draft model computes."""

    sequence: TokenSequence
    start: int
    """Index of the first token that it computes"""
    end: int
    """Index after the last one, which is the newest token if draft tokens are made"""
    length: int
    """Number of draft tokens to make; 0 = the draft model only computes a part of the prompt"""
    first_block: int = 0
    """Number of blocks at the sequence's beginning that the draft model never sees"""

    @property
    def count(self) -> int:
        """Number of tokens of the first pass."""
        return self.end - self.start


class PassTime(NamedTuple):
    """Duration of one pass."""

    tokens: int
    seconds: float


class DraftResult(NamedTuple):
    """Draft tokens that the draft model has made of a plan, and the time of its passes."""

    tokens: Sequence[Sequence[int]]
    """Draft tokens of each part"""
    passes: Sequence[PassTime]
