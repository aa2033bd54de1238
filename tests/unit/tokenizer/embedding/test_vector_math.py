"""Products of vectors, as numpy computes them whole."""

import numpy as np
import pytest

from services.tokenizer.embedding import vector_math


def test_long_query_is_multiplied_in_parts() -> None:
    query, document = (
        np.random.default_rng(seed).normal(size=(1100, 8)).astype(np.float32) for seed in (1, 2)
    )
    kept = [[True] * 1100]
    [score] = vector_math.maxsims(8, query.tobytes(), kept, document.tobytes(), kept)
    assert score == pytest.approx((query @ document.T).max(axis=1).sum(), rel=1e-5)


@pytest.mark.parametrize("count", [1, 9])
def test_scores_are_products_or_cosines_of_each_pair(count: int) -> None:
    """A single first vector belongs to all second ones."""
    generator = np.random.default_rng(0)
    first, second = (generator.normal(size=(n, 2000)).astype(np.float32) for n in (count, 9))
    expected = (first * second).sum(axis=1)
    products = vector_math.products(first.tobytes(), second.tobytes(), 2000)
    np.testing.assert_allclose(products, expected, rtol=1e-3, atol=1e-3)
    lengths = np.linalg.norm(first, axis=1) * np.linalg.norm(second, axis=1)
    cosines = vector_math.cosines(first.tobytes(), second.tobytes(), 2000)
    np.testing.assert_allclose(cosines, expected / lengths, atol=1e-6)
