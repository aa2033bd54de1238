"""Rules by which the scores of a router choose a token's experts."""

from dataclasses import dataclass
from enum import Enum

__all__ = ["Routing", "Scoring"]


class Scoring(Enum):
    """Functions that make experts' weights of scores; values are config.json's names."""

    SOFTMAX = "softmax"
    """Shares of a softmax over all experts"""
    SIGMOID = "sigmoid"
    """Sigmoid of each score"""
    SQRT_SOFTPLUS = "sqrtsoftplus"
    """Square root of each score's softplus"""


@dataclass(frozen=True, slots=True)
class Routing:
    """Rule by which scores choose a token's experts and weigh them."""

    per_token: int
    normalized: bool
    """True if the weights of a token's experts are scaled to sum to 1"""
    has_bias: bool = False
    """True if a bias is added to the weights for the choice alone"""
    least_sum: float = 0.0
    """Least sum of weights by which `normalized` divides"""
    jitter: float | None = None
    """Half the relative distance within which SparseMixer (https://arxiv.org/abs/2409.12136) weighs
    the best expert against the others; None: another router chooses"""

    scoring: Scoring = Scoring.SOFTMAX
    is_by_token: bool = False
    """True if a table states the experts of each token id, and scores only weigh them"""
    groups: int = 1
    """Number of equal groups of neighbouring experts"""
    kept_groups: int = 1
    """Number of groups among which a token's experts are chosen"""
    group_leaders: int = 1
    """Number of a group's best experts, whose weights together rank it"""
    scale: float = 1.0
    """Factor on all weights"""
    scales_inputs: bool = False
    """True if the weights multiply what experts read rather than what they return"""

    @property
    def is_plain(self) -> bool:
        """True if the highest shares of a softmax are chosen."""
        has_groups = self.kept_groups < self.groups
        is_softmax = self.jitter is None and self.scoring is Scoring.SOFTMAX and self.scale == 1
        return is_softmax and not self.has_bias and not has_groups
