"""Logit adjustments equal their definitions, whatever other rows of the batch use."""

import math
from array import array
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from services.engine.checked_request import DrySettings, LogitBias, SamplingSettings
from services.engine.sampling.adjustments import adjust
from services.engine.sampling.dry import Repetitions
from services.engine.sampling.penalties import Penalties
from services.engine.sampling.row import Row
from services.engine.sampling.sampler import sample
from tests.unit.engine.reference import SoFar, adjusted, dry_penalties

VOCABULARY = 24
SINGLE = float(np.finfo(np.float32).max)
TINY = 1e-45  # the least positive float32


def make_bias(biases: dict[int, float]) -> LogitBias | None:
    return LogitBias(array("q", biases), array("f", biases.values())) if biases else None


def make_settings(
    *,
    temperature: float = 1.0,
    frequency: float = 0.0,
    presence: float = 0.0,
    repetition: float = 1.0,
    bias: dict[int, float] | None = None,
    dry: DrySettings | None = None,
    window: int | None = None,
) -> SamplingSettings:
    return SamplingSettings(
        temperature, 1.0, 0, 0.0, 1, frequency, presence, repetition, make_bias(bias or {}), dry,
        penalty_window=window,
    )  # fmt: skip


def make_mask(allowed: Sequence[int]) -> bytes:
    mask = bytearray(-(-VOCABULARY // 8))
    for token in allowed:
        mask[token // 8] |= 1 << token % 8
    return bytes(mask)


def make_row(sampling: SamplingSettings, so_far: SoFar, position: int = 0) -> Row:
    """Return a row whose penalties were updated token by token."""
    penalties = None
    if sampling.penalises:
        penalties = Penalties(sampling, len(so_far.prompt))
        tokens = np.array([*so_far.prompt, *so_far.generated], dtype=np.int32)
        for length in range(len(so_far.prompt), len(tokens) + 1):
            penalties.update(tokens[:length])
    mask = None if so_far.allowed is None else make_mask(list(so_far.allowed))
    return Row(sampling, 0, position, tuple(so_far.banned), mask, penalties)


IDS = st.integers(0, VOCABULARY - 1)
TOKENS = st.integers(0, 5)  # few, so that runs repeat
DRY = st.builds(
    DrySettings,
    st.sampled_from([0.8, 5.0, SINGLE]),
    st.sampled_from([1.0, 1.75, 1e30]),
    st.sampled_from([0, 1, 2, 5, 2**32 - 1]),
    st.frozensets(TOKENS, max_size=2),
)
SAMPLING = st.builds(
    make_settings,
    frequency=st.sampled_from([0.0, 0.5, -2.0, 2.0]),
    presence=st.sampled_from([0.0, 0.5, -2.0, 2.0]),
    repetition=st.sampled_from([1.0, 1.3, 0.5, 2.0, TINY]),
    bias=st.dictionaries(IDS, st.floats(-100, 100, width=32), max_size=VOCABULARY),
    dry=st.one_of(st.none(), DRY),
    window=st.sampled_from([None, 0, 1, 4, 10, 2**32 - 1]),
)
SO_FAR = st.builds(
    SoFar,
    st.lists(TOKENS, min_size=1, max_size=30),
    st.lists(TOKENS, max_size=20),
    st.one_of(st.none(), st.sets(IDS, min_size=1)),
    st.sets(IDS, max_size=4),
)


@given(
    st.lists(st.tuples(SAMPLING, SO_FAR), min_size=1, max_size=6),
    st.integers(0, 2**31),
)
@settings(max_examples=200)
def test_adjusted_logits_equal_the_definitions(
    asked: list[tuple[SamplingSettings, SoFar]], seed: int
) -> None:
    """Each row has its own settings."""
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(len(asked), VOCABULARY, generator=generator) * 4
    got = logits.clone()
    adjust(got, [make_row(sampling, so_far) for sampling, so_far in asked])
    for i, (sampling, so_far) in enumerate(asked):
        expected = adjusted(logits[i].tolist(), sampling, so_far)
        assert got[i].tolist() == pytest.approx(expected, rel=1e-5, abs=1e-3)
        assert not got[i].isnan().any()


@given(st.lists(TOKENS, min_size=1, max_size=60), st.integers(1, 60), DRY)
@settings(max_examples=300)
def test_dry_does_not_depend_on_how_tokens_arrive(
    tokens: list[int], begin: int, dry: DrySettings
) -> None:
    """A whole prompt and single tokens give the same penalties."""
    ids = np.array(tokens, dtype=np.int32)
    repetitions = Repetitions(dry)
    for length in range(min(begin, len(tokens)), len(tokens) + 1):
        repetitions.update(ids[:length])
    losses: dict[int, float] = {}
    for token, loss in zip(*repetitions.penalties(ids), strict=True):
        losses[int(token)] = max(losses.get(int(token), 0.0), float(loss))
    assert losses == pytest.approx(dry_penalties(tokens, dry), rel=1e-5)


def test_dry_penalises_the_token_that_extends_a_repetition() -> None:
    """After 1 2 3 … 1 2, a 3 extends a repetition of two tokens."""
    repetitions = Repetitions(DrySettings(1.0, 2.0, 2, frozenset()))
    tokens = np.array([1, 2, 3, 9, 1, 2], dtype=np.int32)
    repetitions.update(tokens)
    assert [column.tolist() for column in repetitions.penalties(tokens)] == [[3], [1.0]]


EXTREME = [
    make_settings(bias=dict.fromkeys(range(VOCABULARY), -100.0)),
    make_settings(bias={3: 100.0, VOCABULARY - 1: 100.0}),
    make_settings(repetition=TINY),
    make_settings(repetition=TINY, temperature=TINY),
    make_settings(repetition=TINY, frequency=-2.0, presence=-2.0),
    make_settings(dry=DrySettings(SINGLE, SINGLE, 0, frozenset())),
    make_settings(dry=DrySettings(1.0, 1e30, 2, frozenset()), repetition=TINY, temperature=TINY),
    make_settings(temperature=0.0, dry=DrySettings(SINGLE, 1e30, 0, frozenset())),
]


@pytest.mark.parametrize("sampling", EXTREME, ids=str)
@pytest.mark.parametrize("allowed", [None, {5}, {0, 1, 7}], ids=str)
@pytest.mark.parametrize("banned", [(), (5,), tuple(range(VOCABULARY))], ids=len)
def test_extreme_values_draw_allowed_ids_and_leave_other_rows_alone(
    sampling: SamplingSettings, allowed: set[int] | None, banned: tuple[int, ...]
) -> None:
    logits = torch.randn(3, VOCABULARY, generator=torch.Generator().manual_seed(1)) * 10
    neighbour = Row(make_settings(), 1, 2)
    so_far = SoFar([0, 1] * 60 + [2], [0, 1] * 60, allowed, banned)
    for position in range(20):
        row = make_row(sampling, so_far, position)
        first, token, last = sample(logits, [neighbour, row, neighbour])
        assert 0 <= token < VOCABULARY
        assert allowed is None or token in allowed
        left = (allowed or set(range(VOCABULARY))) - set(banned)
        assert token in left or not left
        assert [first] == sample(logits[:1], [neighbour])
        assert [last] == sample(logits[2:], [neighbour])


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_row_of_nan_leaves_other_rows_alone(temperature: float) -> None:
    """No parameter produces NaN, but a broken model might."""
    logits = torch.randn(3, VOCABULARY, generator=torch.Generator().manual_seed(2))
    row = Row(make_settings(temperature=temperature), 0, 0)
    expected = sample(logits, [row, row, row])
    logits[1] = math.nan
    first, token, last = sample(logits, [row, row, row])
    assert (first, last) == (expected[0], expected[2])
    assert 0 <= token < VOCABULARY
