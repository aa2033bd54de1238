"""Choice of a token's experts by the scores of a router."""

from dataclasses import dataclass
from enum import Enum

import torch
from torch import Tensor
from torch.nn.functional import softplus

__all__ = ["Routing", "Scoring"]


class Scoring(Enum):
    """Functions that make experts' weights of scores; values are config.json's names."""

    SOFTMAX = "softmax"
    """Shares of a softmax over all experts"""
    SIGMOID = "sigmoid"
    """Sigmoid of each score"""
    SQRT_SOFTPLUS = "sqrtsoftplus"
    """Square root of each score's softplus"""

    def weights(self, scores: Tensor) -> Tensor:
        """Return the weights of all experts, float32 [n, experts]."""
        if self is Scoring.SOFTMAX:
            return scores.softmax(dim=1)
        return scores.sigmoid() if self is Scoring.SIGMOID else softplus(scores).sqrt()


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

    def choose(self, scores: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return the numbers of each row's experts and their weights, [n, per_token] each.

        scores: float32 [n, experts]; bias: float32 [experts]. Returns int64 and float32.
        """
        if self.jitter is not None:
            return self._mix_sparsely(scores, self.jitter)
        weights = self.scoring.weights(scores)
        # equal weights may have rounded away which score is higher
        ranked = scores if bias is None else weights + bias
        if self.kept_groups < self.groups:
            ranked = self._in_best_groups(weights if bias is None else ranked)
        chosen = ranked.topk(self.per_token, dim=1).indices
        return chosen, self._factors(weights, chosen)

    def weigh(self, scores: Tensor, chosen: Tensor) -> Tensor:
        """Return the weights of experts `chosen` by another rule, int64 [n, per_token]."""
        return self._factors(self.scoring.weights(scores), chosen)

    def _factors(self, weights: Tensor, chosen: Tensor) -> Tensor:
        factors = weights.gather(1, chosen)
        if self.normalized:
            sums = factors.sum(dim=1, keepdim=True)
            factors /= sums.clamp(min=self.least_sum) if self.least_sum else sums
        return factors if self.scale == 1 else factors * self.scale

    def _in_best_groups(self, ranked: Tensor) -> Tensor:
        """Return the ranks with minus infinity outside the best groups."""
        groups = ranked.view(len(ranked), self.groups, -1)
        ranks = groups.topk(self.group_leaders, dim=2).values.sum(dim=2)
        best = ranks.topk(self.kept_groups, dim=1).indices
        is_left_out = torch.ones_like(ranks, dtype=torch.bool).scatter_(1, best, False)
        return groups.masked_fill(is_left_out[..., None], -torch.inf).flatten(1)

    def _mix_sparsely(self, scores: Tensor, jitter: float) -> tuple[Tensor, Tensor]:
        """Weigh the best expert against those close to it, then the next one without the best."""
        chosen, factors, left = [], [], scores
        for _ in range(self.per_token):
            best, index = left.max(dim=1, keepdim=True)
            distance = (best - scores) / scores.abs().maximum(best)
            weights = left.masked_fill(distance > 2 * jitter, -torch.inf).softmax(dim=1)
            chosen.append(index)
            factors.append(weights.gather(1, index))
            left = left.scatter(1, index, -torch.inf)
        return torch.cat(chosen, dim=1), torch.cat(factors, dim=1)
