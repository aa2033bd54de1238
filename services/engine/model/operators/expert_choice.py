"""Choice of a token's experts by the scores of a router, computed by torch."""

import torch
from torch import Tensor
from torch.nn.functional import softplus

from services.engine.model.architecture.routing import Routing, Scoring

__all__ = ["choose_experts", "weigh_experts"]


def choose_experts(routing: Routing, scores: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return the numbers of each row's experts and their weights, [n, per_token] each.

    scores: float32 [n, experts]; bias: float32 [experts]. Returns int64 and float32.
    """
    if routing.jitter is not None:
        return _mix_sparsely(routing, scores, routing.jitter)
    weights = _weights(routing.scoring, scores)
    # equal weights may have rounded away which score is higher
    ranked = scores if bias is None else weights + bias
    if routing.kept_groups < routing.groups:
        ranked = _in_best_groups(routing, weights if bias is None else ranked)
    chosen = ranked.topk(routing.per_token, dim=1).indices
    return chosen, _factors(routing, weights, chosen)


def weigh_experts(routing: Routing, scores: Tensor, chosen: Tensor) -> Tensor:
    """Return the weights of experts `chosen` by another rule, int64 [n, per_token]."""
    return _factors(routing, _weights(routing.scoring, scores), chosen)


def _weights(scoring: Scoring, scores: Tensor) -> Tensor:
    """Return the weights of all experts, float32 [n, experts]."""
    if scoring is Scoring.SOFTMAX:
        return scores.softmax(dim=1)
    return scores.sigmoid() if scoring is Scoring.SIGMOID else softplus(scores).sqrt()


def _factors(routing: Routing, weights: Tensor, chosen: Tensor) -> Tensor:
    factors = weights.gather(1, chosen)
    if routing.normalized:
        sums = factors.sum(dim=1, keepdim=True)
        factors /= sums.clamp(min=routing.least_sum) if routing.least_sum else sums
    return factors if routing.scale == 1 else factors * routing.scale


def _in_best_groups(routing: Routing, ranked: Tensor) -> Tensor:
    """Return the ranks with minus infinity outside the best groups."""
    groups = ranked.view(len(ranked), routing.groups, -1)
    ranks = groups.topk(routing.group_leaders, dim=2).values.sum(dim=2)
    best = ranks.topk(routing.kept_groups, dim=1).indices
    is_left_out = torch.ones_like(ranks, dtype=torch.bool).scatter_(1, best, False)
    return groups.masked_fill(is_left_out[..., None], -torch.inf).flatten(1)


def _mix_sparsely(routing: Routing, scores: Tensor, jitter: float) -> tuple[Tensor, Tensor]:
    """Weigh the best expert against those close to it, then the next one without the best."""
    chosen, factors, left = [], [], scores
    for _ in range(routing.per_token):
        best, index = left.max(dim=1, keepdim=True)
        distance = (best - scores) / scores.abs().maximum(best)
        weights = left.masked_fill(distance > 2 * jitter, -torch.inf).softmax(dim=1)
        chosen.append(index)
        factors.append(weights.gather(1, index))
        left = left.scatter(1, index, -torch.inf)
    return torch.cat(chosen, dim=1), torch.cat(factors, dim=1)
