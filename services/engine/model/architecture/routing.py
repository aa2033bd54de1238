"""Choice of a token's experts by the scores of a router."""

from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = ["Routing"]


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
    the best expert against the others; None: weights are parts of a softmax over all experts"""

    @property
    def is_plain(self) -> bool:
        """True if the highest parts of a softmax are chosen."""
        return not self.has_bias and self.jitter is None

    def choose(self, scores: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return the numbers of each row's experts and their weights, [n, per_token] each.

        scores: float32 [n, experts]; bias: float32 [experts]. Returns int64 and float32.
        """
        if self.jitter is not None:
            return self._mix_sparsely(scores, self.jitter)
        weights = scores.softmax(dim=1)
        if bias is None:
            factors, chosen = weights.topk(self.per_token, dim=1)
        else:
            chosen = (weights + bias).topk(self.per_token, dim=1).indices
            factors = weights.gather(1, chosen)
        if self.normalized:
            sums = factors.sum(dim=1, keepdim=True)
            factors /= sums.clamp(min=self.least_sum) if self.least_sum else sums
        return chosen, factors

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
