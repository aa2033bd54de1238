"""Products of vectors that are wider than one step of the computation."""

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
