"""Draws on a GPU: in Triton's interpreter."""

import os

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from services.engine.checked_request import SamplingSettings
from services.engine.sampling import sampler
from services.engine.sampling.row import Row

kernel = pytest.importorskip("services.engine.sampling.draw_kernels")
pytestmark = pytest.mark.skipif(
    os.environ.get("TRITON_INTERPRET") != "1", reason="needs the interpreter"
)


@given(
    seed=st.integers(0, 2**31),
    vocabulary=st.sampled_from([1, 255, 256, 257, 2500]),
    temperature=st.sampled_from([1e-40, 0.3, 1.0, 3.0]),
)
@settings(max_examples=12, deadline=None)
def test_kernel_draws_the_same_tokens(seed: int, vocabulary: int, temperature: float) -> None:
    logits = torch.randn(3, vocabulary, generator=torch.Generator().manual_seed(seed)) * 3
    logits[1, vocabulary // 2 :] = -torch.inf  # excluded by a mask
    logits[1, 0] = 1.0
    rows = [Row(SamplingSettings(temperature, 1.0, 0, 0.0, seed), 0, i) for i in range(3)]
    columns = sampler._columns(rows, logits.device)
    weights = sampler._weights(logits, columns)
    largest = logits.amax(dim=-1, keepdim=True)
    sums = kernel.sum_weights(logits, largest, columns.scale, 256)
    assert torch.allclose(sums.sum(dim=-1), weights.double().sum(dim=-1), rtol=1e-6)
    drawn = kernel.pick(logits, largest, columns.scale, columns.noise, sums, 256)
    assert torch.equal(drawn, sampler._pick(weights, columns.noise).squeeze(1))


@given(
    seed=st.integers(0, 2**31),
    vocabulary=st.sampled_from([5, 300, 1000]),
    limits=st.tuples(
        st.sampled_from([0.0, 0.3, 0.9, 0.999, 1.0]),
        st.sampled_from([0, 1, 5, 60, 256, 700]),
        st.sampled_from([0.0, 0.01, 0.5]),
    ),
    temperature=st.sampled_from([1e-40, 0.3, 1.0, 3.0]),
)
@settings(max_examples=15, deadline=None, derandomize=True)
def test_kernel_draws_the_same_restricted_tokens(
    seed: int, vocabulary: int, limits: tuple[float, int, float], temperature: float
) -> None:
    logits = torch.randn(4, vocabulary, generator=torch.Generator().manual_seed(seed)) * 3
    logits[1, 3:] = -torch.inf  # excluded by a mask
    logits[2:] = (logits[2:] * 2).round() / 2  # many equal logits
    top_p, top_k, min_p = limits
    rows = [
        Row(SamplingSettings(temperature, top_p, top_k if i else 0, min_p, seed), 0, i)
        for i in range(4)
    ]
    columns = sampler._columns(rows, logits.device)
    found, ids = sampler._candidates(logits)
    sums = kernel.sum_weights(logits, found[:, :1], columns.scale, 256)
    more = ids.shape[1] < vocabulary
    drawn, settled = kernel.pick_restricted(found, ids, sums, columns[:5], sampler._NO_LIMIT, more)
    expected, expected_settled, _ = sampler._draw_candidates(logits, rows, columns)
    assert torch.equal(settled, expected_settled)
    assert torch.equal(drawn[settled], expected[settled])


def test_broken_row_is_marked_and_leaves_the_others_alone() -> None:
    logits = torch.randn(3, 300, generator=torch.Generator().manual_seed(5))
    rows = [Row(SamplingSettings(1.0, 1.0, 0, 0.0, 7), 0, i) for i in range(3)]
    columns = sampler._columns(rows, logits.device)

    def draw() -> list[int]:
        largest = logits.amax(dim=-1, keepdim=True)
        sums = kernel.sum_weights(logits, largest, columns.scale, 256)
        ids = kernel.pick(logits, largest, columns.scale, columns.noise, sums, 256)
        assert ((ids >= 0) & (ids < 300)).all()
        marked: list[int] = kernel.mark_nan_ids(logits, ids).tolist()
        return marked

    first, _, third = draw()
    logits[1] = torch.nan
    assert draw() == [first, -1, third]
