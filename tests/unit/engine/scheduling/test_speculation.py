"""Bad guesses cost time, and guesses from the wrong place cost it for nothing."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from services.engine.scheduling.speculation import DraftLength, NgramIndex


def array(*tokens: int) -> "np.ndarray[tuple[int], np.dtype[np.int32]]":
    return np.array(tokens, dtype=np.int32)


def propose(tokens: "np.ndarray[tuple[int], np.dtype[np.int32]]", width: int) -> list[int]:
    return NgramIndex().propose(tokens, width)


def test_what_followed_before_is_guessed() -> None:
    assert propose(array(1, 2, 3, 4, 5, 6, 9, 1, 2, 3), 3) == [4, 5, 6]


def test_the_longest_run_decides_then_the_latest_place() -> None:
    assert propose(array(1, 2, 3, 7, 0, 2, 3, 8, 1, 2, 3), 1) == [7]
    assert propose(array(2, 3, 7, 0, 2, 3, 8, 1, 2, 3), 1) == [8]


def test_what_goes_round_is_guessed_to_go_on() -> None:
    assert propose(array(9, 5, 6, 7, 5, 6, 7, 5, 6), 7) == [7, 5, 6, 7, 5, 6, 7]
    assert propose(array(9, 4, 4, 4), 3) == [4, 4, 4]


def test_without_a_precedent_nothing_is_guessed() -> None:
    assert propose(array(1, 2, 3, 4), 4) == []
    assert propose(array(1), 4) == []


@given(st.lists(st.integers(0, 2), max_size=40), st.integers(1, 12), st.integers(0, 40))
def test_guesses_are_what_followed_an_earlier_run(tokens: list[int], width: int, cut: int) -> None:
    guess = propose(array(*tokens), width)
    assert len(guess) in (0, width)
    run = tokens[-2:]
    places = [i + 2 for i in range(len(tokens) - 2) if tokens[i : i + 2] == run]
    rounds = [(tokens[place:] * width)[:width] for place in places]
    assert guess in rounds if len(run) == 2 and places else guess == []
    grown = NgramIndex()
    grown.propose(array(*tokens[:cut]), width)
    assert grown.propose(array(*tokens), width) == guess


def test_width_grows_with_success_and_rests_after_failure() -> None:
    width = DraftLength()
    first = width.next()
    width.learn(first, first)
    assert width.next() > first
    for _ in range(5):
        width.learn(width.next(), 0)
    assert width.next() == 0
    assert any(width.next() for _ in range(50))
