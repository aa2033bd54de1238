"""Sampler statistics: a wrong sampler still produces text, and only these reveal it."""

import math
from array import array
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from services.engine.checked_request import (
    DrySettings,
    LogitBias,
    MirostatSettings,
    SamplingSettings,
)
from services.engine.kernels.library import InstructionSet, limit_instruction_set, native
from services.engine.sampling.mirostat import Mirostat
from services.engine.sampling.penalties import Penalties
from services.engine.sampling.row import Row, uniform
from services.engine.sampling.sampler import sample
from services.engine.sampling.score import score
from tests.unit.engine.reference import SoFar, adjusted, probabilities

MIN_P = 0.47
"""No power of e for logits that are multiples of a half: rounding would decide who is in."""


@pytest.fixture(scope="module", autouse=True, params=["torch", "kernel"])
def how(request: pytest.FixtureRequest) -> Iterator[str]:
    """Run each test with torch, as on a GPU or without built kernels, and with the CPU's kernel."""
    if request.param == "kernel" and native is None:
        pytest.skip("the kernels were not built")
    with pytest.MonkeyPatch.context() as patch:
        if request.param == "torch":
            without_kernels(patch)
        yield request.param


def without_kernels(patch: pytest.MonkeyPatch) -> None:
    for module in ("sampler", "score"):
        patch.setattr(f"services.engine.sampling.{module}.native", None)


def make_row(
    *,
    temperature: float = 1.0,
    top_p: float = 1.0,
    top_k: int = 0,
    min_p: float = 0.0,
    seed: int = 0,
    choice: int = 0,
    position: int = 0,
    banned: tuple[int, ...] = (),
    mask: bytes | None = None,
) -> Row:
    sampling = SamplingSettings(temperature, top_p, top_k, min_p, seed)
    return Row(sampling, choice, position, banned, mask)


def chi_square_limit(freedom: int) -> float:
    """Return the limit that a right sampler exceeds once in 10,000 runs (Wilson, Hilferty 1931)."""
    spread = 2 / (9 * freedom)
    return freedom * (1 - spread + 3.719 * math.sqrt(spread)) ** 3


OFF = (1.0, 1.0, 0, 0.0, 0)
"""temperature, top_p, top_k, min_p and seed that restrict nothing"""


@pytest.mark.parametrize(
    "sampling",
    [
        SamplingSettings(*OFF),
        SamplingSettings(0.5, 1.0, 0, 0.0, 0),
        SamplingSettings(2.0, 1.0, 0, 0.0, 0),
        SamplingSettings(1.0, 1.0, 3, 0.0, 0),
        SamplingSettings(1.0, 0.7, 0, 0.0, 0),
        SamplingSettings(1.0, 1.0, 0, 0.2, 0),
        SamplingSettings(0.8, 0.9, 6, 0.05, 0),
        SamplingSettings(*OFF, frequency_penalty=0.4),
        SamplingSettings(*OFF, presence_penalty=-1.0),
        SamplingSettings(*OFF, repetition_penalty=1.3),
        SamplingSettings(*OFF, logit_bias=LogitBias(array("q", [2, 9]), array("f", [1.5, -4.0]))),
        SamplingSettings(*OFF, dry=DrySettings(0.8, 1.75, 1, frozenset({7}))),
        SamplingSettings(*OFF, mirostat=MirostatSettings(2.5, 0.1)),
        SamplingSettings(
            0.9, 0.95, 8, 0.02, 0, 0.3, 0.2, 1.2,
            LogitBias(array("q", [5]), array("f", [2.0])),
            DrySettings(0.5, 1.5, 1, frozenset()),
        ),
    ],
    ids=str,
)  # fmt: skip
def test_drawn_frequencies_follow_the_definition(sampling: SamplingSettings) -> None:
    logits = [1.0, 0.2, -0.5, 2.0, 0.0, 1.5, -3.0, 0.9, 0.4, -1.0]
    so_far = SoFar(prompt=[3, 5, 0, 8], generated=[3, 5, 1, 5, 3])
    draws, mu = 20_000, None
    penalties = None
    if sampling.penalises:
        penalties = Penalties(sampling, len(so_far.prompt))
        penalties.update(np.array([*so_far.prompt, *so_far.generated], dtype=np.int32))
    if sampling.mirostat is not None:
        mu = Mirostat(sampling.mirostat).mu
    rows = [
        Row(
            sampling,
            0,
            position,
            penalties=penalties,
            mirostat=Mirostat(sampling.mirostat) if sampling.mirostat is not None else None,
        )
        for position in range(draws)
    ]
    ids = sample(torch.tensor([logits]).expand(draws, -1).clone(), rows)
    expected = probabilities(adjusted(logits, sampling, so_far), sampling, mu)
    likely = [token for token, p in enumerate(expected) if p > 0]
    assert set(ids) <= set(likely)
    distance = sum(
        (ids.count(token) - draws * expected[token]) ** 2 / (draws * expected[token])
        for token in likely
    )
    assert distance < chi_square_limit(max(len(likely) - 1, 1))


@given(
    st.integers(0, 2**31),
    st.sampled_from([5, 300, 1000]),
    st.floats(0.1, 2.0),
    st.sampled_from([0.0, 0.3, 0.9, 0.999, 1.0]),
    st.sampled_from([0, 1, 5, 128]),
    st.sampled_from([0.0, 0.05, MIN_P, 1.0]),
    st.booleans(),
)
@settings(max_examples=150)
def test_only_tokens_within_the_limits_are_drawn(
    seed: int,
    vocabulary: int,
    temperature: float,
    top_p: float,
    top_k: int,
    min_p: float,
    coarse: bool,
) -> None:
    logits = torch.randn(vocabulary, generator=torch.Generator().manual_seed(seed)) * 2
    if coarse:
        logits = (logits * 2).round() / 2  # many equal logits
    row = make_row(temperature=temperature, top_p=top_p, top_k=top_k, min_p=min_p, seed=seed)
    expected = probabilities(logits.double().tolist(), row.settings)
    [token] = sample(logits.unsqueeze(0), [row])
    assert expected[token] > 0 or expected[token] == pytest.approx(0, abs=1e-12)
    if sum(p > 1e-9 for p in expected) == 1:
        assert expected[token] == pytest.approx(1)


@given(
    st.integers(0, 2**31),
    st.sampled_from([5, 64, 300, 5000]),
    st.floats(0.05, 3.0),
    st.just((1.0, 0, 0.0))
    | st.tuples(
        st.sampled_from([0.0, 0.3, 0.9, 0.999, 1.0]),
        st.sampled_from([0, 1, 5, 60, 700, 4999]),
        st.sampled_from([0.0, 0.01, MIN_P]),
    ),
    st.sampled_from(InstructionSet),
)
@settings(max_examples=200)
def test_seed_draws_the_same_tokens_on_every_machine(
    seed: int,
    vocabulary: int,
    temperature: float,
    limits: tuple[float, int, float],
    highest: InstructionSet,
) -> None:
    """By torch, and by the kernel with any instruction set."""
    logits = torch.randn(8, vocabulary, generator=torch.Generator().manual_seed(seed)) * 3
    logits[4:] = (logits[4:] * 2).round() / 2  # many equal logits
    top_p, top_k, min_p = limits
    settings = SamplingSettings(temperature, top_p, top_k, min_p, seed)
    rows = [Row(settings, 0, position) for position in range(8)]
    with limit_instruction_set(highest):
        drawn = sample(logits, rows)
    with pytest.MonkeyPatch.context() as patch:
        without_kernels(patch)
        by_torch = sample(logits, rows)
    for row, some, ours, theirs in zip(rows, logits, drawn, by_torch, strict=True):
        assert ours == theirs or is_between(some, row, ours, theirs)


def is_between(logits: Tensor, row: Row, one: int, other: int) -> bool:
    """Return whether the noise lies at the border of the two tokens' shares, up to rounding."""
    order = list(range(len(logits)))
    if row.settings.top_k or row.settings.top_p < 1 or row.settings.min_p:
        order.sort(key=lambda token: (-float(logits[token]), token))
    first, last = sorted((order.index(one), order.index(other)))
    shares = probabilities(logits.double().tolist(), row.settings)
    begin = sum(shares[token] for token in order[: first + 1])
    end = sum(shares[token] for token in order[:last])
    return begin - 1e-5 < row.noise < end + 1e-5 and end - begin < 1e-5


@pytest.mark.parametrize("limits", [{}, {"top_p": 0.9}, {"top_k": 3}, {"min_p": 0.1}], ids=str)
def test_broken_row_leaves_other_draws_alone(limits: dict[str, float]) -> None:
    """Its logits overflowed in the model."""
    logits = torch.randn(3, 300, generator=torch.Generator().manual_seed(5))
    row = make_row(seed=7, **limits)  # type: ignore[arg-type]
    [expected] = sample(logits[:1], [row])
    logits[1:] = torch.tensor([torch.nan, -torch.inf])[:, None]
    drawn = sample(logits, [row] * 3)
    assert drawn[0] == expected
    assert all(0 <= token < 300 for token in drawn)


def test_greedy_takes_the_most_likely_token() -> None:
    logits = torch.tensor([[0.0, 3.0, 1.0], [5.0, 3.0, 1.0]])
    assert sample(logits, [make_row(temperature=0), make_row(temperature=0)]) == [1, 0]


def test_draw_does_not_depend_on_other_rows() -> None:
    logits = torch.randn(6, 500, generator=torch.Generator().manual_seed(1))
    rows = [
        make_row(seed=1),
        make_row(temperature=0),
        make_row(seed=2, top_p=0.8),
        make_row(seed=3, top_k=5),
        make_row(seed=4, mask=bytes([255] * 20 + [0] * 43)),
        make_row(seed=5, temperature=0.3),
    ]
    together = sample(logits, rows)
    alone = [sample(logits[i : i + 1], [row])[0] for i, row in enumerate(rows)]
    assert together == alone


def test_only_ids_of_the_mask_are_drawn() -> None:
    logits = torch.randn(1, 30, generator=torch.Generator().manual_seed(2))
    allowed = {3, 17, 29}
    mask = bytearray(4)
    for token in allowed:
        mask[token // 8] |= 1 << token % 8
    drawn = {sample(logits, [make_row(position=i, mask=bytes(mask))])[0] for i in range(300)}
    assert drawn == allowed


def test_mask_takes_precedence_over_a_ban() -> None:
    logits = torch.zeros(1, 8)
    assert sample(logits, [make_row(banned=(3,), mask=bytes([0b1000]))]) == [3]
    assert sample(logits, [make_row(banned=(3,), mask=bytes([0b11000]))]) == [4]


def test_sampling_does_not_modify_the_logits() -> None:
    logits = torch.zeros(1, 8)
    sample(logits, [make_row(banned=(0, 1), mask=bytes([0b110]))])
    assert torch.equal(logits, torch.zeros(1, 8))


@given(st.integers(-(2**63), 2**63 - 1), st.integers(0, 127), st.integers(0, 10**6))
def test_noise_is_a_function_of_seed_choice_and_position(
    seed: int, choice: int, position: int
) -> None:
    value = uniform(seed, choice, position)
    assert 0 <= value < 1
    assert value == uniform(seed, choice, position)
    assert value != uniform(seed, choice + 1, position)
    assert value != uniform(seed, choice, position + 1)


@pytest.mark.parametrize("vocabulary", [50, 513, 5000])
@pytest.mark.parametrize(
    "highest", [InstructionSet.BASELINE, InstructionSet.AVX2, InstructionSet.AMX]
)
def test_scores_are_the_log_softmax(vocabulary: int, highest: InstructionSet) -> None:
    logits = torch.randn(4, vocabulary, generator=torch.Generator().manual_seed(3))
    expected = logits.double().log_softmax(-1)
    ids = [0, 7, 20, vocabulary - 1]
    with limit_instruction_set(highest):
        scores = score(logits, ids, 5)
    for row, (token, result) in enumerate(zip(ids, scores, strict=True)):
        assert result.logprob == pytest.approx(float(expected[row, token]), abs=1e-5)
        order = expected[row].argsort(descending=True).tolist()
        assert list(result.top_ids) == order[:5]
        assert list(result.top_logprobs) == pytest.approx(expected[row, order[:5]].tolist())
        assert result.rank == order.index(token) + 1


def test_broken_row_leaves_other_scores_alone() -> None:
    """Its logits overflowed in the model."""
    logits = torch.randn(3, 300, generator=torch.Generator().manual_seed(5))
    [expected] = score(logits[:1], [7], 3)
    logits[1:] = torch.tensor([torch.nan, -torch.inf])[:, None]
    first, *others = score(logits, [7] * 3, 3)
    assert first == expected
    assert all(len(other.top_ids) == 3 and math.isnan(other.logprob) for other in others)


def test_candidates_are_the_whole_of_a_small_vocabulary() -> None:
    [result] = score(torch.tensor([[0.0, 2.0, 1.0]]), [0], 20)
    assert list(result.top_ids) == [1, 2, 0]


def test_equal_candidates_are_listed_by_id(how: str) -> None:
    if how == "torch":
        pytest.skip("torch lists equal candidates in any order")
    logits = torch.zeros(1, 2000)
    logits[0, [1900, 3, 700]] = 1.0
    assert list(score(logits, [0], 5)[0].top_ids) == [3, 700, 1900, 0, 1]


def test_chosen_token_has_the_logprob_of_its_candidate() -> None:
    logits = torch.randn(64, 1000, generator=torch.Generator().manual_seed(4)) * 3
    best = logits.argmax(-1).tolist()
    for token, result in zip(best, score(logits, best, 3), strict=True):
        assert result.top_ids[0] == token
        assert result.logprob == result.top_logprobs[0]
