"""Mirostat 2.0 equals its definition and reaches its target."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from services.engine.checked_request import MirostatSettings, SamplingSettings
from services.engine.sampling.mirostat import Mirostat
from services.engine.sampling.row import Row
from services.engine.sampling.sampler import sample
from tests.unit.engine.reference import probabilities


def make_row(mirostat: MirostatSettings, state: Mirostat, position: int, **fields: float) -> Row:
    temperature = fields.get("temperature", 1.0)
    sampling = SamplingSettings(temperature, 1.0, 0, 0.0, 1, mirostat=mirostat)
    return Row(sampling, 0, position, mirostat=state)


@given(
    st.integers(0, 2**31),
    st.sampled_from([4, 300, 1000]),
    st.floats(1.05, 60),
    st.floats(0.01, 1),
    st.floats(0.3, 2),
)
@settings(max_examples=50)
def test_mu_follows_the_definition(
    seed: int, vocabulary: int, target: float, rate: float, temperature: float
) -> None:
    generator = torch.Generator().manual_seed(seed)
    mirostat = MirostatSettings(target, rate)
    state = Mirostat(mirostat)
    mu = 2 * math.log2(target)
    for position in range(10):
        assert state.mu == pytest.approx(mu, rel=1e-4, abs=1e-4)
        logits = torch.randn(1, vocabulary, generator=generator) * 3
        row = make_row(mirostat, state, position, temperature=temperature)
        before = state.mu
        [token] = sample(logits, [row])
        drawn = probabilities(logits[0].double().tolist(), row.settings, before + 1e-4)
        assert drawn[token] > 0
        surprise = -math.log2(float((logits[0].double() / temperature).softmax(0)[token]))
        mu -= rate * (surprise - math.log2(target))


def test_mean_surprise_reaches_the_target() -> None:
    """Unrestricted draws have a mean surprise of 4.2 bits, the likeliest tokens 1.8."""
    mirostat = MirostatSettings(target_perplexity=8.0, learning_rate=0.1)
    state = Mirostat(mirostat)
    generator = torch.Generator().manual_seed(3)
    surprises = []
    for position in range(1500):
        logits = torch.randn(1, 500, generator=generator) * 3
        [token] = sample(logits, [make_row(mirostat, state, position)])
        surprises.append(-math.log2(float(logits[0].double().softmax(0)[token])))
    late = surprises[200:]
    assert sum(late) / len(late) == pytest.approx(3.0, abs=0.05)


@pytest.mark.parametrize("target", [1e-45, 1e-30, 0.5, 1.0, 1e30, 3e38])
@pytest.mark.parametrize("rate", [1e-45, 0.1, 3e38])
def test_extreme_targets_still_draw(target: float, rate: float) -> None:
    mirostat = MirostatSettings(target, rate)
    state = Mirostat(mirostat)
    logits = torch.randn(2, 300, generator=torch.Generator().manual_seed(4)) * 3
    neighbour = Row(SamplingSettings(1.0, 1.0, 0, 0.0, 7), 0, 0)
    for position in range(20):
        token, other = sample(logits, [make_row(mirostat, state, position), neighbour])
        assert 0 <= token < 300
        assert [other] == sample(logits[1:], [neighbour])
        assert math.isfinite(state.mu)


def test_mask_applies_under_mirostat() -> None:
    mirostat = MirostatSettings(1.5, 0.1)
    logits = torch.zeros(1, 16)
    logits[0, 0] = 20
    for position in range(50):
        sampling = SamplingSettings(1.0, 1.0, 0, 0.0, 1, mirostat=mirostat)
        state = Mirostat(mirostat)
        row = Row(sampling, 0, position, mask=bytes([0b1010, 0]), mirostat=state)
        assert sample(logits, [row])[0] in (1, 3)
