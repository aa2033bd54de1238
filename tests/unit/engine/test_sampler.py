"""A wrong sampler still produces text; only its statistics give it away."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from services.engine.messages import SamplingSettings
from services.engine.sampler import Row, sample, score, uniform


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


def reference(logits: list[float], row: Row) -> list[float]:
    """Probabilities by the definition: temperature, top-k, top-p, min-p, one after another."""
    s = row.settings
    tempered = [x / s.temperature for x in logits]
    top = max(tempered)
    weights = [math.exp(x - top) for x in tempered]
    order = sorted(range(len(logits)), key=lambda i: (-logits[i], i))
    if s.top_k:
        order = order[: s.top_k]
    total = sum(weights[i] for i in order)
    kept, mass = [], 0.0
    for i in order:
        if mass < s.top_p or not kept:
            kept.append(i)
        mass += weights[i] / total
    kept = [i for i in kept if weights[i] >= s.min_p * weights[order[0]]]
    total = sum(weights[i] for i in kept)
    return [weights[i] / total if i in kept else 0.0 for i in range(len(logits))]


@pytest.mark.parametrize(
    "row",
    [
        make_row(),
        make_row(temperature=0.5),
        make_row(temperature=2.0),
        make_row(top_k=3),
        make_row(top_p=0.7),
        make_row(min_p=0.2),
        make_row(temperature=0.8, top_k=6, top_p=0.9, min_p=0.05),
    ],
    ids=str,
)
def test_drawn_frequencies_follow_the_definition(row: Row) -> None:
    logits = [1.0, 0.2, -0.5, 2.0, 0.0, 1.5, -3.0, 0.9, 0.4, -1.0]
    draws = 20_000
    rows = [Row(row.settings, 0, position) for position in range(draws)]
    ids = sample(torch.tensor([logits]).expand(draws, -1).clone(), rows)
    for token, probability in enumerate(reference(logits, row)):
        seen = ids.count(token) / draws
        deviation = math.sqrt(probability * (1 - probability) / draws)
        assert abs(seen - probability) <= 5 * deviation + 1e-9, token


@given(
    st.integers(0, 2**31),
    st.sampled_from([5, 300, 1000]),
    st.floats(0.1, 2.0),
    st.sampled_from([0.0, 0.3, 0.9, 0.999, 1.0]),
    st.sampled_from([0, 1, 5, 128]),
    st.sampled_from([0.0, 0.05, 0.5, 1.0]),
    st.booleans(),
)
@settings(max_examples=150, deadline=None)
def test_only_tokens_that_the_definition_leaves_are_drawn(
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
    expected = reference(logits.double().tolist(), row)
    [token] = sample(logits.unsqueeze(0), [row])
    assert expected[token] > 0 or expected[token] == pytest.approx(0, abs=1e-12)
    if sum(p > 1e-9 for p in expected) == 1:
        assert expected[token] == pytest.approx(1)


def test_greedy_takes_the_most_likely_token() -> None:
    logits = torch.tensor([[0.0, 3.0, 1.0], [5.0, 3.0, 1.0]])
    assert sample(logits, [make_row(temperature=0), make_row(temperature=0)]) == [1, 0]


def test_neighbours_do_not_change_a_draw() -> None:
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


def test_a_mask_is_never_left() -> None:
    logits = torch.randn(1, 30, generator=torch.Generator().manual_seed(2))
    allowed = {3, 17, 29}
    mask = bytearray(4)
    for token in allowed:
        mask[token // 8] |= 1 << token % 8
    drawn = {sample(logits, [make_row(position=i, mask=bytes(mask))])[0] for i in range(300)}
    assert drawn == allowed


def test_a_mask_outweighs_a_ban() -> None:
    logits = torch.zeros(1, 8)
    assert sample(logits, [make_row(banned=(3,), mask=bytes([0b1000]))]) == [3]
    assert sample(logits, [make_row(banned=(3,), mask=bytes([0b11000]))]) == [4]


def test_sampling_leaves_the_logits_that_are_reported_alone() -> None:
    logits = torch.zeros(1, 8)
    sample(logits, [make_row(banned=(0, 1), mask=bytes([0b110]))])
    assert torch.equal(logits, torch.zeros(1, 8))


@given(st.integers(-(2**63), 2**63 - 1), st.integers(0, 127), st.integers(0, 10**6))
def test_noise_is_a_function_of_its_arguments(seed: int, choice: int, position: int) -> None:
    value = uniform(seed, choice, position)
    assert 0 <= value < 1
    assert value == uniform(seed, choice, position)
    assert value != uniform(seed, choice + 1, position)
    assert value != uniform(seed, choice, position + 1)


def test_scores_are_the_log_softmax() -> None:
    logits = torch.randn(4, 50, generator=torch.Generator().manual_seed(3))
    expected = logits.double().log_softmax(-1)
    scores = score(logits, [0, 7, 20, 49], 5)
    for row, (token, result) in enumerate(zip([0, 7, 20, 49], scores, strict=True)):
        assert result.logprob == pytest.approx(float(expected[row, token]), abs=1e-5)
        order = expected[row].argsort(descending=True).tolist()
        assert list(result.top_ids) == order[:5]
        assert result.rank == order.index(token) + 1


def test_the_chosen_token_has_the_logprob_of_its_own_candidate() -> None:
    logits = torch.randn(64, 1000, generator=torch.Generator().manual_seed(4)) * 3
    best = logits.argmax(-1).tolist()
    for token, result in zip(best, score(logits, best, 3), strict=True):
        assert result.top_ids[0] == token
        assert result.logprob == result.top_logprobs[0]
