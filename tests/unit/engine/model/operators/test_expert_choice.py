"""Choice of experts: who computes a token decides what it becomes."""

import torch

from services.engine.model.architecture.routing import Routing, Scoring
from services.engine.model.operators.expert_choice import choose_experts

SCORES = torch.tensor([[2.0, 1.9, 0.5, -1.0]])


def test_bias_changes_the_choice_but_not_the_weights() -> None:
    bias = torch.tensor([0.0, 0.0, 0.0, 1.0])
    chosen, factors = choose_experts(Routing(2, normalized=False, has_bias=True), SCORES, bias)
    assert chosen.tolist() == [[3, 0]]
    torch.testing.assert_close(factors, SCORES.softmax(dim=1)[:, [3, 0]])


def test_least_sum_bounds_the_weights_of_unlikely_experts() -> None:
    bias = torch.tensor([-1.0, -1.0, -1.0, 1.0])
    routing = Routing(1, normalized=True, has_bias=True, least_sum=0.5)
    chosen, factors = choose_experts(routing, SCORES, bias)
    assert chosen.tolist() == [[3]]
    torch.testing.assert_close(factors, 2 * SCORES.softmax(dim=1)[:, [3]])


def test_sparse_mixer_weighs_an_expert_against_close_ones_alone() -> None:
    """The first is 5 % above the second, so that they share; the second has none beside it."""
    chosen, factors = choose_experts(Routing(2, normalized=False, jitter=0.05), SCORES, None)
    assert chosen.tolist() == [[0, 1]]
    shared = SCORES[:, :2].softmax(dim=1)[0, 0]
    torch.testing.assert_close(factors, torch.stack((shared, torch.tensor(1.0)))[None])


GROUPED = torch.tensor([[0.9, -4.0, 0.7, 0.6, 0.8, -3.0, -1.0, -2.0]])


def test_experts_come_from_the_groups_with_the_best_two() -> None:
    """The best expert of all is in a group whose second one is poor."""
    routing = Routing(
        2,
        normalized=True,
        scoring=Scoring.SIGMOID,
        groups=4,
        kept_groups=1,
        group_leaders=2,
        scale=2.5,
    )
    chosen, factors = choose_experts(routing, GROUPED, None)
    assert chosen.tolist() == [[2, 3]]
    weights = GROUPED.sigmoid()[:, [2, 3]]
    torch.testing.assert_close(factors, 2.5 * weights / weights.sum())


def test_experts_come_from_the_groups_with_the_best_one() -> None:
    routing = Routing(2, normalized=False, groups=4, kept_groups=2)
    chosen, factors = choose_experts(routing, GROUPED, None)
    assert chosen.tolist() == [[0, 4]]
    torch.testing.assert_close(factors, GROUPED.softmax(dim=1)[:, [0, 4]])
