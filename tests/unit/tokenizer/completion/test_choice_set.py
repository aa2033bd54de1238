"""best_of selects the candidates with the highest mean logprob."""

import math

import pytest

from services.tokenizer.completion.choice_set import rank


@pytest.mark.parametrize(
    ("candidates", "expected"),
    [
        ([[-3.0], [-1.0], [-2.0]], [1, 2, 0]),
        ([[-1.0, -1.0, -1.0], [-2.0]], [0, 1]),  # the sum would prefer the shorter one
        ([[-1.0], [-0.5, -1.5], [-1.0]], [0, 1, 2]),  # the first of equals
        ([[], [-50.0], []], [1, 0, 2]),  # candidates without tokens are last
        ([[-math.inf, -1.0], [], [-9.0]], [2, 0, 1]),
        ([[-0.1] * 10, [-0.1]], [0, 1]),  # an inexact sum would let rounding decide
    ],
)
def test_candidate_with_highest_mean_logprob_is_first(
    candidates: list[list[float]], expected: list[int]
) -> None:
    assert rank(candidates) == expected
