"""Draft tokens: rejected ones cost time, and they must never be chosen where they cost more."""

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.engine.scheduling.draft_lengths import DraftLengths, MadeDraft
from services.engine.scheduling.predicted_text import PredictedText
from services.engine.scheduling.prompt_lookup import NgramIndex
from services.engine.scheduling.speculation import Draft, DraftKind, Speculation


def array(*tokens: int) -> npt.NDArray[np.int32]:
    return np.array(tokens, dtype=np.int32)


def propose(tokens: npt.NDArray[np.int32], width: int) -> list[int]:
    return NgramIndex().propose(tokens, width)


def test_tokens_that_followed_the_ngram_before_are_proposed() -> None:
    assert propose(array(1, 2, 3, 4, 5, 6, 9, 1, 2, 3), 3) == [4, 5, 6]


def test_longest_ngram_decides_then_latest_occurrence() -> None:
    assert propose(array(1, 2, 3, 7, 0, 2, 3, 8, 1, 2, 3), 1) == [7]
    assert propose(array(2, 3, 7, 0, 2, 3, 8, 1, 2, 3), 1) == [8]


def test_repetition_is_proposed_to_continue() -> None:
    assert propose(array(9, 5, 6, 7, 5, 6, 7, 5, 6), 7) == [7, 5, 6, 7, 5, 6, 7]
    assert propose(array(9, 4, 4, 4), 3) == [4, 4, 4]


def test_new_ngram_gets_no_draft() -> None:
    assert propose(array(1, 2, 3, 4), 4) == []
    assert propose(array(1), 4) == []


@given(st.lists(st.integers(0, 2), max_size=40), st.integers(1, 12), st.integers(0, 40))
def test_draft_follows_an_earlier_occurrence(tokens: list[int], width: int, cut: int) -> None:
    draft = propose(array(*tokens), width)
    assert len(draft) in (0, width)
    run = tokens[-2:]
    places = [i + 2 for i in range(len(tokens) - 2) if tokens[i : i + 2] == run]
    rounds = [(tokens[place:] * width)[:width] for place in places]
    assert draft in rounds if len(run) == 2 and places else draft == []
    grown = NgramIndex()
    grown.propose(array(*tokens[:cut]), width)
    assert grown.propose(array(*tokens), width) == draft


class TestPredictedText:
    def test_text_is_followed_from_its_beginning(self) -> None:
        text = PredictedText([5, 6, 7, 8])
        assert text.propose(array(), 3) == [5, 6, 7]
        assert text.propose(array(5, 6), 3) == [7, 8]
        assert text.propose(array(5, 6, 7, 8), 3) == []

    def test_place_is_found_again_behind_an_edit(self) -> None:
        text = PredictedText([1, 2, 3, 4, 5, 6])
        assert text.propose(array(1, 2, 99), 2) == []
        assert text.propose(array(1, 2, 99, 4), 2) == []
        assert text.propose(array(1, 2, 99, 4, 5), 2) == [6]

    def test_longest_run_decides_between_equal_lines(self) -> None:
        lines = [1, 8, 9, 50, 2, 8, 9, 60]
        text = PredictedText(lines)
        assert text.propose(array(77, 2, 8, 9), 1) == [60]
        assert PredictedText(lines).propose(array(77, 1, 8, 9), 1) == [50]

    def test_answer_that_runs_beyond_the_text_may_begin_it_again(self) -> None:
        text = PredictedText([1, 2, 3])
        assert text.propose(array(1, 2, 3, 4), 2) == []
        assert text.propose(array(1, 2, 3, 4, 1, 2), 2) == [3]

    @given(st.lists(st.integers(0, 2), max_size=30), st.lists(st.integers(0, 2), max_size=30))
    def test_proposals_stand_in_the_text(self, expected: list[int], answer: list[int]) -> None:
        text = PredictedText(expected)
        for end in range(len(answer) + 1):
            draft = text.propose(array(*answer[:end]), 4)
            places = range(len(expected) - len(draft) + 1)
            assert any(expected[place : place + len(draft)] == draft for place in places)


class TestSpeculation:
    def test_expected_text_goes_before_ngrams(self) -> None:
        speculation = Speculation([4, 5], prompt_length=4)
        tokens = array(7, 7, 7, 7)
        assert speculation.propose(tokens, 2) == Draft(DraftKind.PREDICTION, [4, 5])
        lost = array(7, 7, 7, 7, 9, 7, 7)
        assert speculation.propose(lost, 2) == Draft(DraftKind.NGRAM, [9, 7])
        assert speculation.propose(lost, 2, looks_up=False) is None

    def test_rate_follows_the_outcome_of_its_source_and_is_forgotten(self) -> None:
        speculation = Speculation([1], prompt_length=0)
        first = speculation.rate_of(DraftKind.NGRAM, 20)
        speculation.learn(DraftKind.NGRAM, 4, 0, 20)
        low = speculation.rate_of(DraftKind.NGRAM, 21)
        assert low < first == speculation.rate_of(DraftKind.PREDICTION, 21)
        forgotten = speculation.rate_of(DraftKind.NGRAM, 221)
        assert low < forgotten == pytest.approx(first, rel=0.05)
        speculation.learn(DraftKind.NGRAM, 4, 4, 221)
        assert speculation.rate_of(DraftKind.NGRAM, 226) > first


class TestDraftLengths:
    def test_rows_that_cost_nothing_are_filled(self) -> None:
        lengths = DraftLengths(rows_at_once=16)
        assert lengths.choose(1, [(0.9, 15)]) == [15]
        assert lengths.choose(4, [(0.9, 15), (0.4, 15)]) == [11, 1]

    def test_rows_that_cost_as_much_as_they_yield_are_left_out(self) -> None:
        lengths = DraftLengths(rows_at_once=1)
        assert lengths.choose(1, [(0.9, 15)]) == [0]
        assert lengths.least_rate(8, 120) > 0.9

    def test_measured_times_decide_against_drafts(self) -> None:
        lengths = DraftLengths(rows_at_once=16)
        for _ in range(20):
            lengths.learn(4, 0, 1.0)
            lengths.learn(8, 4, 1.6)
        assert lengths.choose(4, [(0.9, 1)] * 4) == [1] * 4
        assert lengths.choose(4, [(0.5, 1)] * 4) == [0] * 4

    def test_a_slow_measurement_is_doubted_after_a_while(self) -> None:
        lengths = DraftLengths(rows_at_once=16)
        lengths.learn(1, 0, 1.0)
        lengths.learn(8, 7, 50.0)
        assert lengths.choose(1, [(0.9, 7)])[0] != 7
        for _ in range(200):
            lengths.learn(1, 0, 1.0)
        assert lengths.choose(1, [(0.9, 7)]) == [7]

    def test_size_between_measured_ones_is_estimated_by_a_line(self) -> None:
        """Else a large step that takes long would keep smaller ones from being tried."""
        lengths = DraftLengths(rows_at_once=16)
        lengths.learn(4, 0, 1.0)
        lengths.learn(16, 12, 4.0)
        assert lengths.slowdown(4, 16) == 4
        assert lengths.slowdown(4, 8) == pytest.approx(2)
        lengths.learn(8, 4, 1.0)
        assert lengths.slowdown(4, 8) == 1
        assert lengths.slowdown(4, 12) == pytest.approx(2.5)

    def test_clock_that_stands_still_changes_nothing(self) -> None:
        lengths = DraftLengths(rows_at_once=16)
        lengths.learn(1, 0, 0.0)
        lengths.learn(16, 15, 0.0)
        assert lengths.choose(1, [(0.9, 15)]) == [15]

    @given(
        st.integers(1, 8),
        st.lists(st.tuples(st.floats(0.01, 0.99), st.integers(0, 15)), max_size=8),
    )
    def test_no_draft_gets_more_tokens_than_it_has(
        self, others: int, drafts: list[tuple[float, int]]
    ) -> None:
        chosen = DraftLengths(32).choose(others + len(drafts), drafts)
        assert all(0 <= some <= most for some, (_, most) in zip(chosen, drafts, strict=True))

    def test_passes_of_a_draft_model_count(self) -> None:
        lengths = DraftLengths(rows_at_once=16)
        draft = MadeDraft(rate=0.9, most=8, rows=2)
        assert lengths.choose_made(1, [draft], lambda _: 0.0).lengths == [0]  # nothing is measured
        lengths.learn(1, 0, 1.0)
        cheap = lengths.choose_made(1, [draft], lambda _: 0.01)
        assert cheap.lengths == [8]
        assert cheap.seconds == pytest.approx(0.08)
        assert cheap.saved == pytest.approx(sum(0.9**n for n in range(1, 9)) - 0.08)
        [some] = lengths.choose_made(1, [draft], lambda _: 0.25).lengths
        assert 0 < some < 8
        assert lengths.choose_made(1, [draft], lambda _: 0.9).lengths == [0]

    def test_layers_of_a_head_make_all_tokens_in_one_pass(self) -> None:
        """A draft of any length costs one pass through all layers, so a poor draft is not made."""
        lengths = DraftLengths(rows_at_once=16)
        lengths.learn(1, 0, 1.0)
        draft = MadeDraft(rate=0.9, most=3, rows=4, further_rows=0)
        made = lengths.choose_made(1, [draft], lambda _: 0.5)
        assert (made.lengths, made.seconds) == ([3], 0.5)
        poor = MadeDraft(rate=0.3, most=3, rows=4, further_rows=0)
        assert lengths.choose_made(1, [poor], lambda _: 0.5).lengths == [0]

    def test_drafts_share_the_passes_of_a_draft_model(self) -> None:
        """Equally long drafts take fewer passes than one long draft of as many tokens."""
        lengths = DraftLengths(rows_at_once=8)
        lengths.learn(4, 0, 1.0)
        drafts = [MadeDraft(0.9 + 0.01 * i, 8, 1) for i in range(4)]
        assert lengths.choose_made(4, drafts, lambda _: 0.3).lengths == [1] * 4

    def test_unlikely_tokens_of_a_draft_model_are_not_made(self) -> None:
        lengths = DraftLengths(rows_at_once=8)
        lengths.learn(6, 0, 1.0)
        drafts = [MadeDraft(0.9, 8, 1), MadeDraft(0.1, 8, 1)]
        assert lengths.choose_made(6, drafts, lambda _: 0.01).lengths == [2, 0]
