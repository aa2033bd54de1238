"""Draft tokens by prompt lookup: rejected ones cost time."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from services.engine.scheduling.speculation import NgramIndex, Speculation


def array(*tokens: int) -> "np.ndarray[tuple[int], np.dtype[np.int32]]":
    return np.array(tokens, dtype=np.int32)


def propose(tokens: "np.ndarray[tuple[int], np.dtype[np.int32]]", width: int) -> list[int]:
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


def test_draft_grows_with_acceptance_and_pauses_after_rejections() -> None:
    speculation, tokens = Speculation(), array(4, 4, 4, 4)
    first = len(speculation.propose(tokens, 99))
    speculation.learn(first, first)
    assert len(speculation.propose(tokens, 99)) > first
    for _ in range(5):
        speculation.learn(len(speculation.propose(tokens, 99)), 0)
    assert speculation.propose(tokens, 99) == []
    assert any(speculation.propose(tokens, 99) for _ in range(50))
