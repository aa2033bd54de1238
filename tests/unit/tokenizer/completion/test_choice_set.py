"""best_of answers the candidates that are likeliest per token."""

import math

import pytest

from services.tokenizer.completion.choice_set import rank


@pytest.mark.parametrize(
    ("candidates", "expected"),
    [
        ([[-3.0], [-1.0], [-2.0]], [1, 2, 0]),
        ([[-1.0, -1.0, -1.0], [-2.0]], [0, 1]),  # by the mean: the sum would prefer the shorter
        ([[-1.0], [-0.5, -1.5], [-1.0]], [0, 1, 2]),  # of equals, the first
        ([[], [-50.0], []], [1, 0, 2]),  # no tokens: last
        ([[-math.inf, -1.0], [], [-9.0]], [2, 0, 1]),
        ([[-0.1] * 10, [-0.1]], [0, 1]),  # summed exactly, or rounding would decide
    ],
)
def test_the_likeliest_per_token_is_first(
    candidates: list[list[float]], expected: list[int]
) -> None:
    assert rank(candidates) == expected
